"""Runs in the background: one worker, a queue in front of it, progress that can be watched, and cancel.

Knows runs and threads; imports no streamlit, and makes no call to a page. One model is held at a time: the worker
loads it, reuses it while jobs ask for the same, and lets it go before it loads another.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from ccviz.errors import UserError, sentence_for
from ccviz.events import TokenGenerated
from ccviz.models import ModelSpec, load_model
from ccviz.network import LanguageModel
from ccviz.runs import Request, Run
from ccviz.trace import Recorder, Trace

KEPT_JOBS = 50  # finished jobs that stay reachable by their id

log = logging.getLogger(__name__)


class State(StrEnum):
    """Where a job is in its life; the last three are ends."""

    QUEUED = "queued"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = {State.DONE, State.CANCELLED, State.FAILED}


@dataclass(frozen=True)
class Progress:
    """How far a run is, over all its lanes.

    ``prompt_read`` and ``prompt_size`` are those of the lane that is least far, of those that have begun; the tokens
    ``generated``, the ``most`` there may be, and the rate are sums over lanes. ``seconds_left`` is an upper bound,
    since the model may end earlier, and None until there is a rate to tell it by.
    """

    lanes: int
    lanes_ended: int
    prompt_read: int
    prompt_size: int
    generated: int
    most: int
    refreshes: int
    tokens_per_second: float
    seconds_left: float | None

    @property
    def share(self) -> float:
        """0 to 1, tokens processed of the most there may be."""
        read, size = self.prompt_read * self.lanes, self.prompt_size * self.lanes
        return 1.0 if self.lanes_ended == self.lanes else min(1.0, (read + self.generated) / max(1, size + self.most))


def new_id() -> str:
    """A name for a job that no other has."""
    return uuid.uuid4().hex[:10]


@dataclass(eq=False)
class Job:
    """One run of one or several lanes (or, without any, the loading of a model) on its way through the worker."""

    spec: ModelSpec
    requests: Mapping[str, Request] = field(default_factory=dict)
    follow: str | None = None  # the lane whose answer the others are fed
    kept: bool = True  # whether it stays reachable by its id once it has ended
    id: str = field(default_factory=new_id)
    state: State = State.QUEUED
    message: str = ""  # what is happening, or what went wrong, in one sentence
    note: str = ""  # why the run, which has ended well, was not kept
    recorders: dict[str, Recorder] = field(default_factory=dict)  # of the lanes, once they run
    _cancel: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # pages ask for snapshots at the same time
    _first_token: float = 0.0  # when it came
    _snapshot: dict[str, Trace] = field(default_factory=dict)
    _snapshot_is_final: bool = False
    _next_snapshot: float = 0.0  # when a page may have a fresh one

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def trace(self) -> Trace | None:
        """What has happened so far in the first lane; None until the run has begun."""
        return next(iter(self.traces().values()), None)

    def traces(self) -> dict[str, Trace]:
        """What has happened so far in every lane; empty until the run has begun.

        While the run goes on this is a snapshot, made anew at most as often as keeps its cost to a tenth of the time.
        """
        ended, began = self.ended, time.monotonic()
        with self._lock:
            if not self.recorders or self._snapshot_is_final or (began < self._next_snapshot and not ended):
                return self._snapshot
            self._snapshot = {name: recorder.trace() for name, recorder in self.recorders.items()}
            self._snapshot_is_final = ended
            self._next_snapshot = began + 10 * (time.monotonic() - began)
            return self._snapshot

    def progress(self) -> Progress | None:
        """How far the run is; None until it has begun."""
        if not self.recorders:
            return None
        lanes = list(self.recorders.values())
        begun = [lane for lane in lanes if lane.tokens_seen] or lanes
        ended = [lane for lane in lanes if lane.config["stop_reason"]]
        size, read = min((lane.prompt_size, min(lane.tokens_seen, lane.prompt_size)) for lane in begun)
        generated = sum(lane.generated for lane in lanes)
        most = sum(
            lane.generated if lane in ended else int(lane.config["max_new_tokens"])  # what has ended needs no more
            for lane in lanes
        )
        refreshes = sum(len(lane.refreshed) for lane in lanes)
        rate = generated / max(time.monotonic() - self._first_token, 1e-6) if self._first_token else 0.0
        left = (most - generated) / rate if rate and generated > len(begun) else None
        return Progress(len(lanes), len(ended), read, size, generated, most, refreshes, rate, left)

    def cancel(self) -> None:
        """Ask the run to stop; it does within one token and keeps what it has."""
        self._cancel.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job has ended; false if it had not within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def _end(self, state: State, message: str = "") -> None:
        self.message = message
        self.state = state
        self._ended.set()


class Runner:
    """The queue and its worker. Make one a server.

    Parameters
    ----------
    load
        Loads a model, as `load_model`.
    keep
        Given the id and the traces of every run that has ended, cancelled ones included. It may raise `UserError`:
        the sentence then stands in the job's ``note``.
    """

    def __init__(
        self,
        load: Callable[..., LanguageModel] = load_model,
        keep: Callable[[str, Mapping[str, Trace]], object] = lambda _id, _traces: None,
    ) -> None:
        self._load, self._keep = load, keep
        self._lock = threading.Condition()
        self._queue: list[Job] = []
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._model: LanguageModel | None = None
        self._spec: ModelSpec | None = None
        self._worker: threading.Thread | None = None

    def submit(
        self, spec: ModelSpec, requests: Mapping[str, Request], follow: str | None = None, kept: bool = True
    ) -> Job:
        """Queue a run of one or several lanes."""
        return self._enqueue(Job(spec, requests, follow, kept))

    def prepare(self, spec: ModelSpec) -> Job:
        """Queue the loading of a model, or return the job that already waits for it or has failed at it last."""
        with self._lock:
            same = [job for job in self._jobs.values() if not job.requests and job.spec == spec]
            if same and (not same[-1].ended or same[-1].state is State.FAILED or spec == self._spec):
                return same[-1]
            return self._enqueue(Job(spec))

    def retry(self, spec: ModelSpec) -> None:
        """Queue the loading of a model once more, after it failed."""
        self._enqueue(Job(spec))

    def adopt(self, traces: Mapping[str, Trace], job_id: str | None = None) -> Job:
        """A job that has ended with these traces, such as some from files; under this id, where one is given."""
        model = str(next(iter(traces.values())).config.get("model", ""))
        job = Job(ModelSpec(model), id=job_id or new_id(), _snapshot=dict(traces))
        job._end(State.DONE)
        with self._lock:
            self._remember(job)
        return job

    def get(self, job_id: str) -> Job | None:
        """The job of this id, while it is remembered."""
        return self._jobs.get(job_id)

    def model(self, spec: ModelSpec) -> LanguageModel | None:
        """The model, if it is the one that is loaded now."""
        with self._lock:
            return self._model if self._spec == spec else None

    def ahead(self, job: Job) -> int:
        """How many jobs come before a queued one, the one at work included; 0 once it is being worked on."""
        with self._lock:
            if job not in self._queue:
                return 0
            at_work = any(not other.ended and other not in self._queue for other in self._jobs.values())
            return self._queue.index(job) + at_work

    def cancel(self, job: Job) -> None:
        """Stop a job: one that waits leaves the queue, one that runs stops within a token."""
        with self._lock:
            job.cancel()
            if job in self._queue:
                self._queue.remove(job)
                job._end(State.CANCELLED, "Cancelled before it began.")

    # The worker

    def _enqueue(self, job: Job) -> Job:
        with self._lock:
            self._remember(job)
            self._queue.append(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="ccviz-runner", daemon=True)
                self._worker.start()
            self._lock.notify()
        return job

    def _remember(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._forget()

    def _forget(self) -> None:
        ended = [job for job in self._jobs.values() if job.ended]
        kept = [job for job in ended if job.kept][-KEPT_JOBS:]
        for job in ended:
            if job not in kept:
                del self._jobs[job.id]

    def _work(self) -> None:
        # The server and, on a laptop, the browser need a core of their own: torch on all of them was seen seven times
        # slower than on all but one.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        while True:
            with self._lock:
                while not self._queue:
                    self._lock.wait()
                job = self._queue.pop(0)
                job.state = State.LOADING
            try:
                self._do(job)
            except Exception as error:  # whatever it is, the job ends with a sentence and the worker goes on
                sentence = sentence_for(error)
                if sentence is None:
                    log.exception("job %s failed", job.id)
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    sentence = f"Something went wrong inside ccviz ({reason}). Please report it."
                job._end(State.FAILED, sentence)
            with self._lock:
                self._jobs.move_to_end(job.id)  # remembered by when they ended
                self._forget()

    def _do(self, job: Job) -> None:
        model = self._loaded(job)
        if not job.requests:
            job._end(State.DONE)
            return
        run = Run(model, job.requests, job.follow)
        job.recorders, job.message = run.recorders, ""
        job.state = State.RUNNING
        for event in run.events(job._cancel.is_set):
            if not job._first_token and isinstance(event, TokenGenerated):
                job._first_token = time.monotonic()
        reasons = [recorder.config["stop_reason"] for recorder in run.recorders.values()]
        if job.kept:
            try:
                self._keep(job.id, run.traces())
            except UserError as error:
                job.note = str(error)
        job._end(State.CANCELLED if "cancelled" in reasons else State.DONE)

    def _loaded(self, job: Job) -> LanguageModel:
        if self._model is not None and self._spec == job.spec:
            return self._model
        with self._lock:
            self._model = self._spec = None
        gc.unfreeze()
        gc.collect()  # the old weights go before the new ones come

        def tell(message: str) -> None:
            job.message = message

        tell(f"Loading {job.spec.name}.")
        model = self._load(job.spec.name, job.spec.device, job.spec.dtype, progress=tell)
        # Streamlit collects garbage after every pass of a page, and holds up the decoding thread for as long as that
        # takes: a fifth of a second with torch and a model in memory, next to nothing with these set aside.
        gc.collect()
        gc.freeze()
        with self._lock:
            self._model, self._spec = model, job.spec
        return model
