"""Prompt sets: many prompts under several strategies, with results on disk that outlive the program.

Knows files of prompts, and the folder in which a set keeps what it was asked and what came of it; a set is worked
through by whoever runs its requests (`work_through`), on a command line or behind a page.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd
from filelock import FileLock, Timeout

from ccviz.errors import UserError
from ccviz.jobs import Job, Runner, State
from ccviz.metrics import run_summary
from ccviz.models import ModelSpec
from ccviz.paths import data_folder
from ccviz.prompts import holds_answer, parse_sample
from ccviz.runs import Request
from ccviz.settings import Settings
from ccviz.trace import SUFFIX, Trace, write_whole

SCHEMA_VERSION: Final = 1
PROMPT_NAMES: Final = ("prompt", "problem", "question", "input", "text")
ID_NAMES: Final = ("id", "unique_id", "name")
MOST_PROMPTS: Final = 100_000
RESULT_COLUMNS: Final = (
    "item",
    "lane",
    "strategy",
    "cache_size",
    "tokens",
    "characters",
    "stop_reason",
    "right",
    "refreshes",
    "seconds",
    "refresh_share",
    "peak_bytes",
    "mean_kl",
    "agreement",
    "text",
    "problem",
)


@dataclass(frozen=True)
class Item:
    """One prompt of a set.

    Attributes
    ----------
    id
        What it is called; unique within a set.
    prompt
        What the user says.
    answer
        The right answer, or "" where there is none.
    system
        Its own system message; None takes the set's.
    """

    id: str
    prompt: str
    answer: str = ""
    system: str | None = None


# Reading prompts


def read_items(path: str | Path) -> list[Item]:
    """The prompts of a folder (``.txt`` and ``.md``, one each), a ``.jsonl``, a ``.csv``, or a ``.txt`` (one a line).

    A JSON line is text, or an object with ``prompt`` (or problem, question, input, text) and, where it has them, id,
    answer and system; a CSV file has such columns.

    Raises
    ------
    UserError
        If there is nothing to read, or a record has no prompt; the message says where.
    """
    source = Path(path)
    try:
        if source.is_dir():
            files = sorted(file for file in source.iterdir() if file.suffix.lower() in (".txt", ".md"))
            return _checked([_item_of_file(file.name, file.read_bytes()) for file in files], f"The folder {source}")
        return items_of_file(source.name, source.read_bytes())
    except OSError as error:
        raise UserError(f"The prompts in {source} cannot be read: {error.strerror or error}.") from None


def items_of_file(name: str, data: bytes) -> list[Item]:
    """The prompts of one file, by the kind its name says; see `read_items`."""
    suffix = Path(name).suffix.lower()
    if suffix not in (".jsonl", ".csv", ".txt"):
        raise UserError(f"Prompts are read from a folder, .jsonl, .csv or .txt, not from {name!r}.")
    text = _decoded(name, data)
    if suffix == ".jsonl":
        items = [_item(record, at, f"line {at} of {name}") for at, record in _json_lines(name, text)]
    elif suffix == ".csv":
        rows = csv.DictReader(io.StringIO(text))
        items = [_item(record, at, f"row {at} of {name}") for at, record in enumerate(rows, 1)]
    else:
        items = items_of_lines(text)
    return _checked(items, name)


def items_of_files(files: Sequence[tuple[str, bytes]]) -> list[Item]:
    """The prompts of several files: each .txt or .md is one prompt, each .jsonl or .csv holds many."""
    items: list[Item] = []
    for name, data in files:
        whole = Path(name).suffix.lower() in (".txt", ".md")
        items += [_item_of_file(name, data)] if whole else items_of_file(name, data)
    return _checked(items, "The upload")


def items_of_lines(text: str) -> list[Item]:
    """One prompt a line; empty lines are passed over."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [Item(str(at), line) for at, line in enumerate(lines, 1)]


def _item_of_file(name: str, data: bytes) -> Item:
    text = _decoded(name, data)
    stem = Path(name).stem
    try:
        sample = parse_sample(name, text)
    except UserError:  # any other text is a prompt as it stands
        return Item(stem, text.strip("\n"))
    return Item(stem, sample.text, sample.answer, sample.system)


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text; save it as UTF-8.") from None


