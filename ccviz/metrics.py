"""Tables from traces: where entries stand in a picture, what became of each token, and sentences that say it.

Tables in, tables out; knows nothing of plotting, models or pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ccviz.errors import UserError
from ccviz.trace import Trace

ORDERS = ("rank", "position", "in place")


def survivors(trace: Trace) -> pd.DataFrame:
    """The entries that each refresh kept, refresh by refresh in position order (columns as `Trace.entries`)."""
    entries = trace.all_entries()
    return entries[entries["kept"]].sort_values(["refresh", "position"], kind="stable").reset_index(drop=True)


def slot_columns(trace: Trace, order: str = "position") -> pd.DataFrame:
    """`survivors` with a ``column``: the place of each entry in a heatmap's row.

    Parameters
    ----------
    trace
        A finished or partial run.
    order
        ``"rank"``: protected entries first, then by score, best first (as in the paper's Figure 4). ``"position"``:
        oldest first. ``"in place"``: an entry keeps its column while it lives; a new one takes the first free column.

    Raises
    ------
    UserError
        If the order is not one of these.
    """
    if order not in ORDERS:
        raise UserError(f"order must be one of {', '.join(map(repr, ORDERS))}, not {order!r}.")
    kept = survivors(trace)
    if order == "in place":
        return kept.assign(column=_columns_in_place(kept))
    if order == "rank":
        free = (kept["protected"] == "").to_numpy()
        kept = kept.assign(_free=free, _worse=np.where(free, -kept["score"].to_numpy(), 0.0))
        kept = kept.sort_values(["refresh", "_free", "_worse", "position"], kind="stable").drop(
            columns=["_free", "_worse"]
        )
    return kept.assign(column=kept.groupby("refresh").cumcount().astype("int32")).reset_index(drop=True)


def _columns_in_place(kept: pd.DataFrame) -> npt.NDArray[np.int32]:
    columns = np.empty(len(kept), np.int32)
    held: dict[int, int] = {}
    for rows in kept.groupby("refresh", sort=True).indices.values():
        positions = kept["position"].to_numpy()[rows]
        held = {position: held[position] for position in positions.tolist() if position in held}
        taken = set(held.values())
        free = (column for column in range(len(taken) + len(rows)) if column not in taken)
        for position in positions.tolist():
            if position not in held:
                held[position] = next(free)
        columns[rows] = [held[position] for position in positions.tolist()]
    return columns


def slot_grid(trace: Trace, order: str = "position") -> npt.NDArray[np.float32]:
    """The positions cached after each refresh, (refreshes, columns), NaN where a column is empty."""
    placed = slot_columns(trace, order)
    rows = len(trace.refreshes)
    grid = np.full((rows, int(placed["column"].max()) + 1 if len(placed) else 1), np.nan, np.float32)
    row_of = pd.Series(np.arange(rows), index=trace.refreshes["refresh"].to_numpy())
    grid[row_of[placed["refresh"]].to_numpy(), placed["column"].to_numpy()] = placed["position"].to_numpy()
    return grid


def token_states(trace: Trace, refresh: int) -> pd.DataFrame:
    """What has become of every token after one refresh.

    Returns
    -------
    DataFrame
        One row a position: position, text, generated, state ("kept", "evicted", "unseen"), score at this refresh,
        rank (1 is best, of those scored at this refresh; 0 where not), protected, and evicted_at (the refresh that
        evicted it, -1 where none has).

    Raises
    ------
    UserError
        If the trace has no such refresh.
    """
    known = trace.refreshes["refresh"].tolist()
    if refresh not in known:
        least, most = (min(known), max(known)) if known else (0, -1)
        raise UserError(
            f"This run has refreshes {least} to {most}, and none numbered {refresh}." if known else NO_REFRESH
        )
    entries = trace.all_entries()
    here = entries[entries["refresh"] == refresh].set_index("position")
    lost = entries[~entries["kept"] & (entries["refresh"] <= refresh)].set_index("position")["refresh"]
    table = trace.tokens[["position", "text", "generated"]].copy()
    position = table["position"]
    seen = int(trace.refreshes.loc[trace.refreshes["refresh"] == refresh, "tokens_seen"].iloc[0])
    kept = position.map(here["kept"]).fillna(False).astype(bool)
    table["state"] = np.where(kept, "kept", np.where(position < seen, "evicted", "unseen"))
    table["score"] = position.map(here["score"]).astype("float32")
    table["rank"] = position.map(here["score"][::-1].rank(ascending=False, method="first")).fillna(0).astype("int32")
    table["protected"] = position.map(here["protected"]).fillna("").astype("str")
    table["evicted_at"] = position.map(lost).fillna(-1).astype("int32")
    return table


def run_summary(trace: Trace) -> dict[str, Any]:
    """The numbers of a run that a reader asks for first."""
    refreshes, generated = trace.refreshes, int(trace.tokens["generated"].sum())
    seconds = trace.number("seconds")
    decoding = seconds - trace.number("prompt_seconds")
    return {
        "prompt_tokens": len(trace.tokens) - generated,
        "new_tokens": generated,
        "seconds": seconds,
        "prompt_seconds": seconds - decoding,
        "tokens_per_second": (generated - 1) / decoding if generated > 1 and decoding > 0 else 0.0,
        "refreshes": len(refreshes),
        "refresh_share": float(refreshes["seconds"].sum()) / seconds if seconds else 0.0,
        "peak_entries": _peak_entries(trace),
        "peak_bytes": int(refreshes["cache_bytes"].max()) if len(refreshes) else 0,
    }


def _peak_entries(trace: Trace) -> int:
    """The most entries the cache held: before a refresh, or at the end, after what was read since the last one."""
    generated = bool(trace.tokens["generated"].any())
    processed = len(trace.tokens) - generated  # the newest token of an answer is never processed
    if not len(trace.refreshes):
        return processed
    last = trace.refreshes.iloc[-1]
    at_end = int(last["size_after"]) + processed - int(last["tokens_seen"])
    return max(int(trace.refreshes["size_before"].max()), at_end)


# Several runs


def lane_names(traces: Sequence[Trace]) -> list[str]:
    """A name for each run: its strategy, with cache size, chunk size and a number only as far as they are needed."""
    names = [trace.strategy for trace in traces]
    for label, key in (("J", "cache_size"), ("h", "chunk_size")):
        taken = Counter(names)
        names = [
            f"{name} {label}={trace.number(key):.0f}" if taken[name] > 1 and trace.number(key) else name
            for name, trace in zip(names, traces, strict=True)
        ]
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def presence(trace: Trace) -> npt.NDArray[np.bool_]:
    """Which positions are cached after each refresh, (refreshes, tokens)."""
    there = np.zeros((len(trace.refreshes), len(trace.tokens)), bool)
    kept = trace.all_entries()
    kept = kept[kept["kept"]]
    row_of = pd.Series(np.arange(len(there)), index=trace.refreshes["refresh"].to_numpy())
    there[row_of[kept["refresh"]].to_numpy(), kept["position"].to_numpy()] = True
    return there


def survival_grid(trace: Trace) -> npt.NDArray[np.uint8]:
    """What has become of each position after each refresh, (refreshes, tokens): 0 not read yet, 1 kept, 2 lost."""
    read = np.arange(len(trace.tokens))[None] < trace.refreshes["tokens_seen"].to_numpy()[:, None]
    return np.where(presence(trace), 1, np.where(read, 2, 0)).astype(np.uint8)


def lifetimes(trace: Trace) -> pd.DataFrame:
    """When each token was lost: position, text, generated, evicted_at (refresh), tokens_seen_at_loss; -1 if never."""
    grid = survival_grid(trace)
    lost = grid == 2
    ever = lost.any(axis=0) if len(grid) else np.zeros(len(trace.tokens), bool)
    first = lost.argmax(axis=0) if len(grid) else np.zeros(len(trace.tokens), int)
    table = trace.tokens[["position", "text", "generated"]].copy()
    for column, source in (("evicted_at", "refresh"), ("tokens_seen_at_loss", "tokens_seen")):
        values = trace.refreshes[source].to_numpy()
        table[column] = np.where(ever, values[first] if len(values) else -1, -1).astype("int32")
    return table


REGIONS = ("frozen", "prompt", "generated")
YOUNGEST = 32  # tokens; each further bin of ages is twice as wide


def retention(trace: Trace, by: str) -> pd.DataFrame:
    """What share of the tokens seen is still cached, by part of the text or by age.

    Parameters
    ----------
    by
        ``"region"``: frozen, prompt, generated. ``"age"``: tokens back from the newest, 0-31, 32-63, 64-127, ...

    Returns
    -------
    DataFrame
        One row a refresh and group that has tokens: refresh, tokens_seen, group, seen, kept, share.

    Raises
    ------
    UserError
        If ``by`` is neither.
    """
    if by not in ("region", "age"):
        raise UserError(f"retention is by 'region' or 'age', not {by!r}.")
    there = presence(trace)
    regions = np.where(trace.tokens["generated"].to_numpy(), 2, 1)
    if trace.strategy != "full":
        regions[: int(trace.number("frozen_size"))] = 0
    rows = []
    for at, (refresh, seen) in enumerate(zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True)):
        if not seen:
            continue  # another program's first row, before it read anything
        if by == "region":
            groups, names = regions[:seen], list(REGIONS)
        else:
            age = seen - 1 - np.arange(seen)
            groups = np.maximum(np.floor(np.log2(np.maximum(age, 1) / YOUNGEST)).astype(int) + 1, 0)
            names = [_age_name(group) for group in range(int(groups.max()) + 1)]
        all_seen = np.bincount(groups, minlength=len(names))
        all_kept = np.bincount(groups[there[at, :seen]], minlength=len(names))
        rows += [
            (refresh, seen, name, int(all_seen[group]), int(all_kept[group]), all_kept[group] / all_seen[group])
            for group, name in enumerate(names)
            if all_seen[group]
        ]
    return pd.DataFrame(rows, columns=["refresh", "tokens_seen", "group", "seen", "kept", "share"])


def _age_name(group: int) -> str:
    return f"{YOUNGEST << (group - 1) if group else 0}-{(YOUNGEST << group) - 1}"


def _prompt_size(trace: Trace) -> int:
    return int((~trace.tokens["generated"]).sum())


def _row_at(trace: Trace, tokens_seen: int) -> int:
    """The row of the last refresh at or before a moment; -1 before the first."""
    return int(np.searchsorted(trace.refreshes["tokens_seen"].to_numpy(), tokens_seen, side="right")) - 1


def _shared_width(a: Trace, b: Trace, region: str) -> int:
    if region not in ("all", "prompt"):
        raise UserError(f"region must be 'all' or 'prompt', not {region!r}.")
    widest = max(len(a.tokens), len(b.tokens))
    return widest if region == "all" else min(_prompt_size(a), _prompt_size(b))


def _widened(there: npt.NDArray[np.bool_], width: int) -> npt.NDArray[np.bool_]:
    return np.pad(there, ((0, 0), (0, max(0, width - there.shape[1]))))[:, :width]


def _held(there: npt.NDArray[np.bool_], row: int, width: int) -> npt.NDArray[np.bool_]:
    """One row of a `presence`, (width,); nothing before the first refresh."""
    return _widened(there, width)[row] if row >= 0 else np.zeros(width, bool)


def overlap(a: Trace, b: Trace, region: str = "all") -> pd.DataFrame:
    """How many entries two caches share at each moment at which both were refreshed.

    Parameters
    ----------
    region
        ``"all"``, or ``"prompt"``: positions in the answer hold other words once the answers part, and this leaves
        them out.

    Returns
    -------
    DataFrame
        tokens_seen, both, only_a, only_b, and jaccard = both / (both + only_a + only_b); 1 where both are empty.

    Raises
    ------
    UserError
        If the region is neither.
    """
    width = _shared_width(a, b, region)
    moments = np.intersect1d(a.refreshes["tokens_seen"], b.refreshes["tokens_seen"])
    one = _widened(presence(a), width)[[_row_at(a, seen) for seen in moments]]
    other = _widened(presence(b), width)[[_row_at(b, seen) for seen in moments]]
    both, only_a, only_b = (one & other).sum(1), (one & ~other).sum(1), (~one & other).sum(1)
    union = both + only_a + only_b
    jaccard = np.where(union > 0, both / np.maximum(union, 1), 1.0)
    return pd.DataFrame({"tokens_seen": moments, "both": both, "only_a": only_a, "only_b": only_b, "jaccard": jaccard})


def overlap_matrix(traces: Mapping[str, Trace], tokens_seen: int, region: str = "all") -> pd.DataFrame:
    """The Jaccard index of every two caches, each after its last refresh at or before a moment; lanes by lanes."""
    names = list(traces)
    matrix = pd.DataFrame(np.eye(len(names)), index=names, columns=names)
    held = {name: presence(trace) for name, trace in traces.items()}
    for at, a in enumerate(names):
        for b in names[at + 1 :]:
            width = _shared_width(traces[a], traces[b], region)
            rows = [_row_at(traces[name], tokens_seen) for name in (a, b)]
            one, other = (_held(held[name], row, width) for name, row in zip((a, b), rows, strict=True))
            union = int((one | other).sum())
            matrix.loc[a, b] = matrix.loc[b, a] = (one & other).sum() / union if union else 1.0
    return matrix


def shared_states(a: Trace, b: Trace, tokens_seen: int) -> pd.DataFrame:
    """What two caches hold of the text at a moment, each after its last refresh at or before it.

    Returns
    -------
    DataFrame
        One row a position of ``a``: position, text, generated, state ("both", "only a", "only b", "neither",
        "unseen").
    """
    width = len(a.tokens)
    rows = _row_at(a, tokens_seen), _row_at(b, tokens_seen)
    one, other = (_held(presence(trace), row, width) for trace, row in zip((a, b), rows, strict=True))
    table = a.tokens[["position", "text", "generated"]].copy()
    seen = table["position"].to_numpy() < tokens_seen
    table["state"] = np.select([~seen, one & other, one, other], ["unseen", "both", "only a", "only b"], "neither")
    return table


def first_divergence(trace: Trace, reference: Trace) -> int | None:
    """The first token of the answer, from 0, that differs from the reference's; None where they are the same."""
    ours = trace.tokens.loc[trace.tokens["generated"], "token_id"].to_numpy()
    theirs = reference.tokens.loc[reference.tokens["generated"], "token_id"].to_numpy()
    common = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:common] != theirs[:common])
    if len(differs):
        return int(differs[0])
    return None if len(ours) == len(theirs) else common


