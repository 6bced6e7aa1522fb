"""Runs in the background: order, progress, cancel, what fails, and which model is held meanwhile."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conftest import ROOT, tiny
from torch import Tensor

import ccviz
from ccviz.errors import UserError
from ccviz.jobs import KEPT_JOBS, Job, Progress, Runner, State
from ccviz.metrics import survivors
from ccviz.models import ModelSpec
from ccviz.network import LanguageModel
from ccviz.runs import Request
from ccviz.settings import Settings
from ccviz.trace import COLUMNS, Trace

PROMPT = [(7 * place + place * place) % 97 for place in range(40)]
SPEC = ModelSpec("tiny", "cpu", "float32")
PATIENCE = 60  # seconds until a test gives up; none is expected to wait


def request(prompt: list[int] = PROMPT, strategy: str = "sliding_window", **given: Any) -> dict[str, Request]:
    settings = Settings(**{"cache_size": 16, "chunk_size": 8, "max_new_tokens": 20, **given})
    return {strategy: Request(prompt, settings, strategy, chat=False)}


class Hooked(LanguageModel):
    """The real tiny model; before each of its passes it calls `hook`, so that a test can act at a chosen moment."""

    passes = 0
    hook: Callable[[int], None]

    def forward(self, token_ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        if hasattr(self, "hook"):
            self.passes += 1
            self.hook(self.passes)
        return super().forward(token_ids, positions, cache)


def hooked(hook: Callable[[int], None]) -> Hooked:
    model = tiny("llama")
    watched = Hooked(model.model, model.tokenizer, model.name, model.device, model.dtype)
    _ = watched.entry_bytes  # takes a pass of its own
    watched.hook = hook
    return watched


def runner_of(model: LanguageModel) -> Runner:
    return Runner(lambda *_given, **_progress: model)


def run_with(hook: Callable[[Job, int], None], asked: dict[str, Request]) -> Job:
    """Run one request to its end; the hook is called before each pass with the job and the number of the pass."""
    submitted, jobs = threading.Event(), []

    def before(number: int) -> None:
        submitted.wait(PATIENCE)
        hook(jobs[0], number)

    runner = runner_of(hooked(before))
    jobs.append(runner.submit(SPEC, asked))
    submitted.set()
    assert jobs[0].wait(PATIENCE)
    return jobs[0]


def trace_of(job: Job) -> Trace:
    trace = job.trace()
    assert trace is not None
    return trace


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def assert_one_sentence(said: str) -> None:
    assert said.strip()
    assert len(said.splitlines()) == 1


# One run


@pytest.mark.parametrize("strategy", ["full", "heavy_hitter", "counter_causal"])
def test_a_job_leaves_what_a_direct_call_returns(strategy: str, tiny_llama: LanguageModel) -> None:
    runner = runner_of(tiny_llama)
    job = runner.submit(SPEC, request(strategy=strategy))
    assert job.wait(PATIENCE)
    assert (job.state, job.ended, job.message) == (State.DONE, True, "")
    trace = trace_of(job)
    direct = ccviz.generate(tiny_llama, PROMPT, strategy, cache_size=16, chunk_size=8, max_new_tokens=20)
    assert trace.stop_reason == "length"
    assert trace.tokens["token_id"].tolist() == direct.tokens["token_id"].tolist()
    for column in ("refresh", "position", "protected"):
        assert survivors(trace)[column].tolist() == survivors(direct)[column].tolist()
    assert job.trace() is job.trace()
    assert runner.get(job.id) is job
    assert runner.get("no such id") is None


def test_a_job_says_what_it_is_doing_from_the_queue_to_the_end(tiny_llama: LanguageModel) -> None:
    seen: list[tuple[State, str]] = []
    jobs: list[Job] = []
    submitted = threading.Event()

    def load(name: str, device: str, dtype: str, progress: Callable[[str], None]) -> LanguageModel:
        submitted.wait(PATIENCE)
        assert (name, device, dtype) == ("tiny", "cpu", "float32")
        seen.append((jobs[0].state, jobs[0].message))
        progress("Reading the weights.")
        seen.append((jobs[0].state, jobs[0].message))
        assert (jobs[0].trace(), jobs[0].progress()) == (None, None)
        return hooked(lambda _number: seen.append((jobs[0].state, jobs[0].message)))

    jobs.append(Runner(load).submit(SPEC, request()))
    submitted.set()
    assert jobs[0].wait(PATIENCE)
    assert seen[:2] == [(State.LOADING, "Loading tiny."), (State.LOADING, "Reading the weights.")]
    assert set(seen[2:]) == {(State.RUNNING, "")}


def test_progress_only_grows_and_ends_at_one() -> None:
    steps: list[Progress] = []

    def look(job: Job, _number: int) -> None:
        progress = job.progress()
        assert progress is not None
        steps.append(progress)

    job = run_with(look, request())
    last = job.progress()
    assert last is not None
    steps.append(last)
    assert len(steps) == 5 + 19 + 1
    for one, other in itertools.pairwise(steps):
        assert one.prompt_read <= other.prompt_read
        assert one.generated <= other.generated
        assert one.refreshes <= other.refreshes
        assert one.share < other.share
    assert {(step.prompt_size, step.most) for step in steps} == {(40, 20)}
    assert [step.share for step in steps][:: len(steps) - 1] == [0.0, 1.0]
    assert all(step.seconds_left is None or step.seconds_left >= 0 for step in steps)
    assert (last.prompt_read, last.generated, last.refreshes) == (40, 20, 7)
    assert last.tokens_per_second > 0


def test_the_trace_while_a_job_runs_is_a_prefix_of_the_last() -> None:
    parts: list[Trace] = []

    def look(job: Job, _number: int) -> None:
        """Wait, while the run stands still, until what is shown has caught up with it."""
        progress = job.progress()
        assert progress is not None
        until(lambda: len(trace_of(job).tokens) == 40 + progress.generated)
        until(lambda: len(trace_of(job).refreshes) == progress.refreshes)
        parts.append(trace_of(job))

    job = run_with(look, request(strategy="heavy_hitter"))
    whole = trace_of(job)
    assert job.state is State.DONE
    assert [part.stop_reason for part in parts] == [""] * (5 + 19)
    assert len({len(part.tokens) for part in parts}) == 20
    assert {len(part.refreshes) for part in parts} == set(range(8))
    for part in parts:
        assert whole.text.startswith(part.text)
        for name in COLUMNS:
            some, full = getattr(part, name), getattr(whole, name)
            assert some.equals(full.iloc[: len(some)].reset_index(drop=True))


def test_what_was_shown_before_the_end_is_not_taken_for_the_end() -> None:
    def look(job: Job, _number: int) -> None:
        assert trace_of(job).stop_reason == ""

    job = run_with(look, request())
    assert trace_of(job).stop_reason == "length"
    assert len(trace_of(job).text) == 20


# Cancel


def test_a_job_cancelled_while_it_reads_the_prompt_keeps_what_was_read() -> None:
    long = [place % 97 for place in range(200)]
    job = run_with(lambda job, number: job.cancel() if number == 5 else None, request(long))
    trace, progress = trace_of(job), job.progress()
    assert (job.state, trace.stop_reason) == (State.CANCELLED, "cancelled")
    assert not trace.tokens["generated"].any()
    assert trace.refreshes["tokens_seen"].tolist() == [8, 16, 24, 32, 40]
    assert progress is not None
    assert progress.prompt_read == 40
    assert Trace.open(trace.to_bytes()) == trace


@pytest.mark.parametrize("strategy", ["sliding_window", "counter_causal"])
def test_a_job_cancelled_while_it_decodes_stops_within_one_token(strategy: str, tiny_llama: LanguageModel) -> None:
    job = run_with(lambda job, number: job.cancel() if number == 5 + 9 else None, request(strategy=strategy))
    trace = trace_of(job)
    direct = ccviz.generate(tiny_llama, PROMPT, strategy, cache_size=16, chunk_size=8, max_new_tokens=20)
    assert (job.state, trace.stop_reason) == (State.CANCELLED, "cancelled")
    assert len(trace.text) == 9
    assert direct.text.startswith(trace.text)


def test_a_job_cancelled_while_its_model_loads_stops_before_the_first_token(tiny_llama: LanguageModel) -> None:
    jobs: list[Job] = []
    submitted = threading.Event()

    def load(*_given: str, progress: Callable[[str], None]) -> LanguageModel:
        submitted.wait(PATIENCE)
        jobs[0].cancel()
        return tiny_llama

    runner = Runner(load)
    jobs.append(runner.submit(SPEC, request()))
    submitted.set()
    assert jobs[0].wait(PATIENCE)
    assert jobs[0].state is State.CANCELLED
    assert trace_of(jobs[0]).text == ""
    assert runner.model(SPEC) is tiny_llama


def test_a_job_that_waits_sees_its_place_and_leaves_the_queue_when_cancelled() -> None:
    go = threading.Event()
    runner = runner_of(hooked(lambda _number: go.wait(PATIENCE) and None))
    first, second, third = (runner.submit(SPEC, request()) for _ in range(3))
    until(lambda: first.state is State.RUNNING)
    assert [runner.ahead(job) for job in (first, second, third)] == [0, 1, 2]
    assert second.state is third.state is State.QUEUED
    runner.cancel(second)
    assert (second.state, second.trace(), second.progress()) == (State.CANCELLED, None, None)
    assert second.wait(0)
    assert_one_sentence(second.message)
    assert [runner.ahead(job) for job in (first, second, third)] == [0, 0, 1]
    go.set()
    assert third.wait(PATIENCE)
    assert (first.state, second.state, third.state) == (State.DONE, State.CANCELLED, State.DONE)


def test_cancelling_what_has_ended_changes_nothing(tiny_llama: LanguageModel) -> None:
    runner = runner_of(tiny_llama)
    job = runner.submit(SPEC, request())
    assert job.wait(PATIENCE)
    before = trace_of(job)
    runner.cancel(job)
    assert job.state is State.DONE
    assert trace_of(job) == before
    assert before.stop_reason == "length"


# One at a time, one model at a time


def test_jobs_run_one_after_the_other_in_the_order_they_came() -> None:
    jobs: list[Job] = []
    submitted = threading.Event()
    states: list[tuple[State, ...]] = []

    def look(_number: int) -> None:
        submitted.wait(PATIENCE)
        states.append(tuple(job.state for job in jobs))

    runner = runner_of(hooked(look))
    jobs += [runner.submit(SPEC, request()) for _ in range(3)]
    submitted.set()
    assert jobs[2].wait(PATIENCE)
    done, running, queued = State.DONE, State.RUNNING, State.QUEUED
    order = [(running, queued, queued), (done, running, queued), (done, done, running)]
    assert states == [step for step in order for _ in range(5 + 19)]
    traces = [trace_of(job) for job in jobs]
    assert traces[0].tokens.equals(traces[1].tokens)
    assert traces[0].entries.equals(traces[2].entries)


class Shelf:
    """Loads a fresh tiny model a call and remembers, weakly, each one it gave away."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[LanguageModel]] = []
        self.alive_at_load: list[list[bool]] = []

    def load(self, name: str, device: str, dtype: str, progress: Callable[[str], None]) -> LanguageModel:
        if name == "missing":
            raise UserError("There is no such model: choose another.")
        self.alive_at_load.append([ref() is not None for ref in self.given])
        model = tiny("llama", seed=len(self.given))
        self.given.append(weakref.ref(model))
        return model