def _json_lines(name: str, text: str) -> list[tuple[int, Any]]:
    records = []
    for at, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append((at, json.loads(line)))
            except (ValueError, RecursionError):
                raise UserError(f"Line {at} of {name} is not JSON: a .jsonl file has one JSON value a line.") from None
    return records


def _item(record: Any, at: int, place: str) -> Item:
    if isinstance(record, str):
        return Item(str(at), record)
    if not isinstance(record, dict):
        raise UserError(f"The record in {place} is neither text nor an object with a prompt.")
    named = {str(key).strip().lower(): value for key, value in record.items()}
    prompt = next((named[name] for name in PROMPT_NAMES if name in named), None)
    if prompt is None:
        raise UserError(
            f"The record in {place} has no prompt: it needs one of {', '.join(PROMPT_NAMES)}, "
            f"and has {', '.join(named) or 'nothing'}."
        )
    name = next((named[name] for name in ID_NAMES if named.get(name) not in (None, "")), at)
    answer, system = named.get("answer"), named.get("system")
    return Item(
        str(name), str(prompt), "" if answer is None else str(answer), None if system in (None, "") else str(system)
    )


def _checked(items: list[Item], source: str) -> list[Item]:
    """Every prompt has words, and ids are made unique."""
    if not items:
        raise UserError(f"{source} has no prompts: give a folder of .txt files, a .jsonl, a .csv, or lines of text.")
    if len(items) > MOST_PROMPTS:
        raise UserError(f"{source} has {len(items):,} prompts, more than a set may have ({MOST_PROMPTS:,}).")
    empty = next((item.id for item in items if not item.prompt.strip()), None)
    if empty is not None:
        raise UserError(f"The prompt {empty!r} of {source} is empty.")
    seen: dict[str, int] = {}
    unique = []
    for item in items:
        seen[item.id] = seen.get(item.id, 0) + 1
        unique.append(item if seen[item.id] == 1 else replace(item, id=f"{item.id} ({seen[item.id]})"))
    return unique


# A set and its folder


