"""The text of a run, each token coloured by its score at one refresh: an inline component (html, css, js).

Token texts reach the page as text nodes only, so text that looks like markup stays text.
"""

from __future__ import annotations

import numpy as np
import streamlit as st

from ccviz.metrics import states_sentence, token_states
from ccviz.trace import Trace
from ccviz.ui.page import asset

_CODES = {"kept": "k", "evicted": "e", "unseen": "u"}

_component = st.components.v2.component(
    "ccviz_text_view",
    html="<div class='view'>\n</div>",
    css=asset("text_view.css"),
    js=asset("text_view.js"),
)


def text_view(trace: Trace, refresh: int, key: str) -> None:
    """Draw the text after one refresh.

    Parameters
    ----------
    trace
        A finished or partial run with at least one refresh.
    refresh
        Which refresh, as numbered in the trace.
    key
        The component's key on the page.
    """
    states = token_states(trace, refresh)
    scored = max(int(states["rank"].max()), 1)
    rank = states["rank"].to_numpy()
    shade = np.where(rank > 0, np.round(100 * (1 - (rank - 1) / scored)), 0).astype(int)
    _component(
        key=key,
        data={
            "texts": states["text"].tolist(),
            "states": "".join(_CODES[state] for state in states["state"]),
            "shade": shade.tolist(),
            "scores": [None if np.isnan(score) else round(float(score), 4) for score in states["score"]],
            "ranks": rank.tolist(),
            "scored": scored if rank.any() else 0,
            "protected": {
                int(p): word for p, word in zip(states["position"], states["protected"], strict=True) if word
            },
            "lost": {
                int(p): int(r) + 1 for p, r in zip(states["position"], states["evicted_at"], strict=True) if r >= 0
            },
            "answer": int((~states["generated"]).sum()),
            "refresh": refresh + 1,
            "summary": states_sentence(trace, refresh),
        },
    )