def test_a_model_is_loaded_once_for_jobs_that_ask_for_the_same() -> None:
    shelf = Shelf()
    runner = Runner(shelf.load)
    jobs = [runner.prepare(SPEC), runner.submit(SPEC, request()), runner.submit(SPEC, request(strategy="importance"))]
    assert jobs[-1].wait(PATIENCE)
    assert len(shelf.given) == 1
    assert runner.model(SPEC) is shelf.given[0]()
    assert runner.model(ModelSpec("tiny", "cpu", "bfloat16")) is None


def test_a_model_that_was_only_prepared_is_gone_before_another_is_loaded() -> None:
    shelf = Shelf()
    runner = Runner(shelf.load)
    for name in ("one", "two"):
        assert runner.prepare(ModelSpec(name)).wait(PATIENCE)
    assert shelf.alive_at_load == [[], [False]]
    assert runner.model(ModelSpec("one")) is None


def test_a_model_that_jobs_ran_on_is_gone_before_another_is_loaded() -> None:
    shelf = Shelf()
    runner = Runner(shelf.load)
    first = runner.submit(ModelSpec("one"), request())
    second = runner.submit(ModelSpec("two"), request())
    assert second.wait(PATIENCE)
    assert first.state is second.state is State.DONE
    assert runner.get(first.id) is first  # the job is remembered, its model must not be
    assert shelf.alive_at_load == [[], [False]]
    gc.collect()
    assert shelf.given[0]() is None
    assert len(trace_of(first).text) == len(trace_of(second).text) == 20