@dataclass(frozen=True)
class PromptSet:
    """What a set was asked, and the folder that holds it with its results.

    Attributes
    ----------
    folder
        Holds ``set.json`` (the definition), ``results.jsonl`` (a line a prompt and lane) and ``traces/``.
    title
        What people read.
    spec
        The model.
    items, lanes
        The prompts, and for each lane's name the request that every prompt is put into.
    follow
        The lane whose answer the others are fed, or None.
    """

    folder: Path
    title: str
    spec: ModelSpec
    items: tuple[Item, ...]
    lanes: Mapping[str, Request]
    follow: str | None = None

    @classmethod
    def create(
        cls,
        folder: Path,
        title: str,
        spec: ModelSpec,
        items: Sequence[Item],
        lanes: Mapping[str, Request],
        follow: str | None = None,
    ) -> PromptSet:
        """Write a new set; or open the one that is there, if it asks the same.

        Raises
        ------
        UserError
            If the folder holds another set, or cannot be written to.
        """
        made = cls(folder, title, spec, tuple(items), dict(lanes), follow)
        if (folder / "set.json").exists():
            there = cls.open(folder)
            if there._asked() != made._asked():
                raise UserError(
                    f"{folder} holds the results of another set of prompts or settings: choose another folder, or give "
                    "the same prompts and settings to go on with it."
                )
            return there
        try:
            (folder / "traces").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder {folder} cannot be made: {error.strerror or error}.") from None
        header = {"schema_version": SCHEMA_VERSION, "title": title, **made._asked()}
        write_whole(folder / "set.json", json.dumps(header, ensure_ascii=False, indent=1).encode())
        return made

    @classmethod
    def open(cls, folder: str | Path) -> PromptSet:
        """The set that a folder holds.

        Raises
        ------
        UserError
            If it holds none, or its definition cannot be read.
        """
        folder = Path(folder)
        try:
            stated = json.loads((folder / "set.json").read_text(encoding="utf-8"))
            if stated["schema_version"] != SCHEMA_VERSION:
                raise UserError(f"{folder} holds a set of version {stated['schema_version']!r}: update ccviz.")
            lanes = {
                name: Request(
                    prompt="",
                    settings=Settings(**lane["settings"]),
                    **{key: lane[key] for key in ("strategy", "options", "chat", "system", "freeze_system")},
                )
                for name, lane in stated["lanes"].items()
            }
            items = tuple(Item(**item) for item in stated["items"])
            return cls(folder, stated["title"], ModelSpec(**stated["model"]), items, lanes, stated["follow"])
        except OSError as error:
            raise UserError(f"{folder} holds no prompt set: {error.strerror or error}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{folder} holds a set.json that does not follow the format.") from None

    def _asked(self) -> dict[str, Any]:
        lanes = {}
        for name, request in self.lanes.items():
            lanes[name] = {
                "strategy": request.strategy,
                "options": dict(request.options),
                "chat": request.chat,
                "system": request.system,
                "freeze_system": request.freeze_system,
                "settings": asdict(request.settings),
            }
        items = [asdict(item) for item in self.items]
        return {"model": asdict(self.spec), "follow": self.follow, "lanes": lanes, "items": items}

    def requests(self, item: Item) -> dict[str, Request]:
        """The requests of one prompt, a lane each."""
        return {
            name: replace(
                lane,
                prompt=item.prompt,
                label=f"{self.title}: {item.id}",
                system=lane.system if item.system is None else item.system,
            )
            for name, lane in self.lanes.items()
        }

    # Results

    def results(self) -> pd.DataFrame:
        """One row a prompt and lane that is done, in the order they were done.

        Returns
        -------
        DataFrame
            Columns `RESULT_COLUMNS`: item and lane; tokens and characters of the answer; right (None where the prompt
            has no answer); mean_kl and agreement (NaN where not followed); text; problem (a sentence where the prompt
            could not be run, else "").
        """
        path = self.folder / "results.jsonl"
        return read_results(path) if path.exists() else pd.DataFrame(columns=list(RESULT_COLUMNS))

    def pending(self) -> list[Item]:
        """The prompts that have not been run in every lane."""
        done = self.results().groupby("item")["lane"].nunique()
        return [item for item in self.items if done.get(item.id, 0) < len(self.lanes)]

    def record(self, item: Item, traces: Mapping[str, Trace]) -> None:
        """Keep what came of one prompt: its traces, then a line a lane, all at once.

        Raises
        ------
        UserError
            If the disk is full or the folder is gone.
        """
        for lane, trace in traces.items():
            trace.save(self.trace_path(item, lane))
        self._append([_result(item, lane, trace) for lane, trace in traces.items()])

    def record_problem(self, item: Item, sentence: str) -> None:
        """Keep that a prompt could not be run, and why."""
        self._append([{"item": item.id, "lane": lane, "problem": sentence} for lane in self.lanes])

    def trace_path(self, item: Item, lane: str) -> Path:
        """Where the trace of a prompt in a lane is kept."""
        return self.folder / "traces" / f"{_file_name(item.id)}.{_file_name(lane)}{SUFFIX}"

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Add whole lines to the results; half a line that a crash has left is cut off first."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        try:
            with open(self.folder / "results.jsonl", "ab") as file:
                file.truncate(sum(len(line) for line in self._whole_lines()))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"Results cannot be written to {self.folder}: {error.strerror or error}.") from None

    def _whole_lines(self) -> list[bytes]:
        path = self.folder / "results.jsonl"
        return _whole_lines(path) if path.exists() else []


