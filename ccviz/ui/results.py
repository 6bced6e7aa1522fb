"""What a run shows while it goes on and when it has ended: answer, heatmap, text, table, downloads."""

from __future__ import annotations

import re
from collections.abc import Callable

import pandas as pd
import streamlit as st

from ccviz import figures
from ccviz.export import FIGURE_SUFFIXES, figure_bytes, table_bytes
from ccviz.jobs import Job, Runner, State
from ccviz.metrics import NO_REFRESH, run_summary, token_states
from ccviz.prompts import Sample, load_sample, sample_names
from ccviz.strategies import strategy_class, strategy_names
from ccviz.trace import Trace
from ccviz.ui.address import current_view, remember, share, show_to_watchers
from ccviz.ui.page import plain, show_problem
from ccviz.ui.player import View, player
from ccviz.ui.status import POLL_SECONDS, job_head, picture_seconds

COLUMN_HELP = {
    "position": "The token's place in the whole text, from 0.",
    "text": "What the token says.",
    "state": "kept: in the cache after this refresh; evicted: seen and gone; unseen: not read yet.",
    "score": "What the strategy gave it at this refresh; higher is kept.",
    "rank": "1 is the best score at this refresh; empty where nothing was scored.",
    "protected": "Kept without ranking: frozen, recent or last.",
    "evicted_at": "The refresh that evicted it.",
}


def show_job(runner: Runner, job: Job) -> None:
    """Draw a job: live while it goes on, in full once it has ended."""
    show_to_watchers(job.id)
    if job.ended:
        _finished(job)
    else:
        _live(runner, job)


# While it goes on


def _live(runner: Runner, job: Job) -> None:
    _live_head(runner, job)
    st.fragment(_live_player, run_every=picture_seconds(job))(job)


@st.fragment(run_every=POLL_SECONDS)
def _live_head(runner: Runner, job: Job) -> None:
    if job.ended:
        st.rerun()
    with st.container(border=True):
        job_head(runner, job)
        trace = job.trace()
        st.caption("Answer so far")
        st.text((trace.text if trace is not None else "") or "…")


def _live_player(job: Job) -> None:
    trace = job.trace()
    if trace is None:
        return
    with st.container(border=True):
        st.markdown("##### What the cache held, so far")
        if len(trace.refreshes):
            remembered_player(trace, "live_player", job.id)
        else:
            st.caption("A picture of the cache grows here, one row a refresh.")


# When it has ended


def _finished(job: Job) -> None:
    trace = job.trace()
    if job.note:
        st.warning(plain(job.note), icon=":material/inventory_2:")
    if job.state is State.FAILED:
        show_problem(job.message)
    if trace is None:
        if job.state is State.CANCELLED:
            st.info(plain(job.message) or "Cancelled.")
        return
    if job.state is State.CANCELLED:
        st.info("Cancelled. Below is what there was until then.", icon=":material/stop_circle:")
    _answer(trace)
    if not len(trace.refreshes):
        st.info(f"{NO_REFRESH} Choose a smaller chunk size h to see one.")
        _downloads(trace)
        return
    _pictures(trace, job.id)
    _downloads(trace)


def _answer(trace: Trace) -> None:
    numbers = run_summary(trace)
    sample = sample_of(trace)
    with st.container(border=True):
        head = st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center")
        head.markdown("##### Answer")
        right = sample.is_right(trace.text) if sample and numbers["new_tokens"] else None
        if right is not None and sample is not None:
            if right:
                head.badge(f"right: {sample.answer}", icon=":material/check:", color="green")
            else:
                head.badge(f"expected: {sample.answer}", icon=":material/close:", color="red")
        st.text(trace.text or "No token was generated.")
        ended = {"eos": "ended by itself", "length": "stopped at the length limit", "cancelled": "cancelled"}
        parts = [f"{numbers['prompt_tokens']} prompt tokens read in {numbers['prompt_seconds']:.1f} s"]
        written = f"{numbers['new_tokens']} tokens written"
        if numbers["tokens_per_second"]:
            written += f", {numbers['tokens_per_second']:.1f} a second"
        parts.append(written)
        parts.append(f"refreshes took {numbers['refresh_share']:.0%} of the time")
        parts.append(f"cache at most {numbers['peak_entries']} entries, {numbers['peak_bytes'] / 1e6:.1f} MB allocated")
        parts.append(ended.get(trace.stop_reason, plain(trace.stop_reason)))
        st.caption(" · ".join(parts))


