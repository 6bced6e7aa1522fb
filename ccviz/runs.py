"""One call from a prompt to a trace: what the Python API, the command line and the app all start runs with.

Knows how a run's configuration is written down; the loop itself is in `engine`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from ccviz.engine import stream
from ccviz.errors import UserError
from ccviz.events import Done, Event, PromptFed, TokenGenerated
from ccviz.network import LanguageModel
from ccviz.settings import Settings
from ccviz.strategies import CounterCausal, make_strategy, strategy_class
from ccviz.tokens import encode_prompt
from ccviz.trace import Recorder, Trace
from ccviz.version import __version__


@dataclass(frozen=True)
class Request:
    """One prompt under one strategy, not yet tied to a model. Checked when made.

    Attributes
    ----------
    prompt
        Text, or token ids that are taken as they are.
    settings
        Budgets and length.
    strategy, options
        A registered strategy's name, and its options.
    chat, system
        Whether to use the tokenizer's chat template, and its system message (None: the template's own).
    label
        A name for the prompt, kept in the trace.
    freeze_system
        Freeze what the chat template writes before the user's words, whatever its size on the model at hand, instead
        of ``settings.frozen_size`` positions.
    """

    prompt: str | Sequence[int]
    settings: Settings
    strategy: str = "counter_causal"
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True
    system: str | None = None
    label: str = ""
    freeze_system: bool = False

    def __post_init__(self) -> None:
        make_strategy(self.strategy, self.options)


class Run:
    """One or several requests on a model: iterate `events` to make them happen; ask `recorders` for what has happened.

    Requests that share prompt and settings are lanes of one batch: they step together, and their prompt is computed
    once until the first eviction. Strategies that evict and the full cache, and other budgets, are batches of their
    own, which take turns token by token.

    Parameters
    ----------
    requests
        A request for each lane's name.
    follow
        A trace of the same prompt, or the name of one of the lanes: all (other) lanes are fed its answer instead of
        their own, and the harm to their predictions is recorded (``kl`` and ``agrees`` in `Trace.tokens`). A lane that
        is followed runs first.

    Raises
    ------
    UserError
        When made, if a prompt cannot be encoded, its system part leaves no room in the cache, or what is to be
        followed answers another prompt; at the first step, if the model cannot run it.
    """

    def __init__(
        self, model: LanguageModel, requests: Mapping[str, Request], follow: Trace | str | None = None
    ) -> None:
        self.model, self.requests, self.follow = model, dict(requests), follow
        if isinstance(follow, str) and follow not in self.requests:
            raise UserError(f"follow must name one of the lanes {', '.join(self.requests)}, not {follow!r}.")
        _check_explained(self.requests)
        self.prompt_ids: dict[str, list[int]] = {}
        self.settings: dict[str, Settings] = {}
        self.recorders: dict[str, Recorder] = {}
        for name, request in self.requests.items():
            encoded = encode_prompt(model.tokenizer, request.prompt, request.chat, request.system)
            settings = request.settings
            if request.freeze_system and make_strategy(request.strategy).evicts:
                settings = replace(settings, frozen_size=encoded.system_size)
            if isinstance(follow, Trace):
                settings = replace(settings, max_new_tokens=_followed_size(follow, name, encoded.token_ids))
            config = _config(model, request, settings) | {"system_size": encoded.system_size}
            if follow is not None and name != follow:
                config["follows"] = follow.strategy if isinstance(follow, Trace) else follow
            self.prompt_ids[name], self.settings[name] = encoded.token_ids, settings
            self.recorders[name] = Recorder(config, encoded.token_ids, model.tokenizer)

    def events(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The engine's events of all lanes, each recorded before it is handed on."""
        names = list(self.requests)
        answer: list[int] = []
        if isinstance(self.follow, str):
            names.remove(self.follow)
            yield from self._together([self.follow], cancelled, [])
            answer = self.recorders[self.follow].answer
        elif self.follow is not None:
            answer = _answer_of(self.follow)
        yield from self._together(names, cancelled, answer)

    def traces(self) -> dict[str, Trace]:
        """What has happened so far in every lane."""
        return {name: recorder.trace() for name, recorder in self.recorders.items()}

    def _together(self, names: list[str], cancelled: Callable[[], bool], answer: list[int]) -> Iterator[Event]:
        """Run these lanes, batch by batch in turn."""
        turns = [_Turns(self, group, cancelled, answer) for group in self._batches(names)]
        while turns:
            for batch in list(turns):
                yield from batch.step()
                if batch.ended:
                    turns.remove(batch)

    def _batches(self, names: list[str]) -> list[list[str]]:
        """The lanes that can share a batch, in the order of their first."""
        groups: dict[Any, list[str]] = {}
        for name in names:
            evicts = make_strategy(self.requests[name].strategy).evicts
            groups.setdefault((evicts, self.settings[name], tuple(self.prompt_ids[name])), []).append(name)
        return list(groups.values())


