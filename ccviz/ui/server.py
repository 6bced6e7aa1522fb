"""What belongs to the server rather than to a page or a visitor: the runner with its one model, and the prompt sets."""

from __future__ import annotations

import streamlit as st

from ccviz.jobs import Runner
from ccviz.sets import SetRun


@st.cache_resource(max_entries=1, show_spinner=False)
def runner() -> Runner:
    """The server's runner: it holds the one loaded model and all runs, whichever page or browser began them."""
    return Runner()


@st.cache_resource(max_entries=1, show_spinner=False)
def set_runs() -> dict[str, SetRun]:
    """The prompt sets that this server works through, or has, by the name of their folder."""
    return {}
