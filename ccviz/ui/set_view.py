"""What a prompt set shows: how far it is, lengths and numbers by strategy, and every answer."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from ccviz import figures
from ccviz.errors import UserError
from ccviz.export import FIGURE_SUFFIXES, lengths_bytes
from ccviz.jobs import Runner
from ccviz.sets import PromptSet, SetRun
from ccviz.trace import Trace
from ccviz.ui.page import plain, show_problem
from ccviz.ui.results import lane_title
from ccviz.ui.status import duration

LIVE_SECONDS = 1.5
UNITS = {"tokens": "tokens", "characters": "characters"}
LAYOUTS = {"multiples": "one below the other", "overlaid": "overlaid"}


def show_set(runner: Runner, runs: dict[str, SetRun], prompts: PromptSet) -> None:
    """Draw a set: live while it is worked through, and at any other time what there is of it."""
    running = runs.get(prompts.folder.name)
    st.markdown(f"##### {plain(prompts.title)}")
    lanes = ", ".join(lane_title(name) for name in prompts.lanes)
    st.caption(plain(f"{len(prompts.items)} prompts · {prompts.spec.name} · {lanes}"))
    if running is not None and not running.ended:
        _live(running)
        return
    if running is not None and running.message:
        show_problem(running.message)
    pending = prompts.pending()
    if pending:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(
                "Resume",
                type="primary",
                icon=":material/play_arrow:",
                key="resume",
                on_click=_resume,
                args=(runner, runs, prompts),
            )
            st.markdown(f"**{len(prompts.items) - len(pending)}** of {len(prompts.items)} prompts are done.")
    results = prompts.results()
    if not len(results):
        st.caption("No results yet.")
        return
    _results(results)
    _answers(runner, prompts, results)


def _resume(runner: Runner, runs: dict[str, SetRun], prompts: PromptSet) -> None:
    runs[prompts.folder.name] = SetRun(runner, prompts)


@st.fragment(run_every=LIVE_SECONDS)
def _live(running: SetRun) -> None:
    if running.ended:
        st.rerun()
    with st.container(border=True):
        status, button = st.columns([5, 1], vertical_alignment="center")
        words = f"{running.done} of {running.total} prompts"
        left = running.seconds_left
        if left is not None:
            words += f" · about {duration(left)} left"
        elif running.job is not None and running.job.message:
            words += f" · {plain(running.job.message)}"
        status.progress(running.done / max(running.total, 1), words)
        button.button(
            "Stop",
            key="stop_set",
            on_click=running.stop,
            icon=":material/stop_circle:",
            width="stretch",
            help="What is done is kept; Resume goes on from there.",
        )
    results = running.prompts.results()
    if len(results):
        _results(results)
    else:
        st.caption("Numbers and pictures appear here with the first answers.")


def _results(results: pd.DataFrame) -> None:
    done = results[results["problem"].fillna("") == ""]
    failed = results[results["problem"].fillna("") != ""]
    if len(failed):
        count = failed["item"].nunique()
        first = failed.iloc[0]
        st.warning(
            f"{count} prompt{'s' if count > 1 else ''} could not be run. "
            + plain(f"The first, {first['item']}: {first['problem']}"),
            icon=":material/warning:",
        )
    if not len(done):
        return
    table = lane_table(done)
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            "strategy": st.column_config.TextColumn(pinned=True),
            "right, %": st.column_config.NumberColumn(help="Answers that hold the right one.", format="%.0f"),
            "tokens, median": st.column_config.NumberColumn(format="%.0f"),
            "characters, median": st.column_config.NumberColumn(format="%.0f"),
            "at the limit, %": st.column_config.NumberColumn(help="Answers cut by the length limit.", format="%.0f"),
            "seconds, mean": st.column_config.NumberColumn(help="Time of the batch a prompt took.", format="%.1f"),
            "peak, MB": st.column_config.NumberColumn(help="Most memory allocated for a cache.", format="%.1f"),
            "harm, nats": st.column_config.NumberColumn(
                help="Mean divergence (KL) of predictions from the full cache's.", format="%.3f"
            ),
        },
        alt="One row a strategy: prompts done, right answers, lengths, time, memory.",
    )
    with st.container(border=True):
        st.markdown("##### How long the answers are")
        with st.container(horizontal=True):
            unit = st.segmented_control(
                "In",
                list(UNITS),
                default="tokens",
                required=True,
                format_func=lambda name: UNITS[name],
                key="unit",
                bind="query-params",
            )
            layout = st.segmented_control(
                "Strategies",
                list(LAYOUTS),
                default="multiples",
                required=True,
                format_func=lambda name: LAYOUTS[name],
                key="layout",
                bind="query-params",
            )
        titled = done.assign(lane=done["lane"].map(lane_title))
        figure = figures.lengths(titled, unit, layout)
        summary = str(figure.layout.meta["summary"])
        st.plotly_chart(figure, key="lengths", alt=summary, config={"displaylogo": False})
        st.caption(plain(summary))
        with st.popover("Lengths as a file", icon=":material/download:"):
            for suffix in FIGURE_SUFFIXES:
                _download_lengths(titled, suffix, unit, layout)


def _download_lengths(table: pd.DataFrame, suffix: str, unit: str, layout: str) -> None:
    st.download_button(
        suffix[1:].upper(),
        lambda: lengths_bytes(table, suffix, unit, layout),
        f"ccviz-lengths{suffix}",
        None,
        key=f"download-lengths{suffix}",
        on_click="ignore",
        icon=":material/download:",
    )


def lane_table(done: pd.DataFrame) -> pd.DataFrame:
    """One row a lane: how many prompts, how often right, lengths, time, memory, harm."""
    rows = []
    for lane, of_lane in done.groupby("lane", sort=False):
        judged = of_lane["right"].dropna()
        row: dict[str, Any] = {
            "strategy": lane_title(str(lane)),
            "prompts": len(of_lane),
            "right, %": 100 * judged.astype(float).mean() if len(judged) else None,
            "tokens, median": of_lane["tokens"].median(),
            "characters, median": of_lane["characters"].median(),
            "at the limit, %": 100 * (of_lane["stop_reason"] == "length").mean(),
            "seconds, mean": of_lane["seconds"].mean(),
            "peak, MB": of_lane["peak_bytes"].max() / 1e6,
            "harm, nats": of_lane["mean_kl"].astype(float).mean(),
        }
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.drop(columns=[name for name in ("right, %", "harm, nats") if table[name].isna().all()])


def _answers(runner: Runner, prompts: PromptSet, results: pd.DataFrame) -> None:
    st.markdown("##### Every answer")
    shown = results[["item", "lane", "right", "tokens", "stop_reason", "text", "problem"]].copy()
    shown["lane"] = shown["lane"].map(lane_title)
    words = {"eos": "itself", "length": "length limit"}
    shown["stop_reason"] = shown["stop_reason"].map(lambda reason: words.get(reason, reason))
    empty = [name for name in ("right", "problem") if (shown[name].isna() | (shown[name] == "")).all()]
    st.dataframe(
        shown.drop(columns=empty),
        hide_index=True,
        height=320,
        column_config={
            "item": "prompt",
            "lane": "strategy",
            "stop_reason": "ended by",
            "text": st.column_config.TextColumn("answer", width="large"),
        },
        alt="Every answer of every strategy.",
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = [item.id for item in prompts.items if (results["item"] == item.id).any()]
        name = st.selectbox("Look into one prompt", names, key="set_item")
        if st.button("Open in Compare", icon=":material/compare_arrows:", key="open_item"):
            _open(runner, prompts, name)
    with st.container(horizontal=True):
        st.download_button(
            "Results (.csv)",
            lambda: results.to_csv(index=False).encode(),
            "ccviz-results.csv",
            "text/csv",
            on_click="ignore",
            icon=":material/download:",
        )
    st.caption(f"Kept in {plain(str(prompts.folder))}, with a trace of every run.")


def _open(runner: Runner, prompts: PromptSet, name: str) -> None:
    item = next(item for item in prompts.items if item.id == name)
    try:
        paths = {lane: prompts.trace_path(item, lane) for lane in prompts.lanes}
        traces = {lane: Trace.open(path) for lane, path in paths.items() if path.exists()}
        if not traces:
            raise UserError(f"There is no run of {name} to open: it could not be run.")
    except UserError as error:
        show_problem(str(error))
        return
    job = runner.adopt(traces)
    st.session_state["comparison"] = job.id
    st.switch_page("pages/compare.py", query_params={"comparison": job.id})
