"""The library as pages have it, and files that are dropped on any page: they are kept there. Does without torch."""

from __future__ import annotations

import base64
import binascii
import time

import streamlit as st

from ccviz.errors import UserError
from ccviz.library import Library
from ccviz.paths import data_folder
from ccviz.ui.page import asset, plain, show_problem

SHOWN_SECONDS = 30.0  # what was wrong with a dropped file

_component = st.components.v2.component(
    "ccviz_drop",
    html="<div class='drop' hidden>\n</div>",
    css=asset("drop.css"),
    js=asset("drop.js"),
)


def library() -> Library:
    """The runs that were kept, those of earlier servers too."""
    return _library(str(data_folder() / "runs"))


@st.cache_resource(max_entries=1, show_spinner=False)
def _library(folder: str) -> Library:
    return Library(folder)


def take_dropped() -> list[str]:
    """Listen for files dropped anywhere on the page; returns the ids of runs that were just dropped and kept.

    They are taken in by a callback, since the pass of the page after it may be cut short by another.
    """
    state = st.session_state
    with st.sidebar:  # where a component without a size leaves no gap in the page
        _component(key="drop", on_dropped_change=_keep_dropped)
    said_at, sentences = state.get("drop_problems", (0.0, []))
    if time.monotonic() - said_at < SHOWN_SECONDS:
        for sentence in sentences:
            show_problem(sentence)
    kept: list[str] = state.pop("dropped", [])
    if kept:
        st.toast(f"{_runs(len(kept))} added to the library.", icon=":material/inventory_2:")
    return kept


def _keep_dropped() -> None:
    kept, problems = [], []
    for file in st.session_state["drop"].get("dropped") or []:
        name = str(file.get("name"))
        try:
            kept.append(library().add(base64.b64decode(str(file.get("data")), validate=True), name).id)
        except UserError as error:
            problems.append(str(error))
        except binascii.Error:
            problems.append(f"{name} did not arrive whole: drop it again.")
    st.session_state["dropped"] = kept
    st.session_state["drop_problems"] = time.monotonic(), problems


def warn_of_leaving(runs: int = 1) -> None:
    """Say which of the kept runs the next ones take the place of, before they do."""
    leaving = library().next_to_go(runs)
    if leaving:
        more = f" and {len(leaving) - 1} more" if len(leaving) > 1 else ""
        st.caption(
            f":material/inventory_2: The library is full ({_runs(len(library().cards()))}). What runs next takes the "
            f"place of the oldest that is not pinned: {plain(leaving[0].title)}{more}. Pin it in the library to keep "
            "it."
        )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