def comparison(traces: Mapping[str, Trace], reference: Trace | None) -> pd.DataFrame:
    """The numbers of several runs, a row each.

    Parameters
    ----------
    reference
        The full cache's run on the same prompt, where there is one.

    Returns
    -------
    DataFrame
        lane, strategy, cache_size (NA for the full cache), new_tokens, characters, stop_reason, refreshes, seconds,
        refresh_share, peak_bytes, full_bytes (what the reference's cache took, or else what a full cache over the same
        tokens takes; NA where unknown), bytes_share, departs_at (see `first_divergence`; NA where the same or unknown),
        mean_kl and agreement (NA where not recorded).
    """
    rows = []
    for name, trace in traces.items():
        numbers = run_summary(trace)
        held = trace.number("entry_bytes") * (numbers["prompt_tokens"] + max(numbers["new_tokens"] - 1, 0))
        if reference is not None:
            held = run_summary(reference)["peak_bytes"]
        departs = first_divergence(trace, reference) if reference is not None and trace is not reference else None
        harm = trace.tokens[trace.tokens["generated"]] if "kl" in trace.tokens else None
        rows.append(
            {
                "lane": name,
                "strategy": trace.strategy,
                "cache_size": pd.NA if trace.strategy == "full" else int(trace.number("cache_size")),
                "new_tokens": numbers["new_tokens"],
                "characters": len(trace.text),
                "stop_reason": trace.stop_reason,
                "refreshes": numbers["refreshes"],
                "seconds": numbers["seconds"],
                "refresh_share": numbers["refresh_share"],
                "peak_bytes": numbers["peak_bytes"],
                "full_bytes": int(held) if held else pd.NA,
                "bytes_share": numbers["peak_bytes"] / held if held else pd.NA,
                "departs_at": pd.NA if departs is None else departs,
                "mean_kl": pd.NA if harm is None else float(harm["kl"].mean()),
                "agreement": pd.NA if harm is None else float(harm["agrees"].mean()),
            }
        )
    whole = ["cache_size", "full_bytes", "departs_at"]
    parts = ["bytes_share", "mean_kl", "agreement"]
    return pd.DataFrame(rows).astype({**dict.fromkeys(whole, "Int64"), **dict.fromkeys(parts, "Float64")})