class _Turns:
    """One batch of a run, stepped a token at a time, with a clock that stands still while other batches step."""

    def __init__(self, run: Run, names: list[str], cancelled: Callable[[], bool], answer: list[int]) -> None:
        strategies = {name: make_strategy(run.requests[name].strategy, run.requests[name].options) for name in names}
        first = names[0]
        self.events = stream(run.model, run.prompt_ids[first], strategies, run.settings[first], cancelled, answer)
        self.recorders = run.recorders
        self.lanes = len(names)
        self.seconds = 0.0
        self.ended = False

    def step(self) -> Iterator[Event]:
        """Events until every lane has moved by one token, or by one slice of the prompt."""
        moved, lanes = 0, self.lanes
        while moved < lanes:
            began = time.perf_counter()
            event = next(self.events, None)
            self.seconds += time.perf_counter() - began
            if event is None:
                self.ended = True
                return
            moved += isinstance(event, (PromptFed, TokenGenerated))
            self.lanes -= isinstance(event, Done)
            _record(self.recorders[event.lane], event, self.seconds)
            yield event


def _check_explained(requests: Mapping[str, Request]) -> None:
    """Raise `UserError` if requests are to be explained and none of them makes a counter-causal pass."""
    asked = [request for request in requests.values() if request.settings.explain]
    if asked and not any(
        request.settings.observe or issubclass(strategy_class(request.strategy), CounterCausal) for request in asked
    ):
        names = " and ".join(dict.fromkeys(request.strategy for request in asked))
        raise UserError(
            f"explain records what a counter-causal pass expected, and {names} makes none: choose a counter-causal "
            "strategy, or set observe too."
        )


def _followed_size(follow: Trace, name: str, prompt_ids: list[int]) -> int:
    """How many tokens the answer to follow has.

    Raises
    ------
    UserError
        If it has none, or answers another prompt.
    """
    theirs = follow.tokens.loc[~follow.tokens["generated"], "token_id"].tolist()
    if theirs != prompt_ids:
        raise UserError(
            f"the trace to follow answers another prompt ({len(theirs)} tokens) than {name} is given "
            f"({len(prompt_ids)} tokens): follow a run of the same prompt, system message and chat template."
        )
    if len(theirs) == len(follow.tokens):
        raise UserError("the trace to follow has no answer: follow a run that generated at least one token.")
    return len(follow.tokens) - len(theirs)


def _answer_of(trace: Trace) -> list[int]:
    ids: list[int] = trace.tokens.loc[trace.tokens["generated"], "token_id"].tolist()
    return ids


def _record(recorder: Recorder, event: Event, seconds: float) -> None:
    """Hand an event to a lane's recorder, with the time that its batch has taken so far."""
    recorder.config["seconds"] = round(seconds, 6)
    if not recorder.generated:
        recorder.config["prompt_seconds"] = round(seconds, 6)
    recorder.add(event)


def lane_requests(
    request: Request,
    strategies: Sequence[str],
    cache_sizes: Sequence[int],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Request]:
    """A request for each strategy at each cache size, named by both as far as the names need it.

    A strategy that never evicts is asked for once, whatever the sizes.

    Parameters
    ----------
    request
        What they have in common.
    strategies
        Names of registered strategies, each once.
    cache_sizes
        One or several J, each once.
    options
        For each strategy that needs any, its own options.

    Raises
    ------
    UserError
        If strategies, sizes or options are not as described.
    """
    given = dict(options or {})
    names, sizes = list(strategies), list(cache_sizes)
    if not names or len(set(names)) < len(names):
        raise UserError(f"strategies must be names, at least one and each once, not {names!r}.")
    if not sizes or len(set(sizes)) < len(sizes):
        raise UserError(f"cache sizes must be whole numbers, at least one and each once, not {sizes!r}.")
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UserError(f"options are given for {unknown[0]!r}, which is not among the strategies {', '.join(names)}.")
    lanes: dict[str, Request] = {}
    for name in names:
        evicts = strategy_class(name).evicts
        for size in sizes if evicts else sizes[:1]:
            label = f"{name} J={size}" if evicts and len(sizes) > 1 else name
            settings = replace(request.settings, cache_size=size)
            lanes[label] = replace(request, settings=settings, strategy=name, options=given.get(name, {}))
    return lanes


