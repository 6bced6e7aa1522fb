"""What is happening, in words and bars: a model that loads, a run that goes on."""

from __future__ import annotations

import streamlit as st

from ccviz.jobs import Job, Runner, State
from ccviz.models import ModelSpec
from ccviz.network import LanguageModel
from ccviz.strategies import strategy_class
from ccviz.ui import page
from ccviz.ui.page import plain

POLL_SECONDS = 0.5
LEAST_PICTURE_SECONDS = 1.0


def model_status(runner: Runner, spec: ModelSpec, model: LanguageModel | None) -> None:
    """Say what the loaded model is; or begin to load it, and say what is happening."""
    if model is not None:
        dtype = str(model.dtype).removeprefix("torch.")
        st.caption(f"{model.device.type.upper()}, {dtype} · {model.entry_bytes / 1e3:.0f} KB of cache a token")
        return
    job = runner.prepare(spec)
    if job.state is State.FAILED:
        page.show_problem(job.message)
        st.button("Try again", on_click=runner.retry, args=(spec,), key="retry")
        return
    _wait_for_model(job)


@st.fragment(run_every=POLL_SECONDS)
def _wait_for_model(job: Job) -> None:
    if job.ended:
        st.rerun()
    st.caption(page.plain(job.message) or "Waiting for the model.")
    st.progress(0.5 if job.state is State.LOADING else 0.0)


def picture_seconds(job: Job) -> float:
    """Seconds between two pictures of a run that goes on; they should take no more than about 2 MB a second."""
    size = 0.0
    for request in job.requests.values():
        settings = request.settings
        words = request.prompt if not isinstance(request.prompt, str) else request.prompt[::4]  # about a token each
        tokens = len(words) + settings.max_new_tokens
        size += 8 * tokens
        if strategy_class(request.strategy).evicts:
            size += 9 * tokens / settings.chunk_size * (settings.cache_size + settings.chunk_size)
    return min(30.0, max(LEAST_PICTURE_SECONDS, size / 2e6))


def job_head(runner: Runner, job: Job) -> None:
    """Draw how far a run is, and the button that stops it."""
    status, button = st.columns([5, 1], vertical_alignment="center")
    with status:
        job_status(runner, job)
    button.button(
        "Cancel", key="cancel", on_click=runner.cancel, args=(job,), icon=":material/stop_circle:", width="stretch"
    )


def job_status(runner: Runner, job: Job) -> None:
    """Draw how far a run is, in a bar and words."""
    progress = job.progress()
    if job.state is State.QUEUED:
        ahead = runner.ahead(job)
        st.progress(
            0.0, f"Waiting: {ahead} {'run is' if ahead == 1 else 'runs are'} before yours." if ahead else "Waiting."
        )
    elif progress is None:
        st.progress(0.0, plain(job.message) or "Loading the model.")
    elif progress.prompt_read < progress.prompt_size:
        done = f"Reading the prompt: {progress.prompt_read} of {progress.prompt_size} tokens"
        st.progress(progress.share, f"{done} · {_refreshes(progress.refreshes)}")
    else:
        parts = [f"{progress.generated} of at most {progress.most} tokens", _refreshes(progress.refreshes)]
        if progress.lanes > 1:
            parts.insert(0, f"{progress.lanes_ended} of {progress.lanes} answers complete")
        if progress.tokens_per_second:
            parts.append(f"{progress.tokens_per_second:.1f} tokens/s")
        if progress.seconds_left is not None:
            parts.append(f"at most {duration(progress.seconds_left)} left")
        st.progress(progress.share, " · ".join(parts))


def _refreshes(count: int) -> str:
    return "1 refresh" if count == 1 else f"{count} refreshes"


def duration(seconds: float) -> str:
    """A time in words, no finer than it can be known."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