def fidelity(trace: Trace) -> pd.DataFrame:
    """The harm to each prediction of a followed answer: step (from 0), position, text, kl in nats, agrees.

    Raises
    ------
    UserError
        If the run did not follow another's answer.
    """
    if "kl" not in trace.tokens:
        raise UserError(
            f"The run of {trace.strategy} did not record harm: run it with follow, so that it is fed another answer."
        )
    harm = trace.tokens.loc[trace.tokens["generated"], ["position", "text", "kl", "agrees"]].reset_index(drop=True)
    return harm.rename_axis("step").reset_index()


def lengths(runs: Iterable[tuple[str, Trace]]) -> pd.DataFrame:
    """How long answers are, a row a run: lane, tokens, characters, stop_reason."""
    rows = [
        (name, int(trace.tokens["generated"].sum()), len(trace.text), trace.stop_reason or "unknown")
        for name, trace in runs
    ]
    return pd.DataFrame(rows, columns=["lane", "tokens", "characters", "stop_reason"])


def score_table(trace: Trace, refresh: int) -> pd.DataFrame:
    """One refresh's entries with their texts: position, text, score, kept, protected, and surprise where recorded.

    Raises
    ------
    UserError
        If the trace has no such refresh.
    """
    token_states(trace, refresh)  # says what is wrong with the number
    entries = trace.all_entries()
    here = entries[entries["refresh"] == refresh].sort_values("position")
    columns = ["position", "text", "score", "kept", "protected"]
    columns += ["surprise"] if "surprise" in here else []
    return here.merge(trace.tokens[["position", "text"]], on="position")[columns]


