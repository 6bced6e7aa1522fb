"""The library as pages have it, and files that are dropped on any page: they are kept there. Does without torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import streamlit as st

from ccviz.errors import UserError
from ccviz.library import Library
from ccviz.paths import data_folder
from ccviz.ui.page import asset, plain, show_problem

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
    """Listen for files dropped anywhere on the page; returns the ids of runs that were just dropped and kept."""
    with st.sidebar:  # where a component without a size leaves no gap in the page
        result = _component(key="drop", on_dropped_change=lambda: None)
    given = result.get("dropped")
    if not given:
        return []
    kept = keep_files(_files(given))
    if kept:
        st.toast(f"{_runs(len(kept))} added to the library.", icon=":material/inventory_2:")
    return kept


def keep_files(files: Iterable[tuple[str, bytes]]) -> list[str]:
    """Add files to the library, and say what is wrong with those that cannot be; returns the ids of the others."""
    kept = []
    for name, data in files:
        try:
            kept.append(library().add(data, name).id)
        except UserError as error:
            show_problem(str(error))
    return kept


def warn_of_leaving() -> None:
    """Say which runs the next one takes the place of, before it does."""
    held = library()
    if not len(held.cards()) >= held.most_runs - 1:
        return
    leaving = held.leaving(runs=1)
    if leaving:
        st.caption(
            f":material/inventory_2: The library is full ({held.most_runs} runs). The next run takes the place of "
            f"the oldest that is not pinned: {plain(leaving[0].title)}. Pin it in the library to keep it."
        )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _files(given: Any) -> Iterable[tuple[str, bytes]]:
    for file in given if isinstance(given, list) else []:
        if not isinstance(file, Mapping):
            continue
        try:
            yield str(file.get("name")), base64.b64decode(str(file.get("data")), validate=True)
        except binascii.Error:
            show_problem(f"{file.get('name')} did not arrive whole: drop it again.")
