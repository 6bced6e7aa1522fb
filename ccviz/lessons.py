"""Lessons: Markdown files whose steps name a recorded run, a refresh, and what to look at.

Knows lesson files, recorded runs and the little arithmetic they show; imports nothing heavy and no model. The format
is described in docs/teaching.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from ccviz.errors import UserError
from ccviz.paths import samples_folder
from ccviz.prompts import holds_answer
from ccviz.trace import SUFFIX, Trace

FENCE: Final = "---\n"
SHOWS: Final = ("", "growth", "row")
KINDS: Final = ("survivors", "lost", "answers")
_STEP = re.compile(r"^## +(.+)$", re.MULTILINE)
_BLOCK = re.compile(r"```step\n(.*?)```\n?", re.DOTALL)
_NOTES = re.compile(r"^### Teacher\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """A prediction, scored against the recorded run of its step.

    Attributes
    ----------
    kind
        ``"survivors"``: which of the tokens of ``among`` are kept at the step's refresh. ``"lost"``: at which refresh
        the token ``about`` is lost. ``"answers"``: whether the run's answer holds ``about``.
    text
        The question; for survivors it may name ``{count}`` and ``{of}``.
    why
        What to say once it is revealed.
    """

    kind: str
    text: str
    why: str
    among: str = ""
    about: str = ""


@dataclass(frozen=True)
class Step:
    """One step of a lesson.

    Attributes
    ----------
    title, text, notes
        What people read, in Markdown; the notes are the teacher's.
    runs
        Names of recorded runs, at most two; two are locked in step.
    refresh
        Counted from 1; None for the last.
    highlight
        Some text of the run to mark; "" for none.
    pin
        Some text of the run whose first token is pinned; "" for none.
    order
        Of the slots, as `metrics.ORDERS`.
    show
        What stands in place of a run: ``"growth"``, ``"row"`` or "".
    question
        To be answered before the refresh is shown.
    """

    title: str
    text: str
    notes: str = ""
    runs: tuple[str, ...] = ()
    refresh: int | None = None
    highlight: str = ""
    pin: str = ""
    order: str = "position"
    show: str = ""
    question: Question | None = None


@dataclass(frozen=True)
class Lesson:
    """One lesson; ``data`` is whatever else its front matter holds, for the steps that show it."""

    name: str
    title: str
    goal: str
    minutes: int
    steps: tuple[Step, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


def lessons_folder() -> Path:
    """Where the lessons lie, and beside them, in ``runs``, their recorded runs."""
    return samples_folder() / "lessons"


def lesson_names() -> list[str]:
    """The lessons there are, in the order of their files."""
    return [path.stem for path in sorted(lessons_folder().glob("*.md"))]


def load_lesson(name: str) -> Lesson:
    """The lesson of this name.

    Raises
    ------
    UserError
        If there is none, or its file does not follow the format.
    """
    if name not in lesson_names():
        raise UserError(f"There is no lesson {name!r}; choose one of {', '.join(lesson_names())}.")
    return parse_lesson(name, (lessons_folder() / f"{name}.md").read_text(encoding="utf-8"))


def parse_lesson(name: str, whole: str) -> Lesson:
    """A lesson from its text: YAML between two lines of dashes, then a section a step."""
    try:
        _, head, body = whole.split(FENCE, 2)
        stated: dict[str, Any] = yaml.safe_load(head)
        known = {key: stated.pop(key) for key in ("title", "goal", "minutes")}
        _, *sections = _STEP.split(body)
        steps = tuple(_step(*pair) for pair in zip(sections[::2], sections[1::2], strict=True))
        if not steps:
            raise ValueError("it has no steps")
        return Lesson(name, str(known["title"]), str(known["goal"]).strip(), int(known["minutes"]), steps, stated)
    except (ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise UserError(f"The lesson {name} does not follow the format: {reason}.") from None


def _step(title: str, section: str) -> Step:
    found = _BLOCK.search(section)
    stated: dict[str, Any] = yaml.safe_load(found.group(1)) if found else {}
    text, *notes = _NOTES.split(_BLOCK.sub("", section), maxsplit=1)
    runs = stated.pop("run", [])
    asked = stated.pop("ask", None)
    step = Step(
        title=title.strip(),
        text=text.strip(),
        notes="".join(notes).strip(),
        runs=tuple([runs] if isinstance(runs, str) else runs),
        question=Question(**asked) if asked else None,
        **stated,
    )
    if step.show not in SHOWS or (step.question and step.question.kind not in KINDS) or len(step.runs) > 2:
        raise ValueError(f"the step {step.title!r} shows or asks something unknown")
    if step.question and not step.runs:
        raise ValueError(f"the step {step.title!r} asks about no run")
    return step


# Recorded runs


def run_file(name: str) -> Path:
    """Where the recorded run of this name lies."""
    return lessons_folder() / "runs" / f"{name}{SUFFIX}"


@lru_cache(maxsize=32)
def recorded_run(name: str) -> Trace:
    """A recorded run; the same object each time, so do not change it."""
    return Trace.open(run_file(name))


def before(trace: Trace, refresh: int) -> Trace:
    """What was known before a refresh, counted from 1: earlier refreshes, the prompt, and no answer beyond them."""
    known = trace.refreshes.iloc[: refresh - 1]
    seen = int(known["tokens_seen"].iloc[-1]) if len(known) else 0
    tokens = trace.tokens[~trace.tokens["generated"] | (trace.tokens["position"] < seen)]
    entries = trace.entries[trace.entries["refresh"].isin(known["refresh"])]
    config = {**trace.config, "stop_reason": ""}
    return Trace(config, tokens.reset_index(drop=True), known.reset_index(drop=True), entries.reset_index(drop=True))


def find_text(trace: Trace, text: str) -> tuple[int, int]:
    """The first and last position of the tokens that a text covers, where it first occurs.

    Raises
    ------
    UserError
        If it does not occur.
    """
    texts = trace.tokens["text"].tolist()
    at = "".join(texts).find(text)
    if at < 0 or not text:
        raise UserError(f"The run does not hold the text {text!r}.")
    ends = np.cumsum([len(part) for part in texts])
    return int(np.searchsorted(ends, at, side="right")), int(np.searchsorted(ends, at + len(text) - 1, side="right"))


# Questions


@dataclass(frozen=True)
class Solved:
    """A question with its options and what is right, from the recorded run.

    ``options`` are positions (survivors), numbers of refreshes with 0 for never (lost), or 1 and 0 for yes and no
    (answers); ``right`` are those of them that hold.
    """

    question: Question
    text: str
    options: tuple[int, ...]
    right: frozenset[int]

    def score(self, chosen: Sequence[int]) -> int:
        """How many of the right options were chosen."""
        return len(self.right & set(chosen))

    @property
    def by_chance(self) -> float:
        """How many of the right ones a blind choice would hit on average."""
        return len(self.right) ** 2 / len(self.options)


def solve(step: Step) -> Solved:
    """A step's question, with its answer looked up in the recorded run.

    Raises
    ------
    UserError
        If the step asks nothing, or of something that the run does not have.
    """
    question = step.question
    if question is None:
        raise UserError(f"The step {step.title!r} asks nothing.")
    trace = recorded_run(step.runs[0])
    entries, refreshes = trace.all_entries(), trace.refreshes["refresh"].tolist()
    if question.kind == "answers":
        return Solved(question, question.text, (1, 0), frozenset({int(bool(holds_answer(trace.text, question.about)))}))
    if question.kind == "lost":
        position, _ = find_text(trace, question.about)
        gone = entries[(entries["position"] == position) & ~entries["kept"]]["refresh"]
        born = int(np.searchsorted(trace.refreshes["tokens_seen"], position, side="right"))
        lost = refreshes.index(gone.iloc[0]) + 1 if len(gone) else 0
        return Solved(question, question.text, (*range(born + 1, len(refreshes) + 1), 0), frozenset({lost}))
    first, last = find_text(trace, question.among)
    here = entries[entries["refresh"] == refreshes[(step.refresh or len(refreshes)) - 1]]
    here = here[here["position"].between(first, last)]
    kept = frozenset(here.loc[here["kept"], "position"].tolist())
    text = question.text.format(count=len(kept), of=len(here))
    return Solved(question, text, tuple(here["position"].tolist()), kept)


# The arithmetic of a cache's size


def entry_bytes(layers: int, kv_heads: int, head_size: int, bytes_a_number: int) -> int:
    """Bytes that one token takes in a key-value cache: a key and a value in every layer and KV head."""
    return 2 * layers * kv_heads * head_size * bytes_a_number


def shape_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, KV heads and head size from a Hugging Face ``config.json``.

    Raises
    ------
    UserError
        If the numbers are not there.
    """
    config = config.get("text_config", config)
    try:
        layers = config.get("num_hidden_layers", config.get("n_layer"))
        heads = config.get("num_attention_heads", config.get("n_head"))
        width = config.get("hidden_size", config.get("n_embd"))
        kv_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or width // heads
        shape = (int(layers), int(kv_heads), int(head_size))
    except (TypeError, ValueError, AttributeError, ZeroDivisionError):
        shape = (0, 0, 0)
    if min(shape) < 1:
        raise UserError(
            "This configuration does not say how many layers, attention heads and numbers a head there are: paste the "
            "config.json of a decoder-only model."
        )
    return shape