# Sentences. Each says in words what a picture shows, for those who cannot see it and those who want to be sure.

NO_REFRESH = "No refresh yet: the run has not read as many tokens as one chunk holds."


def heatmap_sentence(trace: Trace) -> str:
    """What the heatmap shows, in one sentence."""
    if not len(trace.refreshes):
        return NO_REFRESH
    last = trace.refreshes.iloc[-1]
    seen, size = int(last["tokens_seen"]), int(last["size_after"])
    times = "1 refresh" if len(trace.refreshes) == 1 else f"{len(trace.refreshes)} refreshes"
    if seen == size:
        return f"After {times} the cache still holds all {seen} tokens seen: nothing was evicted."
    kept = survivors(trace)
    final = kept[kept["refresh"] == last["refresh"]]
    frozen = int((final["protected"] == "frozen").sum())
    free = final.loc[final["protected"] != "frozen", "position"]
    late = int((free >= seen / 2).sum())
    return (
        f"After {times} the cache holds {size} of {seen} tokens seen"
        f"{f', {frozen} of them frozen' if frozen else ''}; "
        f"{late} {'of the others ' if frozen else ''}come from the later half of the text."
    )


def survival_sentence(trace: Trace) -> str:
    """What the survival map shows, in one sentence."""
    if not len(trace.refreshes):
        return NO_REFRESH
    lost = lifetimes(trace)
    lost = lost[lost["evicted_at"] >= 0]
    seen = int(trace.refreshes["tokens_seen"].iloc[-1])
    if not len(lost):
        return f"None of the {seen} tokens seen was lost."
    answer = int(lost["generated"].sum())
    half = int(lost["tokens_seen_at_loss"].median())
    return (
        f"Of {seen} tokens seen {len(lost)} were lost"
        f"{f', {answer} of them from the answer' if answer else ''}; half of them by the time {half} had been seen."
    )


