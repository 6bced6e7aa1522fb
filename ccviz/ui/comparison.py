"""What a comparison shows: answers, a table, and one look at a time into what the caches held."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ccviz import figures
from ccviz.animation import ANIMATION_SUFFIXES, animation_bytes
from ccviz.drawing import STYLES
from ccviz.export import FIGURE_SUFFIXES, figure_bytes
from ccviz.jobs import Job, Runner, State
from ccviz.metrics import NO_REFRESH, ORDERS, comparison, shared_states
from ccviz.trace import Trace
from ccviz.ui.address import current_view, remember, share, show_to_watchers
from ccviz.ui.answers import answers_view
from ccviz.ui.page import plain, show_problem
from ccviz.ui.player import View, player
from ccviz.ui.results import lane_title, sample_of
from ccviz.ui.shared_view import shared_view
from ccviz.ui.status import POLL_SECONDS, job_head, picture_seconds

LOOKS = {
    "caches": "What each cache held",
    "step": "Step through two",
    "overlap": "Who keeps what",
    "loss": "When it was lost",
    "harm": "Harm to predictions",
    "surprise": "Surprise",
}
ORDER_TITLES = {"rank": "by score rank", "position": "by position", "in place": "in place"}
REGIONS = {"all": "whole text", "prompt": "prompt only"}
TABLE_TITLES = {
    "lane": ("strategy", "The strategy, and its cache size where there are several."),
    "right": ("right", "Whether the answer holds the sample's right answer."),
    "new_tokens": ("tokens", "Tokens of the answer."),
    "characters": ("characters", "Characters of the answer."),
    "ended": ("ended by", "itself, the length limit, or Cancel."),
    "refreshes": ("refreshes", "How often the cache was cut down."),
    "seconds": ("seconds", "Time of the batch in which this strategy ran: strategies of one size run together."),
    "refresh_percent": ("refreshing, %", "The share of that time that scoring and evicting took for this strategy."),
    "peak_mb": ("peak, MB", "The most memory allocated for the cache."),
    "percent_of_full": ("of full, %", "That memory against a full cache over the same tokens."),
    "departs_at": ("departs at", "The first token of the answer that differs from the full cache's, from 1."),
    "mean_kl": ("harm, nats", "Mean divergence (KL) of predictions from the full cache's; 0 is none."),
    "agreement_percent": ("agree, %", "How often the most likely next token is that of the full cache."),
}


def show_comparison(runner: Runner, job: Job) -> None:
    """Draw a job of several lanes: live while it goes on, in full once it has ended."""
    show_to_watchers(job.id)
    if job.ended:
        _finished(job)
    else:
        _live(runner, job)


def _live(runner: Runner, job: Job) -> None:
    _live_head(runner, job)
    st.fragment(_live_pictures, run_every=picture_seconds(job))(job)


@st.fragment(run_every=POLL_SECONDS)
def _live_head(runner: Runner, job: Job) -> None:
    if job.ended:
        st.rerun()
    with st.container(border=True):
        job_head(runner, job)


def _live_pictures(job: Job) -> None:
    traces = job.traces()
    if not traces:
        return
    answers_view(traces, key="live_answers")
    if any(len(trace.refreshes) for trace in traces.values()):
        order = st.session_state.get("compare_order") or "position"
        small_players(traces, job.id, replace(View(), order=order), ORDERS.index(order))
        show_to_watchers(job.id)


def _finished(job: Job) -> None:
    traces = job.traces()
    if job.note:
        st.warning(plain(job.note), icon=":material/inventory_2:")
    if job.state is State.FAILED:
        show_problem(job.message)
        traces = {name: trace for name, trace in traces.items() if trace.tokens["generated"].any()}
    if not traces:
        if job.state is State.CANCELLED:
            st.info(plain(job.message) or "Cancelled.")
        return
    if job.state is State.CANCELLED:
        st.info("Cancelled. Below is what there was until then.", icon=":material/stop_circle:")
    if len({trace.prompt_text for trace in traces.values()}) > 1:
        st.info(
            "These runs read different prompts, so the same position holds different words in them: compare how much "
            "they keep, not which words.",
            icon=":material/info:",
        )
    st.markdown("##### Answers")
    answers_view(traces, key="answers")
    _table(traces)
    if any(len(trace.refreshes) for trace in traces.values()):
        _looks(traces, job.id)
    else:
        st.info(f"{NO_REFRESH} Choose a smaller chunk size h to see one.")
    _downloads(traces)


# The table


def comparison_table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """One row a lane, in the units that people read: MB, percent, places from 1."""
    reference = next((trace for trace in traces.values() if trace.strategy == "full"), None)
    table = comparison(traces, reference)
    samples = {name: sample_of(trace) for name, trace in traces.items()}
    right = [
        sample.is_right(traces[name].text) if sample and not traces[name].config.get("follows") else None
        for name, sample in samples.items()
    ]
    words = {"eos": "itself", "length": "length limit", "cancelled": "Cancel"}
    shown = pd.DataFrame(
        {
            "lane": [lane_title(name) for name in table["lane"]],
            "right": pd.Series(["" if value is None else "yes" if value else "no" for value in right], dtype="object"),
            "new_tokens": table["new_tokens"],
            "characters": table["characters"],
            "ended": [words.get(reason, reason) for reason in table["stop_reason"]],
            "refreshes": table["refreshes"],
            "seconds": table["seconds"],
            "refresh_percent": 100 * table["refresh_share"],
            "peak_mb": table["peak_bytes"] / 1e6,
            "percent_of_full": 100 * table["bytes_share"].astype("Float64"),
            "departs_at": table["departs_at"].astype("Int64") + 1,
            "mean_kl": table["mean_kl"].astype("Float64"),
            "agreement_percent": 100 * table["agreement"].astype("Float64"),
        }
    )
    optional = ("right", "departs_at", "percent_of_full", "mean_kl", "agreement_percent")
    return shown.drop(columns=[name for name in optional if (shown[name].isna() | shown[name].eq("")).all()])


def _table(traces: Mapping[str, Trace]) -> None:
    table = comparison_table(traces)
    formats = {"seconds": "%.1f", "refresh_percent": "%.1f", "peak_mb": "%.1f", "percent_of_full": "%.0f"}
    formats |= {"mean_kl": "%.3f", "agreement_percent": "%.0f"}
    config: dict[str, Any] = {}
    for name in table.columns:
        title, about = TABLE_TITLES[name]
        if pd.api.types.is_numeric_dtype(table[name]):
            config[name] = st.column_config.NumberColumn(title, help=about, format=formats.get(name))
        else:
            config[name] = st.column_config.TextColumn(title, help=about, pinned=name == "lane")
    st.dataframe(
        table,
        hide_index=True,
        column_config=config,
        alt="One row a strategy: answer length, how it ended, refreshes, time, memory.",
    )


# One look at a time: what is not looked at is not drawn


@st.fragment
def _looks(traces: Mapping[str, Trace], job_id: str) -> None:
    there = ["caches", "step", "overlap", "loss"] if len(traces) > 1 else ["caches", "loss"]
    there += ["harm"] if any("kl" in trace.tokens for trace in traces.values()) else []
    there += ["surprise"] if _observed(traces) else []
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom"):
        look = st.segmented_control(
            "What to look at",
            there,
            default="caches",
            required=True,
            format_func=lambda name: LOOKS[name],
            key="look",
            bind="query-params",
            wrap=True,
        )
        place = st.container(width="content")
    with st.container(border=True):
        draw: dict[str, Callable[[Mapping[str, Trace]], None]] = {
            "caches": partial(_caches, job_id=job_id),
            "step": partial(_step, job_id=job_id),
            "overlap": _overlap,
            "loss": _loss,
            "harm": _harm,
            "surprise": _surprise,
        }
        draw[look](traces)
    with place:  # drawn last, since what is looked at is in the link
        share(job_id)


def _caches(traces: Mapping[str, Trace], job_id: str) -> None:
    """A small player for each lane, all in step: one scale of colours, one refresh, one pinned token."""
    order = st.segmented_control(
        "Order of the slots",
        ORDERS,
        default="position",
        required=True,
        format_func=lambda name: ORDER_TITLES[name],
        key="compare_order",
        bind="query-params",
        wrap=True,
    )
    view = replace(current_view(job_id), order=order)
    for key, shown in small_players(traces, job_id, view, ORDERS.index(order)).items():
        remember(key, job_id, replace(shown, order=View.order))


def small_players(traces: Mapping[str, Trace], job_id: str, view: View, version: int) -> dict[str, View]:
    """Draw a heatmap of each run, locked in step; returns what each shows, by its key.

    ``view`` is applied again whenever ``version`` changes.
    """
    last, shared = _shared(traces)
    st.caption(
        "One row a refresh, from top to bottom; one cell an entry that was kept. Blue is the beginning of the text, "
        f"red its end, on one scale for all: position 0 to {last:,}. Click a cell to pin its token in every picture."
    )
    places = _grid(len(traces))
    rows = max(len(trace.refreshes) for trace in traces.values())
    shown = {}
    for at, (name, trace) in enumerate(traces.items()):
        with next(places):
            key = f"small-player-{at}"
            shown[key] = player(
                trace,
                key,
                view,
                f"{job_id}-{name}",
                version=version,
                title=lane_title(name),
                parts="map",
                group=job_id,
                shared=shared,
                last_position=last,
                rows=rows,
            )
    return shown


def _step(traces: Mapping[str, Trace], job_id: str) -> None:
    """Two players side by side, locked in step."""
    names = list(traces)
    bounded = [name for name in names if traces[name].strategy != "full"]
    chosen = (bounded if len(bounded) > 1 else names)[:2]
    last, shared = _shared(traces)
    for at, place in enumerate(st.columns(2)):
        with place:
            default = names.index(chosen[at])
            label = ("Left", "Right")[at]
            name = st.selectbox(
                label, names, default, format_func=lane_title, key=f"step_{label.lower()}", bind="query-params"
            )
            key = f"step-player-{at}"
            shown = player(
                traces[name],
                key,
                current_view(job_id),
                f"{job_id}-{name}",
                title=lane_title(name),
                group=job_id,
                shared=shared,
                last_position=last,
            )
            remember(key, job_id, shown)


def _shared(traces: Mapping[str, Trace]) -> tuple[int, int]:
    """The last position of any, and how many positions hold the same words in all."""
    texts = [trace.tokens["text"].tolist() for trace in traces.values()]
    prompts = {trace.prompt_text for trace in traces.values()}
    same = min(int((~trace.tokens["generated"]).sum()) for trace in traces.values()) if len(prompts) == 1 else 0
    return max(max(map(len, texts)) - 1, 1), same


def _overlap(traces: Mapping[str, Trace]) -> None:
    region = st.segmented_control(
        "Count entries of the",
        list(REGIONS),
        default="all",
        required=True,
        format_func=lambda name: REGIONS[name],
        key="region",
        bind="query-params",
        help="Once two answers part, the same position holds another word; the prompt is the same for all.",
    )
    moments = sorted({int(seen) for trace in traces.values() for seen in trace.refreshes["tokens_seen"]})
    at = _choose_moment(moments)
    matrix, curve = st.columns([1, 1])
    with matrix:
        st.markdown("**How much two caches share at this moment**")
        _chart(figures.overlap_matrix(_titled(traces), at, region), "overlap-matrix")
    with curve:
        st.markdown("**How much each shares with one of them, over time**")
        bounded = [name for name, trace in traces.items() if trace.strategy != "full"] or list(traces)
        reference = st.selectbox(
            "Compare with", bounded, format_func=lane_title, key="overlap_reference", label_visibility="collapsed"
        )
        _chart(figures.overlap_curve(_titled(traces), lane_title(reference), region), "overlap-curve")
    st.caption(
        "Shared is the Jaccard index: of the entries that at least one of the two holds, the part that both hold. "
        "1 means the same entries, 0 none in common."
    )
    st.markdown("**Kept by one, by the other, by both, by neither**")
    names = list(traces)
    bounded = [name for name in names if traces[name].strategy != "full"]
    first, second = (bounded if len(bounded) > 1 else names)[:2]
    one, other = st.columns(2)
    a = one.selectbox("A", names, index=names.index(first), format_func=lane_title, key="lane_a")
    b = other.selectbox("B", names, index=names.index(second), format_func=lane_title, key="lane_b")
    shared_view(shared_states(traces[a], traces[b], at), lane_title(a), lane_title(b), key="shared_view")


def _choose_moment(moments: list[int]) -> int:
    if len(moments) < 2:
        return moments[0] if moments else 0
    return int(
        st.select_slider(
            "Moment, in tokens seen",
            moments,
            value=moments[-1],
            key=f"moment-{moments[0]}-{moments[-1]}-{len(moments)}",
        )
    )


def _loss(traces: Mapping[str, Trace]) -> None:
    st.markdown("**When each token was lost**")
    st.caption(
        "A column a token of the text, a row a refresh: where the colour of a column changes, its token was lost."
    )
    last = max(max(len(trace.tokens) for trace in traces.values()) - 1, 1)
    places = _grid(len(traces))
    for at, (name, trace) in enumerate(traces.items()):
        with next(places):
            st.markdown(f"**{plain(lane_title(name))}**")
            if len(trace.refreshes):
                _chart(figures.survival(trace, last), f"survival-{at}")
    by = st.segmented_control(
        "What is still kept, by",
        ["region", "age"],
        default="region",
        required=True,
        format_func=lambda name: {"region": "part of the text", "age": "age of the token"}[name],
        key="retention",
        bind="query-params",
    )
    _chart(figures.retention(_titled(traces), by), "retention")


def _harm(traces: Mapping[str, Trace]) -> None:
    measured = {name: trace for name, trace in traces.items() if "kl" in trace.tokens}
    st.caption(
        "Every strategy was fed the full cache's answer. Above: how far its prediction of each token is from the full "
        "cache's, in nats (0 is none). Below: how often both expect the same token, so far."
    )
    _chart(figures.fidelity(_titled(measured)), "fidelity")


def _surprise(traces: Mapping[str, Trace]) -> None:
    observed = _observed(traces)
    name = st.selectbox("Strategy", list(observed), format_func=lane_title, key="surprise_lane")
    trace = observed[name]
    count = len(trace.refreshes)
    shown = st.slider("Refresh", 1, count, count, key=f"surprise_refresh-{name}") if count > 1 else 1
    _chart(figures.surprise(trace, int(trace.refreshes["refresh"].iloc[shown - 1])), "surprise")


def _observed(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """The runs that recorded surprise; those that evict come first."""
    names = [name for name, trace in traces.items() if "surprise" in trace.entries and len(trace.refreshes)]
    return {name: traces[name] for name in sorted(names, key=lambda name: traces[name].strategy == "full")}


def _titled(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """The runs by the names that people read."""
    return {lane_title(name): trace for name, trace in traces.items()}


def _grid(count: int) -> Any:
    """Places for ``count`` pictures, two a row."""
    for _ in range(0, count, 2):
        yield from st.columns(2)


def _chart(figure: go.Figure, key: str) -> None:
    summary = str(figure.layout.meta["summary"])
    st.plotly_chart(figure, key=f"chart-{key}", alt=summary, config={"displaylogo": False})
    st.caption(plain(summary))


# Files


def _downloads(traces: Mapping[str, Trace]) -> None:
    kinds = _kinds(traces)
    with st.container(horizontal=True):
        _download("All runs (.zip)", lambda: _zip(traces), "ccviz-comparison.zip", "application/zip")
        _download(
            "Table (.csv)",
            lambda: comparison_table(traces).to_csv(index=False).encode(),
            "ccviz-comparison.csv",
            "text/csv",
        )
        if not kinds:
            return
        with st.popover("Figures as files", icon=":material/download:"):
            kind = st.selectbox("Figure", list(kinds), format_func=lambda name: kinds[name], key="export_kind")
            style = st.selectbox("For", STYLES, key="export_style", format_func=lambda name: name.capitalize())
            for suffix in FIGURE_SUFFIXES:
                _download_figure(traces, kind, suffix, style)
        with st.popover("Animation", icon=":material/animation:"):
            st.caption("The caches filling up, one frame a refresh. Takes a few seconds to make.")
            for suffix in ANIMATION_SUFFIXES:
                _download_animation(traces, suffix)


def _kinds(traces: Mapping[str, Trace]) -> dict[str, str]:
    """The figures there are for these runs."""
    if not _with_refreshes(traces):
        return {}
    kinds = {"heatmap": "What each cache held", "survival": "When each token was lost", "retention": "What is kept"}
    if len(traces) > 1:
        kinds["overlap"] = "Who keeps what"
    kinds["lengths"] = "Lengths of the answers"
    if any("kl" in trace.tokens for trace in traces.values()):
        kinds["fidelity"] = "Harm to predictions"
    if _observed(traces):
        kinds["surprise"] = "Surprise"
    return kinds


def _with_refreshes(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    return {name: trace for name, trace in traces.items() if len(trace.refreshes)}


def _download_figure(traces: Mapping[str, Trace], kind: str, suffix: str, style: str) -> None:
    drawn = _shown_in(traces, kind)
    _download(
        suffix[1:].upper(),
        lambda: figure_bytes(drawn, kind, suffix, order=_order(), style=style),
        f"ccviz-{kind}{suffix}",
        None,
    )


def _shown_in(traces: Mapping[str, Trace], kind: str) -> dict[str, Trace]:
    """The runs that a kind of figure can show."""
    if kind == "surprise":
        observed = _observed(traces)
        chosen = st.session_state.get("surprise_lane")
        name = chosen if chosen in observed else next(iter(observed))
        return {name: observed[name]}
    if kind == "fidelity":
        return {name: trace for name, trace in traces.items() if "kl" in trace.tokens}
    return dict(traces) if kind == "lengths" else _with_refreshes(traces)


def _download_animation(traces: Mapping[str, Trace], suffix: str) -> None:
    _download(
        suffix[1:].upper(),
        lambda: animation_bytes(_with_refreshes(traces), suffix, _order()),
        f"ccviz-animation{suffix}",
        None,
    )


def _order() -> str:
    return str(st.session_state.get("compare_order") or "position")


def _zip(traces: Mapping[str, Trace]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, trace in traces.items():
            plain_name = re.sub(r"[^\w=]+", "-", name)
            archive.writestr(f"{plain_name}.ccviz", trace.to_bytes())
    return buffer.getvalue()


def _download(label: str, make: Callable[[], bytes], file_name: str, mime: str | None) -> None:
    st.download_button(
        label, make, file_name, mime, key=f"download-{file_name}", on_click="ignore", icon=":material/download:"
    )
