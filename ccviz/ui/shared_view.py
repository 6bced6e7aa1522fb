"""The text with what two runs kept of it, token by token: an inline component.

Token texts reach the page as text nodes only, so text that looks like markup stays text.
"""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ccviz.ui.page import asset, plain

_component = st.components.v2.component(
    "ccviz_shared_view",
    html="<div class='view'>\n</div>",
    css=asset("shared_view.css"),
    js=asset("shared_view.js"),
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
