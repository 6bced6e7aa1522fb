"""Writes a .ccviz trace from scratch, without ccviz: what another engine has to do (see docs/trace-format.md)."""

import json
import zipfile

import pandas as pd

TEXT = ["The", " cat", " sat", " on", " the", " mat", " and", " watched", " the", " rain", "."]
J, H, PROMPT = 4, 2, 7  # cache size, chunk size, tokens of the prompt; the rest is the answer

tokens = pd.DataFrame({"position": range(len(TEXT)), "token_id": range(len(TEXT)), "text": TEXT})
tokens["generated"] = tokens["position"] >= PROMPT
tokens["logprob"] = float("nan")  # not recorded

# A sliding window: at every H tokens all entries but the newest J go. A refresh that evicts nothing is written too.
cache, refreshes, entries = [], [], []
for seen in range(1, len(TEXT)):  # the token that ends an answer is never processed
    cache.append(seen - 1)
    if seen % H == 0:
        refresh, before, kept = len(refreshes), cache, cache[-J:]
        phase = "prefill" if seen <= PROMPT else "decode"
        refreshes.append((refresh, seen, phase, len(before), len(kept), 0.0, 1024 * len(kept)))
        for slot, position in enumerate(before):
            entries.append((refresh, position, slot, float(position), position in kept, ""))
        cache = kept

named = ["refresh", "tokens_seen", "phase", "size_before", "size_after", "seconds", "cache_bytes"]
tables = {"tokens": tokens, "refreshes": pd.DataFrame(refreshes, columns=named)}
named = ["refresh", "position", "slot", "score", "kept", "protected"]
tables["entries"] = pd.DataFrame(entries, columns=named)
config = {"strategy": "my_window", "cache_size": J, "chunk_size": H, "model": "by hand", "stop_reason": "eos"}
with zipfile.ZipFile("window.ccviz", "w") as archive:
    archive.writestr("trace.json", json.dumps({"schema_version": 1, "config": config}))
    for name, table in tables.items():
        archive.writestr(f"{name}.parquet", table.to_parquet(index=False))
