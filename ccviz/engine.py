"""The inference and refresh loop: several lanes as rows of one batch, told as an iterator of events.

Knows when to refresh and how to step; asks strategies what to keep and `LanguageModel` for hidden states. Knows
nothing of traces, files or pages. Between the device and the host there is one transfer a decode step: a refresh's
record waits on the device and travels with the next token.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ccviz.cache import BoundedCache
from ccviz.errors import UserError
from ccviz.events import EXPECTED_TOKENS, Done, Event, Expected, PromptFed, Refreshed, TokenGenerated
from ccviz.network import LanguageModel
from ccviz.settings import Settings, check_run
from ccviz.strategies import CounterCausal, Entries, Strategy, keep_best
from ccviz.transfer import Mark, fetch

PROMPT_SLICE = {"cpu": 64}  # tokens of the prompt between two looks at the cancel flag
PROMPT_SLICE_ACCELERATOR = 1024


def stream(
    model: LanguageModel,
    prompt_ids: Sequence[int],
    lanes: Mapping[str, Strategy],
    settings: Settings,
    cancelled: Callable[[], bool] = lambda: False,
    follow: Sequence[int] = (),
) -> Iterator[Event]:
    """Run one prompt under one or several strategies and yield what happens.

    Parameters
    ----------
    prompt_ids
        The prompt's tokens, as the model reads them.
    lanes
        A strategy for each lane's name. All share the settings; those that evict and those that do not cannot share
        a batch.
    cancelled
        Asked between tokens, slices of the prompt and blocks of a long scoring pass; once it answers true, the lanes
        end with the stop reason "cancelled".
    follow
        An answer's tokens. Every lane is fed these instead of its own choices, and each token's event says how far the
        lane's next-token distribution was from that of a full cache over the same text. ``max_new_tokens`` is then not
        heeded.

    Yields
    ------
    Event
        For each lane its refreshes and tokens in order, then one `Done`.

    Raises
    ------
    UserError
        If the model cannot run this prompt under these settings. Raised at the first step.
    """
    if follow:
        settings = replace(settings, max_new_tokens=len(follow))
    check_run(model, len(prompt_ids), list(lanes.values()), settings)
    batch = _Batch(model, lanes, settings, len(prompt_ids), cancelled)
    try:
        if follow:
            batch.reference = _Reference(model, prompt_ids, follow, batch.checkpoint)
        yield from batch.read_prompt(prompt_ids)
        yield from batch.decode()
    except _CancelledError:
        yield from batch.land([])[1]
        for lane in batch.lanes:
            yield Done(lane.name, "cancelled")


class _CancelledError(Exception):
    """Raised inside the loop when the run was cancelled."""


@dataclass
class _Lane:
    """One strategy's part of the batch."""

    name: str
    strategy: Strategy
    previous: Tensor  # (entries scored or carried so far,), NaN where unscored
    generator: torch.Generator
    positions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # host copy of the row's
    refreshes: int = 0
    generated: int = 0


@dataclass
class _Record:
    """A refresh that has happened on the device and not yet been told to the host."""

    lane: _Lane
    event: dict[str, Any]
    scores: Tensor | None
    slots: Tensor | None
    surprise: Tensor | None
    explained: list[Tensor]  # nothing, or as `_Explainer.told`
    scoring: tuple[Mark, Mark]
    evicting: tuple[Mark, Mark]
    sharing: int  # lanes whose eviction was one operation


class _Explainer:
    """Gathers what a counter-causal pass over some entries expects in the place of each."""

    def __init__(self, entries: Entries) -> None:
        self.model, self.token_ids = entries.model, entries.cache.token_ids
        self.done = 0
        self.blocks: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, hidden: Tensor) -> None:
        own = self.token_ids[self.done : self.done + hidden.shape[0]]
        self.blocks.append(self.model.expectations(hidden, own, EXPECTED_TOKENS))
        self.done += hidden.shape[0]

    def told(self, unpredicted: int) -> list[Tensor]:
        """Nothing if no pass was made, else flat: probabilities (n,), token ids (n * 5,), their chances (n * 5,).

        The newest ``unpredicted`` entries, which see themselves, get NaN and -1.
        """
        if not self.blocks:
            return []
        own, ids, chances = (torch.cat(part) for part in zip(*self.blocks, strict=True))
        own[-unpredicted:], ids[-unpredicted:], chances[-unpredicted:] = torch.nan, -1, torch.nan
        return [own, ids.flatten(), chances.flatten()]