def read_config(text: str) -> tuple[int, int, int]:
    """`shape_of` a pasted ``config.json``."""
    try:
        stated = json.loads(text)
    except ValueError as error:
        raise UserError(f"This is not JSON: {error}.") from None
    if not isinstance(stated, dict):
        raise UserError("This is not the config.json of a model: it must be one object in braces.")
    return shape_of(stated)


# One row of a counter-causal pass, small enough to follow by hand


@dataclass(frozen=True)
class TinyModel:
    """A model of one layer and one head, without norms: small enough for a blackboard.

    Attributes
    ----------
    tokens
        The cached text.
    words
        The vocabulary; its rows in ``vectors`` are embeddings, keys and values at once, and the head.
    vectors
        (words, size).
    """

    tokens: tuple[str, ...]
    words: tuple[str, ...]
    vectors: np.ndarray[Any, np.dtype[np.float64]]


def tiny_model(data: Mapping[str, Any]) -> TinyModel:
    """From a lesson's front matter: ``tokens``, and ``words`` with a vector each."""
    words = dict(data["words"])
    return TinyModel(tuple(data["tokens"]), tuple(words), np.array(list(words.values()), dtype=float))


@dataclass(frozen=True)
class Row:
    """One row, step by step; lists run over the tokens it sees (``seen``) or the vocabulary."""

    row: int
    seen: list[int]
    scores: list[float]  # q . k / sqrt(size)
    weights: list[float]  # their softmax
    mixed: list[float]  # the weighted sum of values
    hidden: list[float]  # what the row's own token adds to it
    logits: list[float]  # of every word
    chances: list[float]  # their softmax
    own: int  # the row's own word
    surprise: float  # 1 - chance of it (equation 5)


def counter_causal_row(model: TinyModel, row: int) -> Row:
    """Row ``row`` of a counter-causal pass: it sees only later tokens (paper section 3.1, equation 5).

    The last row sees itself, which keeps the softmax finite; strategies protect its token.
    """
    places = [model.words.index(token) for token in model.tokens]
    vectors = model.vectors[places]
    seen = list(range(row + 1, len(places))) or [row]
    scores = vectors[seen] @ vectors[row] / math.sqrt(vectors.shape[1])
    weights = _softmax(scores)
    mixed = weights @ vectors[seen]
    hidden = vectors[row] + mixed
    logits = model.vectors @ hidden
    chances = _softmax(logits)
    own = places[row]
    return Row(
        row=row,
        seen=seen,
        scores=scores.tolist(),
        weights=weights.tolist(),
        mixed=mixed.tolist(),
        hidden=hidden.tolist(),
        logits=logits.tolist(),
        chances=chances.tolist(),
        own=own,
        surprise=float(1 - chances[own]),
    )


def _softmax(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    raised = np.exp(values - values.max())
    return np.asarray(raised / raised.sum())