def test_a_model_that_a_job_failed_on_is_gone_before_another_is_loaded() -> None:
    shelf = Shelf()
    runner = Runner(shelf.load)
    first = runner.submit(ModelSpec("one"), request(list(range(90)) * 9))
    assert runner.prepare(ModelSpec("two")).wait(PATIENCE)
    assert first.state is State.FAILED
    assert shelf.alive_at_load == [[], [False]]


# What fails


def test_a_model_that_cannot_be_loaded_fails_the_job_with_that_sentence_alone() -> None:
    shelf = Shelf()
    runner = Runner(shelf.load)
    failed, next_one = runner.submit(ModelSpec("missing"), request()), runner.submit(SPEC, request())
    assert next_one.wait(PATIENCE)
    assert (failed.state, failed.message) == (State.FAILED, "There is no such model: choose another.")
    assert failed.trace() is None
    assert next_one.state is State.DONE
    assert runner.model(ModelSpec("missing")) is None


def test_a_prompt_longer_than_the_context_fails_with_one_sentence(tiny_llama: LanguageModel) -> None:
    runner = runner_of(tiny_llama)
    job, next_one = runner.submit(SPEC, request([1] * 600)), runner.submit(SPEC, request())
    assert next_one.wait(PATIENCE)
    assert (job.state, next_one.state) == (State.FAILED, State.DONE)
    assert_one_sentence(job.message)
    assert "600" in job.message
    assert "512" in job.message


