"""What every page begins and ends with, and what all of them draw with. Imports nothing heavy: no torch, no plotly."""

from __future__ import annotations

import re
from pathlib import Path

import streamlit as st

from ccviz.version import __version__

PAGES = {
    "app.py": ("Explore", ":material/search:"),
    "pages/compare.py": ("Compare", ":material/compare_arrows:"),
    "pages/prompt_sets.py": ("Prompt sets", ":material/list_alt:"),
    "pages/classroom.py": ("Classroom", ":material/school:"),
    "pages/library.py": ("Library", ":material/inventory_2:"),
    "pages/guide.py": ("How to read it", ":material/menu_book:"),
}


def begin(title: str) -> None:
    """Set the page up and draw the sidebar's head; call it first on every page."""
    st.set_page_config(page_title=f"{title} · ccviz", page_icon=str(Path(__file__).parent / "icon.png"), layout="wide")
    with st.sidebar:
        st.markdown("### ccviz")
        st.caption("See what a KV cache remembers.")
        for path, (label, icon) in PAGES.items():
            st.page_link(path, label=label, icon=icon)


def end() -> None:
    """The sidebar's foot."""
    with st.sidebar:
        st.caption(f"ccviz {__version__} · method: [arXiv 2607.27600](https://arxiv.org/abs/2607.27600)")


def asking_button(label: str, key: str) -> None:
    """A button that starts something; ask `asked` for whether it was pressed.

    A pass of the page can be cut short by another before it comes to act on a pressed button, which by then is
    forgotten; this one is remembered until it was asked for.
    """
    st.button(
        label,
        type="primary",
        icon=":material/play_arrow:",
        key=key,
        on_click=lambda: st.session_state.update({f"asked-{key}": True}),
    )


def asked(key: str) -> bool:
    """Whether the button of this key was pressed, once."""
    return bool(st.session_state.pop(f"asked-{key}", False))


def plain(text: str) -> str:
    """Text for those of Streamlit's elements that read Markdown, with everything they would read escaped."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


def show_problem(sentence: str) -> None:
    """One sentence about what went wrong; it may quote what the user gave."""
    st.error(plain(sentence), icon=":material/error:")


def asset(name: str) -> str:
    """A text file that lies beside this module or in a folder there (a component's html, css or js)."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