def scores_sentence(trace: Trace, refresh: int, column: str = "score") -> str:
    """What a picture of scores or surprise shows, in one sentence."""
    table = score_table(trace, refresh)
    kept, lost = table.loc[table["kept"], column].dropna(), table.loc[~table["kept"], column].dropna()
    if not len(kept) + len(lost):
        return "Nothing was scored at this refresh: nothing had to go."
    if not len(lost):
        return f"At this refresh all {len(table)} entries were kept."
    if column == "surprise":
        high = int((lost > kept.median()).sum()) if len(kept) else 0
        return f"Of the {len(lost)} tokens evicted here, {high} are more surprising than half of those that were kept."
    left = len(table) - len(lost)
    return f"Of {len(table)} entries {left} were kept; the best of those evicted scored {lost.max():.4g}."


def retention_sentence(traces: Mapping[str, Trace], by: str) -> str:
    """What the retention curves show, in one sentence."""
    group = "prompt" if by == "region" else _age_name(0)
    parts = []
    for name, trace in traces.items():
        table = retention(trace, by) if len(trace.refreshes) else pd.DataFrame({"group": []})
        last = table[table["group"] == group]
        if len(last):
            parts.append(f"{name} {last['share'].iloc[-1]:.0%}")
    what = "of the prompt" if by == "region" else f"of tokens of age {group}"
    return f"Share {what} still kept at the end: {', '.join(parts)}." if parts else NO_REFRESH