def read_results(path: Path) -> pd.DataFrame:
    """The results in a ``results.jsonl``, as `PromptSet.results` gives them.

    Raises
    ------
    UserError
        If there is no such file, or a line of it is not a result.
    """
    try:
        rows = [json.loads(line) for line in _whole_lines(path)]
        if not all(isinstance(row, dict) and {"item", "lane"} <= set(row) for row in rows):
            raise ValueError
    except OSError as error:
        raise UserError(f"The results {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise UserError(f"{path} does not hold results of a prompt set, an object a line.") from None
    table = pd.DataFrame(rows, columns=list(RESULT_COLUMNS))
    return table.drop_duplicates(["item", "lane"], keep="last").reset_index(drop=True)


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, but for one at its end that a crash has cut off."""
    lines = path.read_bytes().splitlines(keepends=True)
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _result(item: Item, lane: str, trace: Trace) -> dict[str, Any]:
    numbers = run_summary(trace)
    row = {
        "item": item.id,
        "lane": lane,
        "strategy": trace.strategy,
        "cache_size": int(trace.number("cache_size")),
        "tokens": numbers["new_tokens"],
        "characters": len(trace.text),
        "stop_reason": trace.stop_reason,
        "right": None if trace.config.get("follows") else holds_answer(trace.text, item.answer),
        "refreshes": numbers["refreshes"],
        "seconds": numbers["seconds"],
        "refresh_share": numbers["refresh_share"],
        "peak_bytes": numbers["peak_bytes"],
        "text": trace.text,
        "problem": "",
    }
    if "kl" in trace.tokens:
        harm = trace.tokens[trace.tokens["generated"]]
        row["mean_kl"], row["agreement"] = float(harm["kl"].mean()), float(harm["agrees"].mean())
    return row


def _file_name(text: str) -> str:
    """A file's name for any text: readable where it can be, and different for different texts."""
    plain = re.sub(r"[^\w=-]+", "-", text, flags=re.ASCII).strip("-")[:60]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def new_folder(title: str) -> Path:
    """A folder for a new set in the user's data folder."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "set"
    return sets_folder() / f"{words}-{uuid.uuid4().hex[:6]}"


def sets_folder() -> Path:
    return data_folder() / "sets"


def known_sets() -> list[Path]:
    """The folders of all sets in the user's data folder, newest first."""
    files = sets_folder().glob("*/set.json")
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]


# Working through a set


def work_through(
    prompts: PromptSet,
    run: Callable[[Item], Mapping[str, Trace]],
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[Item], None] = lambda _item: None,
) -> None:
    """Run what is pending, prompt by prompt, and keep each result as it comes.

    Parameters
    ----------
    run
        Runs one prompt in every lane; a `UserError` it raises is kept as that prompt's result.
    stop
        Asked between prompts and after each: once it answers true, nothing more is run or kept.
    tell
        Told of each prompt when it is done.

    Raises
    ------
    UserError
        If results cannot be kept, or another program is working through the same set.
    """
    try:
        with FileLock(prompts.folder / ".lock", timeout=0):
            for item in prompts.pending():
                if stop():
                    return
                try:
                    traces = run(item)
                except UserError as error:
                    prompts.record_problem(item, str(error))
                else:
                    if stop():
                        return
                    prompts.record(item, traces)
                tell(item)
    except Timeout:
        raise UserError(f"{prompts.title} is being run by another program already.") from None


class SetRun:
    """A set being worked through on a server: one job a prompt, so that other people's runs come between.

    It goes on in a thread of its own until all is done, `stop` is called, or something stands in the way; `message`
    then says what.
    """

    def __init__(self, runner: Runner, prompts: PromptSet) -> None:
        self.runner, self.prompts = runner, prompts
        self.total = len(prompts.items)
        self.done = self.total - len(prompts.pending())
        self.message = ""
        self.job: Job | None = None
        self._done_before, self._began = self.done, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go, name="ccviz-set", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def seconds_left(self) -> float | None:
        """By the time a prompt took so far; None before the first one is done."""
        done = self.done - self._done_before
        return (time.monotonic() - self._began) / done * (self.total - self.done) if done else None

    def stop(self) -> None:
        """Stop within a token; the prompt at work is not kept and comes again on resuming."""
        self._stopped.set()
        if self.job is not None:
            self.runner.cancel(self.job)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; false if it had not within ``timeout`` seconds."""
        self._thread.join(timeout)
        return self.ended

    def _go(self) -> None:
        try:
            ready = self.runner.prepare(self.prompts.spec)
            self.job = ready
            ready.wait()
            if ready.state is State.FAILED:
                raise UserError(ready.message)
            work_through(self.prompts, self._run, self._stopped.is_set, self._count)
        except UserError as error:
            self.message = str(error)

    def _run(self, item: Item) -> Mapping[str, Trace]:
        self.job = self.runner.submit(self.prompts.spec, self.prompts.requests(item), self.prompts.follow, kept=False)
        if self._stopped.is_set():
            self.runner.cancel(self.job)
        self.job.wait()
        if self.job.state is State.FAILED:
            raise UserError(self.job.message)
        return self.job.traces()

    def _count(self, _item: Item) -> None:
        self.done += 1