class _Reference:
    """What the full cache expects before each token of a given answer.

    Keeps the hidden state before each of the answer's tokens, (answer tokens, hidden size), and makes distributions
    from them one at a time: nothing of size answer x vocabulary exists.
    """

    def __init__(
        self, model: LanguageModel, prompt_ids: Sequence[int], answer: Sequence[int], checkpoint: Callable[[], None]
    ) -> None:
        self.model = model
        self.answer = torch.tensor(list(answer), device=model.device)
        ids = torch.tensor([[*prompt_ids, *answer[:-1]]], device=model.device)
        positions = torch.arange(ids.shape[1], device=model.device)[None]
        cache, states = BoundedCache(), []
        for part, at in zip(ids.split(_slice_size(model), 1), positions.split(_slice_size(model), 1), strict=True):
            checkpoint()
            states.append(model.forward(part, at, cache)[0])
        self.hidden = torch.cat(states)[len(prompt_ids) - 1 :].clone()

    def compare(self, step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """KL(full || lane) in nats and whether both have the same most likely token, (lanes,) each."""
        ours = self.model.logits(self.hidden[step]).to(logits.device)
        expected, lanes = ours.log_softmax(-1), logits.log_softmax(-1)
        kl = (expected.exp() * (expected - lanes)).sum(-1).clamp(min=0)
        return kl, logits.argmax(-1) == ours.argmax()


class _Batch:
    """The lanes of one run and the cache they share.

    Until the first eviction all lanes are the same and share the cache's only row; then they *part*, lane i to row i.
    """

    def __init__(
        self,
        model: LanguageModel,
        lanes: Mapping[str, Strategy],
        settings: Settings,
        prompt_size: int,
        cancelled: Callable[[], bool],
    ) -> None:
        strategies = list(lanes.values())
        self.evicts = strategies[0].evicts
        if any(strategy.evicts != self.evicts for strategy in strategies):
            raise UserError("a strategy that never evicts cannot share a batch with strategies that do.")
        bounded = self.evicts and settings.refresh_mode != "prefill_end"
        self.model, self.settings, self.prompt_size = model, settings, prompt_size
        self.cancelled = cancelled
        self.reference: _Reference | None = None  # where the lanes follow a given answer
        self.cache = BoundedCache(
            limit=settings.cache_size + settings.chunk_size if bounded else None,
            record_inputs=any(strategy.needs_layer_inputs for strategy in strategies),
        )
        self.lanes = [
            _Lane(
                name=name,
                strategy=strategy,
                previous=torch.empty(0, device=model.device),
                generator=torch.Generator(model.device).manual_seed(settings.seed),
            )
            for name, strategy in lanes.items()
        ]
        self.parted = False
        self.seen = 0
        self.hidden = torch.empty(0)  # (rows, hidden size) of the newest token
        self.pending: list[_Record] = []

    # The two phases

    def read_prompt(self, prompt_ids: Sequence[int]) -> Iterator[Event]:
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        slice_size = _slice_size(self.model)
        while self.seen < self.prompt_size:
            self.checkpoint()
            chunk_end = self.seen - self.seen % self.settings.chunk_size + self.settings.chunk_size
            fed = ids[:, self.seen : min(chunk_end, self.seen + slice_size, self.prompt_size)]
            before = self.hidden
            hidden = self.feed(fed.expand(self.rows, -1))
            for row, lane in enumerate(self.lanes):
                known = None
                if self.settings.logprobs:
                    at = row if self.parted else 0
                    known = self.prompt_logprobs(before[at : at + 1], hidden[at], fed[0])
                yield PromptFed(lane.name, self.seen, known)
            if self.settings.refresh_due(self.seen, self.prompt_size):
                self.refresh("prefill")
                yield from self.land([])[1]

    def decode(self) -> Iterator[Event]:
        for step in itertools.count():
            self.checkpoint()
            # A model spread over several devices ends on another one than it begins on.
            logits = self.model.logits(self.hidden).to(self.model.device).expand(len(self.lanes), -1)
            tokens, logprobs = self.choose(logits, step)
            harm = list(self.reference.compare(step, logits)) if self.reference else []
            (chosen, chosen_logprobs, *told_harm), refreshed = self.land([tokens, logprobs, *harm])
            yield from refreshed
            going = []
            lanes = list(self.lanes)
            for at, (lane, token) in enumerate(zip(lanes, chosen.tolist(), strict=True)):
                lane.generated += 1
                kl, agrees = (float(told_harm[0][at]), bool(told_harm[1][at])) if told_harm else (math.nan, False)
                yield TokenGenerated(lane.name, self.seen, token, float(chosen_logprobs[at]), kl, agrees)
                ends = token in self.model.eos_ids and self.reference is None
                if ends or lane.generated == self.settings.max_new_tokens:
                    self.lanes.remove(lane)
                    yield Done(lane.name, "eos" if token in self.model.eos_ids else "length")
                else:
                    going.append(at)
            if not going:
                return
            if len(going) < len(lanes):
                tokens = tokens[going]
                if self.parted:
                    self.cache.select_rows(going)
            self.feed(tokens[: self.rows, None])
            if self.settings.refresh_due(self.seen, self.prompt_size):
                self.refresh("decode")

    # Steps

    def feed(self, ids: Tensor) -> Tensor:
        """Process ids (rows, q); afterwards the cache holds them and `hidden` is the newest token's."""
        count = ids.shape[1]
        positions = torch.arange(self.seen, self.seen + count, device=ids.device).expand(ids.shape[0], -1)
        hidden = self.model.forward(ids, positions, self.cache)
        new = np.arange(self.seen, self.seen + count, dtype=np.int32)
        for lane in self.lanes:
            lane.positions = np.concatenate([lane.positions, new])
        self.seen += count
        self.hidden = hidden[:, -1]
        return hidden

    def choose(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The next token of every lane and its log-probability (NaN where not asked for), each (lanes,)."""
        if self.reference is not None:
            tokens = self.reference.answer[step].expand(len(self.lanes))
        elif self.settings.temperature > 0:
            chances = (logits / self.settings.temperature).softmax(-1)
            rows = zip(chances, self.lanes, strict=True)
            tokens = torch.cat([torch.multinomial(row, 1, generator=lane.generator) for row, lane in rows])
        else:
            tokens = logits.argmax(-1)
        if self.settings.logprobs:
            return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        return tokens, torch.full(tokens.shape, torch.nan, device=tokens.device)

    def prompt_logprobs(self, before: Tensor, hidden: Tensor, fed: Tensor) -> npt.NDArray[np.float32]:
        """Log-probabilities of one row's newly fed tokens (q,), from the hidden states (q, ...) and the one before.

        The first token of all has nothing before it: NaN.
        """
        rows = torch.cat([before, hidden[:-1]]) if before.numel() else hidden[:-1]
        known = self.model.token_logprobs(rows, fed[-rows.shape[0] :]) if rows.shape[0] else rows.new_empty(0)
        return np.concatenate([[np.nan] * (fed.shape[0] - rows.shape[0]), known.float().cpu().numpy()]).astype(
            "float32"
        )

    def refresh(self, phase: str) -> None:
        """Score every lane's entries and evict all but J; the records wait in `pending`."""
        n, budget = self.cache.size, self.settings.cache_size
        evict = self.evicts and n > budget
        scored = []
        for row, lane in enumerate(self.lanes):
            lane.previous = _padded(lane.previous, n)
            surprise, explained = self.observed(self.entries(lane, row)) if self.settings.observe else (None, [])
            begin = self.mark()
            scores = slots = None
            if evict or (self.evicts and lane.strategy.scores_every_refresh):
                entries, explainer = self.explaining(self.entries(lane, row))
                scores = _scores(lane.strategy, entries).float().to(self.model.device)
                explained = explainer.told(lane.strategy.protects_last) or explained
                slots = keep_best(scores, self.head(lane), self.tail(lane), budget) if evict else None
                lane.previous = scores if slots is None else scores[slots]
            scored.append((lane, scores, slots, surprise, explained, (begin, self.mark())))
        begin = self.mark()
        if evict:
            self.part()
            self.cache.keep(torch.stack([slots for _, _, slots, *_ in scored if slots is not None]))
        evicting = (begin, self.mark())
        for lane, scores, slots, surprise, explained, scoring in scored:
            event = {
                "lane": lane.name,
                "refresh": lane.refreshes,
                "tokens_seen": self.seen,
                "phase": phase,
                "size_before": n,
                "size_after": self.cache.size,
                "cache_bytes": self.cache.bytes // self.rows,
            }
            lane.refreshes += 1
            self.pending.append(
                _Record(lane, event, scores, slots, surprise, explained, scoring, evicting, len(scored))
            )

    def observed(self, entries: Entries) -> tuple[Tensor, list[Tensor]]:
        """The counter-causal surprise of a lane's entries, (n,), and what was expected instead, as `_Explainer.told`.

        NaN for those that no later entry can predict.
        """
        watcher = CounterCausal()
        entries, explainer = self.explaining(entries)
        surprise = watcher.scores(entries).float().to(self.model.device)
        surprise[-watcher.protects_last :] = torch.nan
        return surprise, explainer.told(watcher.protects_last)

    def explaining(self, entries: Entries) -> tuple[Entries, _Explainer]:
        """The same entries, with a listener for counter-causal passes where the run is to be explained."""
        explainer = _Explainer(entries)
        return (replace(entries, explain=explainer) if self.settings.explain else entries), explainer

    def part(self) -> None:
        """Give every lane a row of its own."""
        if not self.parted and len(self.lanes) > 1:
            self.cache.select_rows([0] * len(self.lanes))
            self.hidden = self.hidden.expand(len(self.lanes), -1)
        self.parted = True

    @property
    def rows(self) -> int:
        return len(self.lanes) if self.parted else 1

    def entries(self, lane: _Lane, row: int) -> Entries:
        return Entries(
            cache=self.cache.row(row if self.parted else 0),
            model=self.model,
            frozen=self.frozen,
            cache_size=self.settings.cache_size,
            frozen_size=self.settings.frozen_size,
            previous=lane.previous,
            checkpoint=self.checkpoint,
        )

    @property
    def frozen(self) -> int:
        """How many cached entries are frozen: they are the first ones, and none of them is ever evicted."""
        return min(self.settings.frozen_size, self.cache.size)

    def head(self, lane: _Lane) -> int:
        """How many of the first entries this lane keeps without ranking: the frozen ones and its own sinks."""
        first = lane.strategy.protects_first(self.settings.cache_size, self.settings.frozen_size)
        return min(max(first, self.frozen), self.cache.size)

    def tail(self, lane: _Lane) -> int:
        """How many of the newest entries this lane keeps without ranking."""
        return max(self.recent(lane), lane.strategy.protects_last)

    def recent(self, lane: _Lane) -> int:
        return lane.strategy.protects_recent(self.settings.cache_size, self.settings.frozen_size)

    def checkpoint(self) -> None:
        if self.cancelled():
            raise _CancelledError

    # From device to host

    def land(self, first: list[Tensor]) -> tuple[list[npt.NDArray[Any]], list[Refreshed]]:
        """Bring ``first`` and all pending records to the host in one transfer."""
        records, self.pending = self.pending, []
        parts = [
            part for record in records for part in (record.slots, record.scores, record.surprise, *record.explained)
        ]
        waiting = [part for part in parts if part is not None]
        arrays = iter(fetch([*first, *waiting]))
        fetched = [next(arrays) for _ in first]
        told = []
        for record in records:
            slots = None if record.slots is None else next(arrays)
            scores = None if record.scores is None else next(arrays)
            surprise = None if record.surprise is None else next(arrays)
            explained = [next(arrays) for _ in record.explained]
            told.append(self.told(record, slots, scores, surprise, explained))
        return fetched, told

    def told(
        self,
        record: _Record,
        slots: npt.NDArray[Any] | None,
        scores: npt.NDArray[Any] | None,
        surprise: npt.NDArray[Any] | None,
        explained: list[npt.NDArray[Any]],
    ) -> Refreshed:
        lane, n = record.lane, record.event["size_before"]
        kept = np.ones(n, bool)
        if slots is not None:
            kept[:] = False
            kept[slots] = True
        before, lane.positions = lane.positions, lane.positions[kept]
        protected = np.full(n, "", dtype="<U6")
        if self.evicts:
            protected[max(n - self.recent(lane), 0) :] = "recent"
            protected[max(n - lane.strategy.protects_last, 0) :] = "last"
            first = lane.strategy.protects_first(self.settings.cache_size, self.settings.frozen_size)
            protected[: min(first, n)] = "sink"
            protected[: min(self.settings.frozen_size, n)] = "frozen"
        (begin, scored), (evicting, evicted) = record.scoring, record.evicting
        seconds = begin.until(scored) + evicting.until(evicted) / record.sharing
        return Refreshed(
            positions=before,
            scores=scores,
            kept=kept,
            protected=protected,
            seconds=seconds,
            surprise=surprise,
            expected=_expected(*explained) if explained else None,
            **record.event,
        )

    def mark(self) -> Mark:
        return Mark(self.model.device)


def _scores(strategy: Strategy, entries: Entries) -> Tensor:
    """A strategy's scores; what a user's own strategy gets wrong is said in one sentence."""
    try:
        scores = strategy.scores(entries)
    except (UserError, _CancelledError):
        raise
    except Exception as error:
        if not strategy.loaded_from:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if frame.filename == strategy.loaded_from]
        line = (theirs or frames)[-1]  # in their file rather than in a library it called
        raise UserError(
            f"the strategy {strategy.name} failed in line {line.lineno} of {line.filename}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(scores, Tensor) or scores.shape != (entries.size,):
        given = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise UserError(
            f"the strategy {strategy.name} must return one score for each of the {entries.size} entries, a tensor of "
            f"shape ({entries.size},), not {given}."
        )
    return scores


def _expected(
    probability: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int32], chances: npt.NDArray[np.float32]
) -> Expected:
    shape = len(probability), -1
    return Expected(probability, token_ids.reshape(shape), chances.reshape(shape))


def _slice_size(model: LanguageModel) -> int:
    return PROMPT_SLICE.get(model.device.type, PROMPT_SLICE_ACCELERATOR)


def _padded(previous: Tensor, n: int) -> Tensor:
    fresh = torch.full((n - previous.shape[0],), torch.nan, device=previous.device)
    return torch.cat([previous, fresh])
