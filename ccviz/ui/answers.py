"""Answers side by side: an inline component, so that what a model wrote reaches the page as text nodes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from ccviz.metrics import first_divergence
from ccviz.trace import Trace
from ccviz.ui.page import asset
from ccviz.ui.results import lane_title, sample_of

ENDS = {"eos": "ended by itself", "length": "stopped at the length limit", "cancelled": "cancelled", "": "going on"}

_component = st.components.v2.component(
    "ccviz_answers",
    html="<div class='answers'>\n</div>",
    css=asset("answers.css"),
    js=asset("answers.js"),
)


def answers_view(traces: Mapping[str, Trace], key: str) -> None:
    """Draw the answers of all lanes, each with its first token that departs from the full cache's marked."""
    reference = next((trace for trace in traces.values() if trace.strategy == "full"), None)
    _component(key=key, data={"answers": [_card(name, trace, reference) for name, trace in traces.items()]})


def _card(name: str, trace: Trace, reference: Trace | None) -> dict[str, Any]:
    pieces = trace.tokens.loc[trace.tokens["generated"], "text"].tolist()
    shown = pieces[:-1] if trace.stop_reason == "eos" else pieces
    ended = trace.stop_reason and reference is not None and reference.stop_reason
    at = first_divergence(trace, reference) if ended and reference is not None and trace is not reference else None
    same = len(shown) if at is None else at
    note = [f"{len(pieces)} tokens", ENDS.get(trace.stop_reason, trace.stop_reason)]
    if trace.config.get("follows"):
        note = [f"was fed the answer of {lane_title(str(trace.config['follows']))}"]
    elif ended and trace is not reference:
        note.append("same answer as the full cache" if at is None else f"departs from the full cache at token {at + 1}")
    sample = sample_of(trace)
    right = sample.is_right(trace.text) if sample and trace.stop_reason and not trace.config.get("follows") else None
    verdict = "" if right is None or sample is None else f"✓ right: {sample.answer}" if right else "✗ wrong"
    return {
        "title": lane_title(name),
        "verdict": verdict,
        "right": bool(right),
        "before": "".join(shown[:same]),
        "departing": "".join(shown[same : same + 1]),
        "after": "".join(shown[same + 1 :]),
        "note": " · ".join(note),
    }