def lane_title(name: str) -> str:
    """What people read for a lane's name: "heavy_hitter J=64" is "Heavy hitter · J = 64"."""
    strategy, _, rest = name.partition(" ")
    title = strategy_class(strategy).title if strategy in strategy_names() else strategy
    return f"{title} · {rest.replace('=', ' = ')}" if rest else title


def sample_of(trace: Trace) -> Sample | None:
    """The sample a run was made from, as its label says."""
    titles = {load_sample(name).title: name for name in sample_names()}
    name = titles.get(str(trace.config.get("label")))
    return load_sample(name) if name else None


@st.fragment
def _pictures(trace: Trace, job_id: str) -> None:
    with st.container(border=True):
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.markdown("##### What the cache held, and what became of the text")
            place = st.container(width="content")
        view = remembered_player(trace, "player", job_id)
        with place:  # drawn after the player, whose view is in the link
            share(job_id)
    refreshes = trace.refreshes["refresh"].tolist()
    shown = refreshes[min(view.refresh or len(refreshes), len(refreshes)) - 1]
    if "surprise" in trace.entries:
        with st.expander("Surprise at this refresh", icon=":material/scatter_plot:"):
            _surprise(trace, shown)
    with st.expander("The tokens as a table", icon=":material/table_rows:"):
        _table(trace, shown)


def remembered_player(trace: Trace, key: str, job_id: str) -> View:
    """Draw a run's player; what it shows is in the page's address, so that a link shows the same."""
    view = player(trace, key, current_view(job_id), job_id)
    remember(key, job_id, view)
    return view


def _surprise(trace: Trace, refresh: int) -> None:
    figure = figures.surprise(trace, refresh)
    summary = str(figure.layout.meta["summary"])
    st.plotly_chart(figure, key="surprise", alt=summary, config={"displaylogo": False})
    st.caption(summary)


def _table(trace: Trace, refresh: int) -> None:
    states = token_states(trace, refresh)
    table = states[states["state"] != "unseen"].drop(columns=["generated"])
    table["rank"] = table["rank"].astype("Int32").where(table["rank"] > 0)
    lost = table["evicted_at"].astype("Int32")
    table["evicted_at"] = (lost + 1).where(lost >= 0)
    table["text"] = table["text"].map(lambda text: repr(text)[1:-1])
    titles = {"text": "token", "evicted_at": "evicted at refresh"}
    config = {name: st.column_config.Column(titles.get(name, name), help=COLUMN_HELP[name]) for name in COLUMN_HELP}
    st.dataframe(
        pd.DataFrame(table),
        hide_index=True,
        height=360,
        column_config=config,
        alt="Every token read so far with its state, score and rank at the chosen refresh.",
    )


# Files


def _downloads(trace: Trace) -> None:
    name = "ccviz-" + re.sub(r"\W+", "-", trace.strategy)
    row = st.container(horizontal=True)
    with row:
        _download("Trace (.ccviz)", trace.to_bytes, f"{name}.ccviz", "application/zip", "trace")
        _download("Entries (.csv)", lambda: table_bytes(trace, ".csv"), f"{name}.csv", "text/csv", "csv")
        if not len(trace.refreshes):
            return
        for kind in ("heatmap", "overlay", "survival", "scores"):
            with st.popover(f"{kind.capitalize()} as a file", icon=":material/download:"):
                for suffix in FIGURE_SUFFIXES:
                    _download_figure(trace, kind, suffix, f"{name}-{kind}{suffix}")


def _download_figure(trace: Trace, kind: str, suffix: str, file_name: str) -> None:
    def make() -> bytes:
        view = View.read(st.query_params)
        refreshes = trace.refreshes["refresh"].tolist()
        shown = min(view.refresh or len(refreshes), len(refreshes))
        return figure_bytes(trace, kind, suffix, view.order, refreshes[shown - 1])

    _download(suffix[1:].upper(), make, file_name, None, f"{kind}{suffix}")


def _download(label: str, make: Callable[[], bytes], file_name: str, mime: str | None, key: str) -> None:
    st.download_button(
        label, make, file_name, mime, key=f"download-{key}", on_click="ignore", icon=":material/download:"
    )