def overlap_sentence(matrix: pd.DataFrame, tokens_seen: int) -> str:
    """What the overlap matrix shows, in one sentence."""
    names, values = list(matrix.index), matrix.to_numpy()
    pairs = [(values[a, b], names[a], names[b]) for a in range(len(names)) for b in range(a + 1, len(names))]
    if not pairs:
        return "One run alone has nothing to share."
    most, least = max(pairs), min(pairs)
    text = f"After {tokens_seen} tokens {most[1]} and {most[2]} share most ({most[0]:.2f})"
    return f"{text}, {least[1]} and {least[2]} least ({least[0]:.2f})." if len(pairs) > 1 else f"{text}."


def fidelity_sentence(traces: Mapping[str, Trace]) -> str:
    """What the curves of harm show, in one sentence."""
    tables = {name: fidelity(trace) for name, trace in traces.items()}
    means = [
        f"{name} {table['kl'].mean():.3g} nats, {table['agrees'].mean():.0%} agree" for name, table in tables.items()
    ]
    return f"Mean divergence from the full cache: {'; '.join(means)}."


def lengths_sentence(table: pd.DataFrame, unit: str) -> str:
    """What the histograms of lengths show, in one sentence."""
    medians = [f"{name} {part[unit].median():.0f}" for name, part in table.groupby("lane", sort=False)]
    limit = int((table["stop_reason"] == "length").sum())
    return f"Median {unit}: {', '.join(medians)}; {limit} of {len(table)} answers stopped at the length limit."


def states_sentence(trace: Trace, refresh: int) -> str:
    """What the coloured text shows, in one sentence."""
    states = token_states(trace, refresh)
    count = states["state"].value_counts()
    seen = int(count.get("kept", 0) + count.get("evicted", 0))
    now = int((states["evicted_at"] == refresh).sum())
    text = (
        f"After {seen} tokens the cache holds {int(count.get('kept', 0))} and has lost {int(count.get('evicted', 0))}"
    )
    if now:
        text += f", {now} of them at this refresh"
    unseen = int(count.get("unseen", 0))
    return text + (f"; {unseen} had not been read yet." if unseen else ".")