@pytest.mark.parametrize("text", ["half a token", "first line\nsecond line\n\n  third"])
def test_a_defect_ends_the_job_with_a_sentence_that_names_it_and_the_worker_lives(text: str) -> None:
    def broken(number: int) -> None:
        if number == 5 + 4:
            raise ZeroDivisionError(text)

    runner = runner_of(hooked(broken))
    job, next_one = runner.submit(SPEC, request()), runner.submit(SPEC, request())
    assert next_one.wait(PATIENCE)
    assert (job.state, next_one.state) == (State.FAILED, State.DONE)
    assert "ZeroDivisionError" in job.message
    assert text.splitlines()[0] in job.message
    assert_one_sentence(job.message)
    assert len(trace_of(job).text) == 4  # nothing of what was there is lost
    assert len(trace_of(next_one).text) == 20


OUT_OF_MEMORY = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB.")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["python", "torch"])
@pytest.mark.parametrize("moment", ["loading", "running"])
def test_running_out_of_memory_says_what_to_make_smaller(moment: str, error: BaseException) -> None:
    def full(number: int) -> None:
        if number == 3:
            raise error

    def load(*given: str, progress: Callable[[str], None]) -> LanguageModel:
        if moment == "loading":
            raise error
        return hooked(full)

    job = Runner(load).submit(SPEC, request())
    assert job.wait(PATIENCE)
    assert job.state is State.FAILED
    assert_one_sentence(job.message)
    assert "out of memory" in job.message
    assert "smaller" in job.message
    assert (job.trace() is None) == (moment == "loading")


def test_what_torch_really_raises_when_memory_runs_out_gets_the_same_sentence() -> None:
    def greedy(_number: int) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    job = runner_of(hooked(greedy)).submit(SPEC, request())
    assert job.wait(PATIENCE)
    assert job.state is State.FAILED
    assert "out of memory" in job.message


# Preparing a model


def test_preparing_twice_waits_for_one_load() -> None:
    go, loads = threading.Event(), []

    def load(name: str, *_given: str, progress: Callable[[str], None]) -> LanguageModel:
        go.wait(PATIENCE)
        loads.append(name)
        return tiny("llama")

    runner = Runner(load)
    first = runner.prepare(SPEC)
    assert runner.prepare(SPEC) is first
    until(lambda: first.state is State.LOADING)
    assert runner.prepare(SPEC) is first
    other = runner.prepare(ModelSpec("other"))
    assert other is not first
    assert (runner.ahead(first), runner.ahead(other), runner.model(SPEC)) == (0, 1, None)
    go.set()
    assert other.wait(PATIENCE)
    assert (first.state, other.state, loads) == (State.DONE, State.DONE, ["tiny", "other"])
    again = runner.prepare(SPEC)  # the other one has taken its place
    assert again is not first
    assert again.wait(PATIENCE)
    assert runner.prepare(SPEC) is again
    assert loads == ["tiny", "other", "tiny"]


