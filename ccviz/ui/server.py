"""What belongs to the server rather than to a page or a visitor: its runner with the one model, and its jobs."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from ccviz.jobs import Job, Runner
from ccviz.sets import SetRun
from ccviz.trace import Trace
from ccviz.ui.kept import library


@st.cache_resource(max_entries=1, show_spinner=False)
def runner() -> Runner:
    """The server's runner: it holds the one loaded model and all runs, whichever page or browser began them."""
    return Runner(keep=_keep)


def _keep(job_id: str, traces: Mapping[str, Trace]) -> None:
    library().save(traces, job_id)


def find_job(job_id: str) -> Job | None:
    """The job of this id, from memory or from the library; None where neither has it."""
    job = runner().get(job_id)
    if job is not None:
        return job
    traces = library().find(job_id)
    return runner().adopt(traces, job_id) if traces else None


@st.cache_resource(max_entries=1, show_spinner=False)
def set_runs() -> dict[str, SetRun]:
    """The prompt sets that this server works through, or has, by the name of their folder."""
    return {}
