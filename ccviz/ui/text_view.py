"""The text of a run, each token coloured by what became of it: an inline component (html, css, js).

Token texts reach the page as text nodes only, so text that looks like markup stays text.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from ccviz.metrics import states_sentence, token_states
from ccviz.trace import Trace
from ccviz.ui.page import asset, plain

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


def shared_view(states: pd.DataFrame, a: str, b: str, key: str) -> None:
    """Draw the text with what two runs kept of it.

    Parameters
    ----------
    states
        From `metrics.shared_states`.
    a, b
        What the two are called.
    key
        The component's key on the page.
    """
    classes = {"both": "both", "only a": "a", "only b": "b", "neither": "neither", "unseen": "unseen"}
    words = {
        "both": "kept by both",
        "a": f"only by A, {a}",
        "b": f"only by B, {b}",
        "neither": "by neither",
        "unseen": "not read yet",
    }
    count = states["state"].value_counts()
    summary = ", ".join(f"{words[code]}: {int(count.get(state, 0))}" for state, code in classes.items())
    _component(
        key=key,
        data={
            "texts": states["text"].tolist(),
            "states": [classes[state] for state in states["state"]],
            "words": words,
            "answer": len(states) if "generated" not in states else int((~states["generated"]).sum()),
            "summary": summary,
        },
    )
    st.caption(f"Tokens {plain(summary)}.")
