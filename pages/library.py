"""The Library page: every run that was kept, to open, name, pin, take away and bring back."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

import streamlit as st

from ccviz.errors import UserError
from ccviz.library import Card
from ccviz.metrics import lane_names
from ccviz.ui import page, server
from ccviz.ui.kept import library, take_dropped
from ccviz.ui.page import plain
from ccviz.ui.results import lane_title

PAGE_SIZE = 20
ENDS = {"eos": "ended by itself", "length": "stopped at the length limit", "cancelled": "cancelled"}


def main() -> None:
    """Draw the page."""
    page.begin("Library")
    take_dropped()
    with st.sidebar:
        page.end()
    st.markdown("## Library")
    held = library()
    cards = held.cards()
    _say_bounds(cards)
    if st.session_state.get("library_problem"):
        page.show_problem(st.session_state.pop("library_problem"))
    _import()
    if not cards:
        with st.container(border=True):
            st.markdown("##### Nothing kept yet")
            st.caption(
                "Every run on Explore and Compare is kept here by itself when it has ended. Files of runs (.ccviz) can "
                "be added above, or dropped anywhere on a page."
            )
        return
    shown = _found(cards)
    _actions([card for card in cards if st.session_state.get(f"chosen-{card.id}")])
    _list(shown)


def _say_bounds(cards: list[Card]) -> None:
    held = library()
    size = sum(card.size for card in cards)
    st.caption(
        f"**{len(cards)}** of at most {held.most_runs} runs, **{size / 1e6:.1f}** of at most "
        f"{held.most_bytes / 1e6:.0f} MB, in {plain(str(held.folder))}. Runs are kept by themselves; where there is no "
        "room, the oldest that are not pinned go."
    )
    leaving = held.next_to_go()
    if leaving:
        names = ", ".join(plain(card.title) for card in leaving[:3])
        more = f" and {len(leaving) - 3} more" if len(leaving) > 3 else ""
        st.warning(f"Next to go, when another run is kept: {names}{more}. Pin what must stay.", icon=":material/keep:")


def _import() -> None:
    with st.popover("Add files", icon=":material/upload_file:"):
        st.file_uploader(
            "Runs saved as .ccviz, one or several",
            type=["ccviz"],
            accept_multiple_files=True,
            key="library_upload",
            on_change=_read_files,
        )
        st.caption("Or drop them anywhere on a page.")


def _read_files() -> None:
    files = st.session_state["library_upload"] or []
    problems = []
    for file in files:
        try:
            library().add(file.getvalue(), file.name)
        except UserError as error:
            problems.append(str(error))
    if problems:
        st.session_state["library_problem"] = " ".join(problems)


def _found(cards: list[Card]) -> list[Card]:
    words = st.text_input(
        "Find runs", key="library_search", bind="query-params", placeholder="Words of the prompt, a name or a strategy"
    )
    wanted = str(words or "").lower().split()

    def holds(card: Card) -> bool:
        text = " ".join((card.title, card.prompt, card.answer, card.strategy, lane_title(card.strategy), card.model))
        return all(word in text.lower() for word in wanted)

    found = [card for card in cards if holds(card)]
    found.sort(key=lambda card: not card.pinned)  # stable: pinned first, newest first within
    if not found:
        st.info(f"None of the {len(cards)} runs holds these words.", icon=":material/search_off:")
    return found


# What can be done with several


def _actions(chosen: list[Card]) -> None:
    ids = [card.id for card in chosen]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Compare",
            key="compare_chosen",
            icon=":material/compare_arrows:",
            disabled=len(ids) < 2,
            on_click=_compare,
            args=(ids,),
            help="Open the chosen runs side by side.",
        )
        st.download_button(
            "Export as .zip",
            lambda: library().archive(ids),
            "ccviz-runs.zip",
            "application/zip",
            key="export_chosen",
            on_click="ignore",
            icon=":material/download:",
            disabled=not ids,
        )
        with st.popover("Delete", icon=":material/delete:", disabled=not ids):
            st.caption(f"This cannot be undone: {len(ids)} {'run' if len(ids) == 1 else 'runs'} would be deleted.")
            st.button("Delete for good", type="primary", key="delete_chosen", on_click=_delete, args=(ids,))
        st.caption(f"{len(ids)} chosen" if ids else "Choose runs by the box before them.")
    if st.session_state.pop("go_compare", False):
        st.switch_page("pages/compare.py", query_params={"comparison": st.session_state["comparison"]})


def _delete(run_ids: list[str]) -> None:
    _try(lambda: library().delete(run_ids))


def _compare(run_ids: list[str]) -> None:
    try:
        traces = [library().open(run_id) for run_id in run_ids]
    except UserError as error:
        st.session_state["library_problem"] = str(error)
        return
    job = server.runner().adopt(dict(zip(lane_names(traces), traces, strict=True)))
    st.session_state["comparison"] = job.id
    st.session_state["go_compare"] = True


# The list


def _list(cards: list[Card]) -> None:
    pages = max(1, -(-len(cards) // PAGE_SIZE))
    at = 1
    if pages > 1:
        st.session_state["library_page"] = min(int(st.session_state.get("library_page") or 1), pages)
        at = int(st.number_input(f"Page, of {pages}", 1, pages, key="library_page", width=160))
    for card in cards[(at - 1) * PAGE_SIZE : at * PAGE_SIZE]:
        _row(card)


def _row(card: Card) -> None:
    with st.container(border=True):
        head = st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute")
        with head:
            with st.container(horizontal=True, width="stretch", vertical_alignment="center"):
                spoken = re.sub(r"[^\w\s]+", " ", card.title).strip() or "run"  # a label is Markdown, and is read aloud
                st.checkbox(f"Choose {spoken}", key=f"chosen-{card.id}", label_visibility="collapsed", width="content")
                st.markdown(f"**{plain(card.title)}**")
            with st.container(horizontal=True, width="content", vertical_alignment="center"):
                st.page_link(
                    "app.py",
                    label="Open",
                    icon=":material/open_in_new:",
                    query_params={"run": card.id},
                    width="content",
                )
                st.button(
                    "Unpin" if card.pinned else "Pin",
                    icon=":material/keep_off:" if card.pinned else ":material/keep:",
                    key=f"pin-{card.id}",
                    on_click=_pin,
                    args=(card,),
                    type="tertiary",
                    help="Pinned runs never go by themselves.",
                )
                with st.popover("Rename", icon=":material/edit:", type="tertiary"):
                    st.text_input(
                        "Name", card.name, key=f"name-{card.id}", on_change=_rename, args=(card.id,), max_chars=80
                    )
        what = [lane_title(card.strategy)]
        if card.strategy != "full":
            what.append(f"J = {card.cache_size}, h = {card.chunk_size}")
        what += [plain(card.model), f"{card.tokens:,} tokens", f"{card.refreshes} refreshes"]
        what += [ENDS.get(card.stop_reason, ""), _day(card.saved), f"{card.size / 1e3:,.0f} KB"]
        st.caption((":material/keep: pinned · " if card.pinned else "") + " · ".join(part for part in what if part))
        st.text(_short(f"{_short(card.prompt, 90)} → {_short(card.answer, 90)}", 200))


def _pin(card: Card) -> None:
    _try(lambda: library().pin(card.id, not card.pinned))


def _rename(run_id: str) -> None:
    _try(lambda: library().rename(run_id, str(st.session_state[f"name-{run_id}"] or "")))


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except UserError as error:
        st.session_state["library_problem"] = str(error)


def _short(text: str, most: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _day(saved: str) -> str:
    try:
        return datetime.fromisoformat(saved).astimezone().strftime("%d %b %Y, %H:%M")
    except ValueError:
        return ""


main()
