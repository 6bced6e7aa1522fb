"""The Explore page: one prompt, one strategy, watched refresh by refresh."""

from __future__ import annotations

from typing import Any

import streamlit as st

from ccviz.errors import UserError
from ccviz.jobs import Job, Runner
from ccviz.models import ModelSpec
from ccviz.network import LanguageModel
from ccviz.prompts import Sample
from ccviz.runs import Request
from ccviz.settings import Settings
from ccviz.tokens import check_text, encode_prompt
from ccviz.trace import Trace
from ccviz.ui import controls, page, server
from ccviz.ui.kept import take_dropped, warn_of_leaving
from ccviz.ui.results import show_job
from ccviz.ui.status import model_status
from ccviz.ui.watch import watch


def main() -> None:
    """Draw the page."""
    page.begin("Explore")
    if "watch" in st.query_params:
        with st.sidebar:
            page.end()
        watch(st.query_params["watch"])
        return
    runner = server.runner()
    st.markdown("## Explore one run")
    sample = controls.choose_prompt()
    with st.sidebar:
        spec = controls.choose_model()
        model = runner.model(spec)
        place_of_status = st.container()
        strategy, options = controls.choose_strategy()
        full = strategy == "full"
        budgets = controls.choose_budgets(full)
        details = controls.choose_details()
        recordings = controls.choose_recordings([strategy], with_harm=False)
        page.end()
    plan = _Plan(model, budgets, details, full, recordings)
    _say(plan, full)
    with st.container(horizontal=True):
        page.asking_button("Run", key="run_button")
        controls.upload_prompt()
        _open_trace(runner)
    if page.asked("run_button"):
        _start(runner, spec, plan, strategy, options, details, sample)
    warn_of_leaving()
    dropped = take_dropped()
    if dropped:
        _select(server.find_job(dropped[0]))
    if sample is not None:
        st.caption(f"**What to look at.** {sample.look_at}")
    # Last, since both may end this pass and begin another, and a widget that is not drawn may forget its value.
    _show_run(runner)
    with place_of_status:
        model_status(runner, spec, model)


class _Plan:
    """What the settings come to for this prompt on this model, or the sentence that says why they cannot be used."""

    def __init__(
        self,
        model: LanguageModel | None,
        budgets: dict[str, Any],
        details: dict[str, Any],
        full: bool,
        recordings: dict[str, bool],
    ) -> None:
        self.model, self.budgets, self.details, self.full = model, budgets, details, full
        self.prompt = str(st.session_state.get("prompt") or "")
        self.prompt_size = self.system_size = 0
        self.settings: Settings | None = None
        self.problem = ""
        try:
            if model is not None and self.prompt.strip():
                encoded = encode_prompt(model.tokenizer, self.prompt, details["chat"], details["system"])
                self.prompt_size, self.system_size = len(encoded.token_ids), encoded.system_size
            self.settings = controls.make_settings(budgets, details, self.system_size, full, recordings)
        except UserError as error:
            self.problem = str(error)


def _say(plan: _Plan, full: bool) -> None:
    """One line: what the numbers mean for this prompt."""
    if plan.problem:
        page.show_problem(plan.problem)
        return
    model, settings = plan.model, plan.settings
    if not plan.prompt.strip():
        st.caption("Type a prompt or choose a sample; this line then says what the settings mean for it.")
        return
    if model is None or settings is None:
        st.caption("What these settings mean for the prompt is said here once the model is loaded.")
        return
    whole = (plan.prompt_size + settings.max_new_tokens - 1) * model.entry_bytes / 1e6
    parts = [
        f"**{plan.prompt_size}** prompt tokens",
        f"**{settings.prompt_refreshes(plan.prompt_size)}** refreshes before the answer starts",
    ]
    if full:
        parts.append(f"the full cache grows to at most **{whole:.1f} MB**")
    else:
        most = settings.most_entries(plan.prompt_size)
        parts.append(
            f"cache at most **{most}** entries = **{most * model.entry_bytes / 1e6:.1f} MB** "
            f"instead of up to {whole:.1f}"
        )
    st.markdown(" · ".join(parts))


def _start(
    runner: Runner,
    spec: ModelSpec,
    plan: _Plan,
    strategy: str,
    options: dict[str, Any],
    details: dict[str, Any],
    sample: Sample | None,
) -> None:
    try:
        check_text(plan.prompt)
        if plan.settings is None:
            raise UserError(plan.problem)
        request = Request(
            prompt=plan.prompt,
            settings=plan.settings,
            strategy=strategy,
            options=options,
            chat=details["chat"],
            system=details["system"],
            label=sample.title if sample else "",
            freeze_system=controls.freezes_system(plan.budgets),
        )
    except UserError as error:
        if not plan.problem:  # else it is on the page already
            page.show_problem(str(error))
        return
    _select(runner.submit(spec, {strategy: request}))
    st.rerun()


def _select(job: Job | None) -> None:
    """Make a job the one this page, and its address, is about."""
    if job is None:
        return
    st.session_state["run"] = st.query_params["run"] = job.id


def _open_trace(runner: Runner) -> None:
    with st.popover("Open a saved run", icon=":material/folder_open:"):
        st.file_uploader("A .ccviz file", type=["ccviz"], key="trace_upload", on_change=_read_trace, args=(runner,))
    if st.session_state.get("trace_problem"):
        page.show_problem(st.session_state.pop("trace_problem"))


def _read_trace(runner: Runner) -> None:
    file = st.session_state["trace_upload"]
    if file is None:
        return
    try:
        trace = Trace.open(file.getvalue())
        _select(runner.adopt({trace.strategy: trace}))
    except UserError as error:
        st.session_state["trace_problem"] = str(error).replace("the file", file.name, 1)


def _show_run(runner: Runner) -> None:
    job_id = st.query_params.get("run") or st.session_state.get("run")
    if job_id is None:
        with st.container(border=True):
            st.markdown("##### Nothing has run yet")
            st.caption(
                "Press Run. The answer appears word by word; below it grows a picture of the cache, one row a refresh, "
                "and then the text with every token marked kept or evicted."
            )
        return
    job = server.find_job(job_id)
    if job is None:
        st.info(
            "The run in this address is no longer in this server's library: it was deleted, or many runs came after. "
            "Press Run to make it again, or open a saved one.",
            icon=":material/history:",
        )
        return
    st.session_state["run"] = st.query_params["run"] = job.id
    show_job(runner, job)


main()
