"""The Prompt sets page: many prompts under several strategies, with results that stay."""

from __future__ import annotations

import streamlit as st

from ccviz.errors import UserError
from ccviz.jobs import Runner
from ccviz.sets import Item, PromptSet, SetRun, items_of_files, items_of_lines, known_sets, new_folder, read_items
from ccviz.ui import controls, page, server
from ccviz.ui.kept import take_dropped
from ccviz.ui.lanes import Choices, choose_lanes
from ccviz.ui.page import plain
from ccviz.ui.set_view import show_set
from ccviz.ui.status import model_status

SOURCES = {"lines": "Paste lines", "files": "Upload files", "folder": "A folder or file on this machine"}
EXAMPLE = "What is the capital of Portugal?\nName three rivers.\nWrite a sentence about the sea."


def main() -> None:
    """Draw the page."""
    page.begin("Prompt sets")
    runner = server.runner()
    st.markdown("## Prompt sets")
    st.caption(
        "Many prompts under several strategies: how long the answers get, how often they are right, what it costs."
    )
    controls.prepare_settings()
    take_dropped()
    with st.sidebar:
        spec = controls.choose_model()
        model = runner.model(spec)
        place_of_status = st.container()
        choices = choose_lanes(spec)
    chosen = _choose_set()
    if chosen is None:
        _new_set(runner, choices)
    else:
        show_set(runner, server.set_runs(), chosen)
    with place_of_status:
        model_status(runner, spec, model)


def _choose_set() -> PromptSet | None:
    """Draw the list of sets; returns the chosen one, None for a new one. The choice is in the page's address."""
    state, address = st.session_state, st.query_params
    folders = {folder.name: folder for folder in known_sets()}
    if "next_set" in state:
        state["set"] = state.pop("next_set")
    elif "set" not in state and address.get("set"):
        state["set"] = address["set"] if address["set"] in folders else ""
        if not state["set"]:
            st.info("The set in this address is not on this machine.", icon=":material/history:")
    if not folders:
        address.pop("set", None)
        return None
    names = ["", *folders]
    if state.get("set") not in names:
        state["set"] = ""
    name = st.selectbox("Set", names, format_func=lambda name: name or "A new set", key="set", persist_state="session")
    if not name:
        address.pop("set", None)
        return None
    address["set"] = name
    try:
        return PromptSet.open(folders[name])
    except UserError as error:
        page.show_problem(str(error))
        return None


def _new_set(runner: Runner, choices: Choices) -> None:
    with st.container(border=True):
        st.markdown("##### A new set")
        title = st.text_input("Title", value="My prompts", key="set_title", persist_state="session")
        source = st.segmented_control(
            "Where the prompts come from",
            list(SOURCES),
            default="lines",
            required=True,
            format_func=lambda name: SOURCES[name],
            key="set_source",
            wrap=True,
        )
        try:
            items = _items(source)
            lanes = choices.lanes("A prompt.", "", choices.sizes_of(runner, "A prompt.")[1])
        except UserError as error:
            page.show_problem(str(error))
            return
        if items:
            runs = len(items) * len(lanes)
            st.markdown(f"**{len(items)}** prompts, **{len(lanes)}** strategies and sizes: **{runs}** answers")
            start = items[0].prompt[:120].replace("\n", " ")
            st.caption(f"The first begins: {plain(start)}{'…' if len(items[0].prompt) > 120 else ''}")
        else:
            st.caption("The strategies and budgets are those of the sidebar. Results stay on this machine.")
        pressed = st.button(
            "Run the set", type="primary", icon=":material/play_arrow:", key="run_set", disabled=not items
        )
    if pressed:
        _start(runner, choices, title, items)


def _items(source: str) -> list[Item]:
    if source == "lines":
        text = st.text_area(
            "One prompt a line", key="set_lines", height=160, placeholder=EXAMPLE, persist_state="session"
        )
        return items_of_lines(text)
    if source == "files":
        files = st.file_uploader(
            "A .jsonl or .csv with a column prompt (and answer, id, system), or several .txt files, one prompt each",
            type=["jsonl", "csv", "txt", "md"],
            accept_multiple_files=True,
            key="set_files",
        )
        return items_of_files([(file.name, file.getvalue()) for file in files]) if files else []
    path = st.text_input(
        "Path",
        key="set_path",
        placeholder="/home/me/prompts or /home/me/prompts.jsonl",
        help="A folder of .txt and .md files, a .jsonl, a .csv, or a .txt with one prompt a line.",
        persist_state="session",
    )
    return read_items(path.strip()) if path.strip() else []


def _start(runner: Runner, choices: Choices, title: str, items: list[Item]) -> None:
    try:
        lanes = choices.lanes("A prompt.", "", choices.sizes_of(runner, "A prompt.")[1])
        folder = new_folder(title.strip() or "set")
        made = PromptSet.create(folder, title.strip() or "Untitled", choices.spec, items, lanes, choices.follow)
    except UserError as error:
        page.show_problem(str(error))
        return
    server.set_runs()[folder.name] = SetRun(runner, made)
    st.session_state["next_set"] = folder.name
    st.rerun()


main()
