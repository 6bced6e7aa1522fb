"""The Compare page: one prompt under several strategies and cache sizes, side by side."""

from __future__ import annotations

import streamlit as st

from ccviz.errors import UserError
from ccviz.jobs import Job, Runner
from ccviz.metrics import lane_names
from ccviz.network import LanguageModel
from ccviz.prompts import Sample
from ccviz.runs import Request
from ccviz.strategies import make_strategy
from ccviz.tokens import check_text
from ccviz.trace import Trace
from ccviz.ui import controls, page, server
from ccviz.ui.comparison import show_comparison
from ccviz.ui.kept import library, take_dropped, warn_of_leaving
from ccviz.ui.lanes import Choices, choose_lanes
from ccviz.ui.status import model_status


def main() -> None:
    """Draw the page."""
    page.begin("Compare")
    runner = server.runner()
    st.markdown("## Compare strategies")
    sample = controls.choose_prompt()
    with st.sidebar:
        spec = controls.choose_model()
        model = runner.model(spec)
        place_of_status = st.container()
        choices = choose_lanes(spec)
    lanes = _planned(runner, choices, sample)
    with st.container(horizontal=True):
        page.asking_button("Run all", key="run_all")
        controls.upload_prompt()
        _open_traces(runner)
    if page.asked("run_all") and lanes:
        _select(runner.submit(spec, lanes, choices.follow))
        st.rerun()
    warn_of_leaving(max(len(lanes), 1))
    _open_dropped(runner, take_dropped())
    if sample is not None:
        st.caption(f"**What to look at.** {sample.look_at}")
    # Last, since both may end this pass and begin another, and a widget that is not drawn may forget its value.
    _show(runner)
    with place_of_status:
        model_status(runner, spec, model)


def _planned(runner: Runner, choices: Choices, sample: Sample | None) -> dict[str, Request]:
    """The lanes to run, with a line on what they come to; none, and what is wrong, if they cannot be run."""
    prompt = str(st.session_state.get("prompt") or "")
    try:
        check_text(prompt)
        size, system_size = choices.sizes_of(runner, prompt)
        lanes = choices.lanes(prompt, sample.title if sample else "", system_size)
    except UserError as error:
        page.show_problem(str(error))
        return {}
    model = runner.model(choices.spec)
    if model is None:
        st.caption("What these settings mean for the prompt is said here once the model is loaded.")
    else:
        st.markdown(" · ".join(_plan(list(lanes.values()), size, model)))
    return lanes


def _plan(lanes: list[Request], prompt_size: int, model: LanguageModel) -> list[str]:
    first = lanes[0].settings
    parts = [
        f"**{prompt_size}** prompt tokens",
        f"**{first.prompt_refreshes(prompt_size)}** refreshes before the answers start",
        f"**{len(lanes)}** run{'s' if len(lanes) > 1 else ''} at once",
    ]
    bounded = [lane.settings for lane in lanes if make_strategy(lane.strategy).evicts]
    if bounded:
        most = sorted({settings.most_entries(prompt_size) for settings in bounded})
        held = [f"{entries * model.entry_bytes / 1e6:.1f}" for entries in most]
        parts.append(f"each bounded cache at most **{' or '.join(held)} MB**")
    if len(bounded) < len(lanes):
        whole = (prompt_size + first.max_new_tokens - 1) * model.entry_bytes / 1e6
        parts.append(f"the full cache at most **{whole:.1f} MB**")
    return parts


def _select(job: Job) -> None:
    """Make a job the one this page, and its address, is about."""
    st.session_state["comparison"] = st.query_params["comparison"] = job.id


def _open_traces(runner: Runner) -> None:
    with st.popover("Open saved runs", icon=":material/folder_open:"):
        st.file_uploader(
            "One or several .ccviz files",
            type=["ccviz"],
            accept_multiple_files=True,
            key="traces_upload",
            on_change=_read_traces,
            args=(runner,),
        )
    if st.session_state.get("traces_problem"):
        page.show_problem(st.session_state.pop("traces_problem"))


def _read_traces(runner: Runner) -> None:
    traces = []
    for file in st.session_state["traces_upload"] or []:
        try:
            traces.append(Trace.open(file.getvalue()))
        except UserError as error:
            st.session_state["traces_problem"] = str(error).replace("the file", file.name, 1)
            return
    if traces:
        _select(_together(runner, traces))


def _open_dropped(runner: Runner, run_ids: list[str]) -> None:
    if run_ids:
        _select(_together(runner, [library().open(run_id) for run_id in run_ids]))


def _together(runner: Runner, traces: list[Trace]) -> Job:
    return runner.adopt(dict(zip(lane_names(traces), traces, strict=True)))


def _show(runner: Runner) -> None:
    job_id = st.query_params.get("comparison") or st.session_state.get("comparison")
    if job_id is None:
        with st.container(border=True):
            st.markdown("##### Nothing has run yet")
            st.caption(
                "Press Run all. The strategies read the prompt together and answer side by side; below their answers "
                "stand a table, what each cache held, who kept what, and when it was lost."
            )
        return
    job = server.find_job(job_id)
    if job is None:
        st.info(
            "The comparison in this address is no longer in this server's library: it was deleted, or many runs came "
            "after. "
            "Press Run all to make it again, or open saved runs.",
            icon=":material/history:",
        )
        return
    _select(job)
    show_comparison(runner, job)


main()