def test_a_model_that_failed_is_not_tried_again_until_someone_asks() -> None:
    answers: list[LanguageModel | UserError] = [UserError("The network is down."), tiny("llama")]

    def load(*_given: str, progress: Callable[[str], None]) -> LanguageModel:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    runner = Runner(load)
    failed = runner.prepare(SPEC)
    assert failed.wait(PATIENCE)
    assert (failed.state, failed.message) == (State.FAILED, "The network is down.")
    assert runner.prepare(SPEC) is failed
    assert len(answers) == 1
    runner.retry(SPEC)
    retried = runner.prepare(SPEC)
    assert retried is not failed
    assert retried.wait(PATIENCE)
    assert retried.state is State.DONE
    assert runner.model(SPEC) is not None
    assert answers == []


# Jobs that are remembered


def test_an_adopted_trace_is_a_job_that_has_ended(tiny_llama: LanguageModel) -> None:
    trace = ccviz.generate(tiny_llama, PROMPT, "importance", cache_size=16, chunk_size=8, max_new_tokens=4)
    runner = Runner()
    job = runner.adopt({trace.strategy: trace})
    assert (job.state, job.ended, job.wait(0)) == (State.DONE, True, True)
    assert job.trace() is trace
    assert (job.progress(), job.spec.name) == (None, "tiny-llama")
    assert runner.get(job.id) is job
    assert runner.ahead(job) == 0


def test_only_the_last_finished_jobs_are_remembered_and_running_ones_always(tiny_llama: LanguageModel) -> None:
    trace = ccviz.generate(tiny_llama, PROMPT, "full", cache_size=16, chunk_size=8, max_new_tokens=2)
    go = threading.Event()
    runner = runner_of(hooked(lambda _number: go.wait(PATIENCE) and None))
    running, waiting = runner.submit(SPEC, request()), runner.submit(SPEC, request())
    until(lambda: running.state is State.RUNNING)
    adopted = [runner.adopt({trace.strategy: trace}) for _ in range(KEPT_JOBS + 5)]
    known = [runner.get(job.id) is job for job in adopted]
    assert known == [False] * 5 + [True] * KEPT_JOBS
    assert runner.get(running.id) is running
    assert runner.get(waiting.id) is waiting
    go.set()
    assert waiting.wait(PATIENCE)
    assert runner.get(waiting.id) is waiting


def test_jobs_have_ids_of_their_own() -> None:
    assert len({Job(SPEC).id for _ in range(1000)}) == 1000


# The house


def test_jobs_bring_no_streamlit_with_them() -> None:
    code = "import sys, ccviz.jobs; assert 'torch' in sys.modules; assert 'streamlit' not in sys.modules; print('none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "none\n", done.stderr


def test_a_loaded_model_is_set_aside_from_the_garbage_collector(tiny_llama: LanguageModel) -> None:
    gc.unfreeze()
    runner = Runner(load=lambda *_given, **_named: tiny_llama)
    assert runner.prepare(SPEC).wait(PATIENCE)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert frozen > 10_000  # a pass of a page collects garbage, and must not go through all of torch each time


def test_what_cannot_be_kept_is_noted_and_the_run_is_still_there(tiny_llama: LanguageModel) -> None:
    def keep(job_id: str, traces: Mapping[str, Trace]) -> None:
        assert len(traces) == 1
        raise UserError(f"No room for {job_id}.")

    runner = Runner(load=lambda *_given, **_named: tiny_llama, keep=keep)
    job = runner.submit(SPEC, request(max_new_tokens=3))
    assert job.wait(PATIENCE)
    assert job.state is State.DONE
    assert job.note == f"No room for {job.id}."
    assert job.trace() is not None


def test_every_run_that_ended_is_kept_with_its_traces(tiny_llama: LanguageModel) -> None:
    kept: dict[str, Mapping[str, Trace]] = {}
    runner = Runner(
        load=lambda *_given, **_named: tiny_llama, keep=lambda job_id, traces: kept.update({job_id: traces})
    )
    first = runner.submit(SPEC, request(max_new_tokens=3))
    unkept = runner.submit(SPEC, request(max_new_tokens=3), kept=False)
    assert first.wait(PATIENCE)
    assert unkept.wait(PATIENCE)
    assert list(kept) == [first.id]
    assert kept[first.id] == first.traces()