def _config(model: LanguageModel, request: Request, settings: Settings) -> dict[str, Any]:
    strategy = make_strategy(request.strategy, request.options)
    return {
        "strategy": request.strategy,
        "options": asdict(strategy),
        **asdict(settings),
        "chat": request.chat,
        "system": request.system,
        "label": request.label,
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "entry_bytes": model.entry_bytes,
        "versions": {
            "ccviz": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "prompt_seconds": 0.0,
        "stop_reason": "",
    }


def generate(
    model: LanguageModel,
    prompt: str | Sequence[int],
    strategy: str = "counter_causal",
    cache_size: int = 128,
    chunk_size: int = 32,
    max_new_tokens: int = 256,
    frozen_size: int = 0,
    refresh_mode: str = "chunked",
    options: Mapping[str, Any] | None = None,
    chat: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: bool = False,
    system: str | None = None,
    observe: bool = False,
    explain: bool = False,
    follow: Trace | None = None,
) -> Trace:
    """Run a prompt under a bounded cache and return what was remembered and what was lost.

    Parameters
    ----------
    model
        From `load_model`.
    prompt
        Text, or a list of token ids that are taken as they are.
    strategy
        A registered strategy's name; see `strategy_names`.
    cache_size
        J, the entries that survive a refresh; at least 2.
    chunk_size
        h, the tokens between two refreshes; at least 1.
    max_new_tokens
        The most tokens to generate.
    frozen_size
        The first positions that are never evicted; they count towards J and must be fewer.
    refresh_mode
        ``"chunked"``, ``"prefill_end"`` or ``"both"``; see `Settings`.
    options
        The strategy's own options.
    chat, system
        Whether to use the tokenizer's chat template, and its system message (None: the template's own).
    temperature, seed
        0 is greedy; above, tokens are sampled with the seed.
    logprobs
        Also record the log-probability of every token.
    observe
        Also record the counter-causal surprise of every entry at every refresh, whatever the strategy (``surprise`` in
        `Trace.entries`).
    explain
        Also record what the future expected in the place of every entry, at every refresh with a counter-causal pass:
        the probability of the entry's own token and the five likeliest tokens (``probability``, ``expected_1`` to
        ``expected_5`` and ``chance_1`` to ``chance_5`` in `Trace.entries`). Needs a counter-causal strategy, or
        ``observe``.
    follow
        A trace of the same prompt, usually one of the full cache: its answer is fed to the model instead of the run's
        own choices, and how far the bounded cache moves each prediction is recorded (``kl`` and ``agrees`` in
        `Trace.tokens`). ``max_new_tokens`` is then not heeded.

    Returns
    -------
    Trace

    Raises
    ------
    UserError
        A ``ValueError`` with what was given and what is allowed.
    """
    settings = Settings(
        cache_size=cache_size,
        chunk_size=chunk_size,
        max_new_tokens=max_new_tokens,
        frozen_size=frozen_size,
        refresh_mode=refresh_mode,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
        observe=observe,
        explain=explain,
    )
    request = Request(prompt, settings, strategy, dict(options or {}), chat, system)
    return _traces(Run(model, {strategy: request}, follow))[strategy]


def compare(
    model: LanguageModel,
    prompt: str | Sequence[int],
    strategies: Sequence[str],
    cache_size: int | Sequence[int] = 128,
    chunk_size: int = 32,
    max_new_tokens: int = 256,
    frozen_size: int = 0,
    refresh_mode: str = "chunked",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    chat: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: bool = False,
    system: str | None = None,
    observe: bool = False,
    explain: bool = False,
    follow: Trace | str | None = None,
) -> dict[str, Trace]:
    """Run one prompt under several strategies at once, as rows of one batch.

    The prompt is computed once until the first eviction, and lanes that have ended leave the batch. The full cache,
    which grows without bound, is a batch of its own, and so is each cache size. In float32 each trace equals that of
    `generate` alone; the seconds in it are those of its batch.

    Parameters
    ----------
    strategies
        Names of registered strategies, each once.
    cache_size
        J, or several of them; with several, lanes are named "heavy_hitter J=64".
    options
        For each strategy that needs any, its own options.
    follow
        As in `generate`, or the name of one of the lanes, usually "full": it then runs first, and the others are fed
        its answer.

    The other parameters are those of `generate`.

    Returns
    -------
    dict of str to Trace
        In the order of ``strategies``, and of the sizes within each.

    Raises
    ------
    UserError
        A ``ValueError`` with what was given and what is allowed.
    """
    sizes = [cache_size] if isinstance(cache_size, int) else list(cache_size)
    settings = Settings(
        cache_size=sizes[0] if sizes else 2,
        chunk_size=chunk_size,
        max_new_tokens=max_new_tokens,
        frozen_size=frozen_size,
        refresh_mode=refresh_mode,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
        observe=observe,
        explain=explain,
    )
    request = Request(prompt, settings, chat=chat, system=system)
    return _traces(Run(model, lane_requests(request, strategies, sizes, options), follow))


def _traces(run: Run) -> dict[str, Trace]:
    for _event in run.events():
        pass
    return run.traces()
