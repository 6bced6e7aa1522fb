"""What those who opened a watch link see: the runs of another, as they happen."""

from __future__ import annotations

import streamlit as st

from ccviz.ui.address import Channel, channels
from ccviz.ui.answers import answers_view
from ccviz.ui.comparison import small_players
from ccviz.ui.player import player
from ccviz.ui.server import find_job, runner
from ccviz.ui.status import job_status

POLL_SECONDS = 1.0


def watch(key: str) -> None:
    """Draw the page of who watches."""
    st.markdown("## Watching")
    st.caption("You see the runs of whoever gave you this link, as they happen. You can look around by yourself too.")
    _watch(key)


@st.fragment(run_every=POLL_SECONDS)
def _watch(key: str) -> None:
    channel = channels().get(key)
    job = find_job(channel.job) if channel is not None and channel.job else None
    if channel is None or job is None:
        st.info(
            "Nothing is shown under this link now. It begins by itself when its owner shows a run; if this lasts, ask "
            "them for a new link.",
            icon=":material/visibility:",
        )
        return
    if not job.ended:
        job_status(runner(), job)
    _show(channel)


def _show(channel: Channel) -> None:
    job = find_job(channel.job)
    traces = job.traces() if job is not None else {}
    if not traces:
        return
    answers_view(traces, key="watched_answers")
    if not any(len(trace.refreshes) for trace in traces.values()):
        return
    if len(traces) > 1:
        small_players(traces, channel.job, channel.view, channel.version)
        return
    trace = next(iter(traces.values()))
    player(trace, "watched_player", channel.view, channel.job, version=channel.version)
