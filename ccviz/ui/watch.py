"""What those who opened a watch link see: the runs of another, as they happen."""

from __future__ import annotations

import streamlit as st

from ccviz.jobs import Job
from ccviz.ui.address import Channel, channels
from ccviz.ui.answers import answers_view
from ccviz.ui.comparison import small_players
from ccviz.ui.player import player
from ccviz.ui.server import find_job, runner
from ccviz.ui.status import job_status, picture_seconds

POLL_SECONDS = 1.0


def watch(key: str) -> None:
    """Draw the page of who watches."""
    st.markdown("## Watching")
    st.caption("You see the runs of whoever gave you this link, as they happen. You can look around by yourself too.")
    channel = channels().get(key)
    job = find_job(channel.job) if channel is not None and channel.job else None
    _wait_for_news(key, channel, job is None or job.ended)
    if channel is None or job is None:
        st.info(
            "Nothing is shown under this link now. It begins by itself when its owner shows a run; if this lasts, ask "
            "them for a new link.",
            icon=":material/visibility:",
        )
    elif job.ended:
        _show(job, channel)
    else:
        _progress(job)
        st.fragment(_show, run_every=picture_seconds(job))(job, channel)


@st.fragment(run_every=POLL_SECONDS)
def _wait_for_news(key: str, shown: Channel | None, had_ended: bool) -> None:
    """Draw the page again when something else is shown, or what is shown has ended."""
    channel = channels().get(key)
    job = find_job(channel.job) if channel is not None and channel.job else None
    if channel != shown or (job is None or job.ended) != had_ended:
        st.rerun()


@st.fragment(run_every=POLL_SECONDS)
def _progress(job: Job) -> None:
    job_status(runner(), job)


def _show(job: Job, channel: Channel) -> None:
    traces = job.traces()
    if not traces:
        return
    answers_view(traces, key="watched_answers")
    if not any(len(trace.refreshes) for trace in traces.values()):
        return
    if len(traces) > 1:
        small_players(traces, job.id, channel.view, channel.version)
        return
    trace = next(iter(traces.values()))
    player(trace, "watched_player", channel.view, job.id, version=channel.version)
