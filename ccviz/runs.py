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
from ccviz.events import Event
from ccviz.network import LanguageModel
from ccviz.settings import Settings
from ccviz.strategies import make_strategy
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
    """A request on a model: iterate it to make it happen, ask `recorder` for what has happened so far.

    Raises
    ------
    UserError
        When made, if the prompt cannot be encoded or its system part leaves no room in the cache; at the first step,
        if the model cannot run it.
    """

    def __init__(self, model: LanguageModel, request: Request) -> None:
        self.model, self.request = model, request
        encoded = encode_prompt(model.tokenizer, request.prompt, request.chat, request.system)
        self.prompt_ids = encoded.token_ids
        self.settings = request.settings
        if request.freeze_system and make_strategy(request.strategy).evicts:
            self.settings = replace(request.settings, frozen_size=encoded.system_size)
        self.recorder = Recorder(_config(model, request, self.settings), self.prompt_ids, model.tokenizer)

    def events(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """The engine's events, each recorded before it is handed on."""
        request, began = self.request, time.perf_counter()
        strategy = make_strategy(request.strategy, request.options)
        for event in stream(self.model, self.prompt_ids, {request.strategy: strategy}, self.settings, cancelled):
            _record(self.recorder, event, time.perf_counter() - began)
            yield event


def _record(recorder: Recorder, event: Event, seconds: float) -> None:
    """Hand an event to a lane's recorder, with the time that has passed since the run began."""
    recorder.config["seconds"] = round(seconds, 6)
    if not recorder.generated:
        recorder.config["prompt_seconds"] = round(seconds, 6)
    recorder.add(event)


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
    )
    run = Run(model, Request(prompt, settings, strategy, dict(options or {}), chat, system))
    for _event in run.events():
        pass
    return run.recorder.trace()


def compare(
    model: LanguageModel,
    prompt: str | Sequence[int],
    strategies: Sequence[str],
    cache_size: int = 128,
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
) -> dict[str, Trace]:
    """Run one prompt under several strategies at once, as rows of one batch.

    The prompt is computed once until the first eviction, and lanes that have ended leave the batch. The full cache,
    which grows without bound, is a batch of its own. In float32 each trace equals that of `generate` alone; the
    seconds in it are those since its batch began.

    Parameters
    ----------
    strategies
        Names of registered strategies, each once.
    options
        For each strategy that needs any, its own options.

    The other parameters are those of `generate`.

    Returns
    -------
    dict of str to Trace
        In the order of ``strategies``.

    Raises
    ------
    UserError
        A ``ValueError`` with what was given and what is allowed.
    """
    given = dict(options or {})
    names = list(strategies)
    if not names or len(set(names)) < len(names):
        raise UserError(f"strategies must be names, at least one and each once, not {names!r}.")
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UserError(f"options are given for {unknown[0]!r}, which is not among the strategies {', '.join(names)}.")
    settings = Settings(
        cache_size=cache_size,
        chunk_size=chunk_size,
        max_new_tokens=max_new_tokens,
        frozen_size=frozen_size,
        refresh_mode=refresh_mode,
        temperature=temperature,
        seed=seed,
        logprobs=logprobs,
    )
    runs = {name: Run(model, Request(prompt, settings, name, given.get(name, {}), chat, system)) for name in names}
    made = {name: make_strategy(name, given.get(name)) for name in names}
    for evicts in (False, True):
        lanes = {name: strategy for name, strategy in made.items() if strategy.evicts == evicts}
        if not lanes:
            continue
        began = time.perf_counter()
        for event in stream(model, runs[names[0]].prompt_ids, lanes, settings):
            _record(runs[event.lane].recorder, event, time.perf_counter() - began)
    return {name: run.recorder.trace() for name, run in runs.items()}
