"""The record of a run: three tables and a configuration, kept in memory and in ``.ccviz`` files.

Knows events, pandas and the file format (docs/trace-format.md); knows nothing of models or pages.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow.parquet

from ccviz.errors import UserError
from ccviz.events import EXPECTED_TOKENS, Done, Event, Expected, PromptFed, Refreshed, TokenGenerated
from ccviz.tokens import TokenTexts, decode

SCHEMA_VERSION: Final = 1
SUFFIX: Final = ".ccviz"
MOST_BYTES: Final = 1 << 30  # unpacked; a run of 100,000 tokens and 1,000 refreshes stays far below
MOST_RATIO: Final = 200  # unpacked to packed; Parquet is compressed already, so honest files stay near 1

# The columns every trace has and their types; more columns may follow, and are kept.
COLUMNS: Final[dict[str, dict[str, str]]] = {
    "tokens": {"position": "int32", "token_id": "int32", "text": "str", "generated": "bool", "logprob": "float32"},
    "refreshes": {
        "refresh": "int32",
        "tokens_seen": "int32",
        "phase": "str",
        "size_before": "int32",
        "size_after": "int32",
        "seconds": "float64",
        "cache_bytes": "int64",
    },
    "entries": {
        "refresh": "int32",
        "position": "int32",
        "slot": "int32",
        "score": "float32",
        "kept": "bool",
        "protected": "str",
    },
}

EXPECTED_PLACES: Final = tuple(range(1, EXPECTED_TOKENS + 1))  # of the tokens expected in an entry's place

# Columns that are there only when they were asked for.
OPTIONAL_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "tokens": {"kl": "float32", "agrees": "bool"},
    "refreshes": {},
    "entries": {
        "surprise": "float32",
        "probability": "float32",
        **{f"expected_{place}": "str" for place in EXPECTED_PLACES},
        **{f"chance_{place}": "float32" for place in EXPECTED_PLACES},
    },
}


@dataclass(eq=False)
class Trace:
    """What a run leaves behind.

    Attributes
    ----------
    config
        What was asked and on what: strategy, options, cache_size, chunk_size, ..., model, dtype, device, versions,
        started, seconds, stop_reason. Only JSON types.
    tokens
        One row a position: position, token_id, text, generated, logprob; in a run that followed another's answer
        also kl and agrees (see docs/trace-format.md).
    refreshes
        One row a refresh: refresh, tokens_seen, phase, size_before, size_after, seconds, cache_bytes.
    entries
        One row an entry a refresh, evicted ones included: refresh, position, slot, score, kept, protected, in an
        observed run surprise, and in an explained one probability, expected_1 to expected_5 and chance_1 to chance_5.
        Empty for the full cache, whose entries are all positions seen, unless it was observed; `all_entries` fills
        them in.
    """

    config: dict[str, Any]
    tokens: pd.DataFrame
    refreshes: pd.DataFrame
    entries: pd.DataFrame

    @property
    def text(self) -> str:
        """The generated text, without the token that ended it."""
        texts = self.tokens.loc[self.tokens["generated"], "text"].tolist()
        return "".join(texts[:-1] if self.stop_reason == "eos" else texts)

    @property
    def prompt_text(self) -> str:
        """The prompt as the model read it, template included."""
        return "".join(self.tokens.loc[~self.tokens["generated"], "text"])

    @property
    def stop_reason(self) -> str:
        """Why the run ended: "eos", "length", "cancelled" or "stop"; "" while it goes on."""
        return str(self.config.get("stop_reason", ""))

    @property
    def strategy(self) -> str:
        return str(self.config.get("strategy", "unknown"))

    def number(self, name: str) -> float:
        """A number of the configuration; 0 where it is missing or is none, as in files of other programs."""
        value = self.config.get(name)
        return float(value) if isinstance(value, (int, float)) and np.isfinite(value) else 0.0

    def all_entries(self) -> pd.DataFrame:
        """`entries`, with those that a full cache does not record: every position seen, kept, unscored."""
        if len(self.entries) or not len(self.refreshes):
            return self.entries
        sizes = self.refreshes["size_after"].to_numpy()
        slots = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        columns = {
            "refresh": np.repeat(self.refreshes["refresh"].to_numpy(), sizes),
            "position": slots,
            "slot": slots,
            "score": np.full(len(slots), np.nan, np.float32),
            "kept": np.ones(len(slots), bool),
            "protected": [""] * len(slots),
        }
        return _typed("entries", pd.DataFrame(columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self.config == other.config and all(getattr(self, name).equals(getattr(other, name)) for name in COLUMNS)

    def save(self, path: str | Path) -> Path:
        """Write a ``.ccviz`` file, whole or not at all, and return its path.

        Raises
        ------
        UserError
            If the folder cannot be written to or the disk is full.
        """
        target = Path(path)
        if target.suffix != SUFFIX:
            raise UserError(f"a trace is saved as {SUFFIX}, not as {target.name!r}: rename the output.")
        write_whole(target, self.to_bytes())
        return target

    def to_bytes(self) -> bytes:
        """The bytes of a ``.ccviz`` file."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            header = {"schema_version": SCHEMA_VERSION, "config": self.config}
            archive.writestr("trace.json", json.dumps(header, indent=1))
            for name in COLUMNS:
                archive.writestr(f"{name}.parquet", getattr(self, name).to_parquet(index=False, compression="zstd"))
        return buffer.getvalue()

    @classmethod
    def open(cls, source: str | Path | bytes) -> Trace:
        """Read a ``.ccviz`` file, given by path or as its bytes.

        Raises
        ------
        UserError
            If it is missing, not such a file, of another version, incomplete, or suspiciously large; the message
            says which.
        """
        name = "the file" if isinstance(source, bytes) else str(source)
        try:
            with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
                return _read(archive, name)
        except UserError:
            raise
        except FileNotFoundError:
            raise UserError(f"{name} does not exist.") from None
        except IsADirectoryError:
            raise UserError(f"{name} is a folder, not a {SUFFIX} file.") from None
        except OSError as error:
            reason = error.strerror or "it is damaged"
            raise UserError(f"{name} cannot be read: {reason}.") from None
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError):
            # zipfile's answers to bytes that are no zip, or one that is encrypted, cut, or packed in a way it lacks
            raise UserError(f"{name} is not a {SUFFIX} file, or only part of one: save or download it again.") from None


def _read(archive: zipfile.ZipFile, name: str) -> Trace:
    members = {info.filename: info for info in archive.infolist()}
    wanted = ["trace.json", *(f"{table}.parquet" for table in COLUMNS)]
    missing = [member for member in wanted if member not in members]
    if missing:
        raise UserError(f"{name} is not a {SUFFIX} file: it has no {missing[0]}.")
    unpacked = sum(members[member].file_size for member in wanted)
    packed = sum(members[member].compress_size for member in wanted)
    if unpacked > MOST_BYTES or unpacked > MOST_RATIO * max(packed, 1024):
        raise _too_large(name, unpacked)
    try:
        header = json.loads(archive.read("trace.json"))
        version, config = header["schema_version"], header["config"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{name} has a trace.json that does not follow the format.") from None
    if version != SCHEMA_VERSION:
        raise UserError(f"{name} has format version {version!r} and this ccviz reads {SCHEMA_VERSION}: update ccviz.")
    if not isinstance(config, dict):
        raise UserError(f"{name} has a trace.json that does not follow the format.")
    tables = {table: _read_table(archive, table, name) for table in COLUMNS}
    wrong = _contradiction(**tables)
    if wrong:
        raise UserError(f"{name} does not follow the format: {wrong}.")
    return Trace(config, **tables)


def _contradiction(tokens: pd.DataFrame, refreshes: pd.DataFrame, entries: pd.DataFrame) -> str:
    """What the tables say that cannot be, in a clause; "" where they agree."""
    count = len(tokens)
    if not np.array_equal(tokens["position"], np.arange(count)):
        return "positions in tokens must count up from 0"
    if not refreshes["refresh"].is_unique or not refreshes["refresh"].is_monotonic_increasing:
        return "refreshes must be numbered upwards"
    for column in ("tokens_seen", "size_before", "size_after"):
        if len(refreshes) and not refreshes[column].between(0, count).all():
            return f"{column} in refreshes must lie between 0 and the {count} tokens there are"
    if not entries["refresh"].isin(refreshes["refresh"]).all():
        return "entries name a refresh that is not in refreshes"
    if len(entries) and not entries["position"].between(0, count - 1).all():
        return "entries name a position that is not in tokens"
    if entries.duplicated(["refresh", "position"]).any():
        return "entries name a position twice at one refresh"
    return ""


def _read_table(archive: zipfile.ZipFile, table: str, name: str) -> pd.DataFrame:
    try:
        data = io.BytesIO(archive.read(f"{table}.parquet"))
        shape = pyarrow.parquet.ParquetFile(data).metadata
        # Parquet packs on its own, so that the zip's sizes say nothing about the rows; four bytes a cell is the least.
        if 4 * shape.num_rows * shape.num_columns > MOST_BYTES:
            raise _too_large(name, 4 * shape.num_rows * shape.num_columns)
        frame = pd.read_parquet(data)
    except (UserError, zipfile.BadZipFile):
        raise
    except Exception as error:  # pyarrow and zlib raise many kinds for damaged bytes, all of them the file's fault
        raise UserError(f"{name} is damaged: its table {table} cannot be read ({type(error).__name__}).") from None
    missing = [column for column in COLUMNS[table] if column not in frame.columns]
    if missing:
        raise UserError(f"{name} is incomplete: its table {table} has no column {missing[0]}.")
    try:
        for column, dtype in _types(table, frame).items():
            _check_values(frame[column], dtype)
        return _typed(table, frame)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} does not follow the format: its table {table} has a column of a wrong type.") from None


def _too_large(name: str, size: int) -> UserError:
    return UserError(f"{name} would unpack to {size / 1e6:,.0f} MB, more than a trace may, and was not opened.")


def _check_values(values: pd.Series[Any], dtype: str) -> None:
    """Raise `TypeError` unless ``values`` become ``dtype`` without losing anything."""
    if not len(values):
        return
    types = pd.api.types
    if dtype.startswith("float"):
        fits = types.is_float_dtype(values)
    elif dtype.startswith("int"):
        limits = np.iinfo(dtype)
        fits = types.is_integer_dtype(values) and limits.min <= values.min() and values.max() <= limits.max
    elif dtype == "bool":
        fits = types.is_bool_dtype(values)
    else:
        fits = all(isinstance(value, str) for value in values)
    if not fits or (not dtype.startswith("float") and values.isna().any()):
        raise TypeError(dtype)


def _typed(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype(_types(table, frame)).reset_index(drop=True)


def _types(table: str, frame: pd.DataFrame) -> dict[str, str]:
    optional = {column: dtype for column, dtype in OPTIONAL_COLUMNS[table].items() if column in frame.columns}
    return {**COLUMNS[table], **optional}


def write_whole(target: Path, data: bytes) -> None:
    """Write a file so that it is there in full or not at all: a neighbour first, then one rename.

    Raises
    ------
    UserError
        If the folder is missing, may not be written to, or has no room.
    """
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from None


class Recorder:
    """Gathers one lane's events; `trace` can be asked for at any moment, while the run goes on too.

    Parameters
    ----------
    config
        What was asked and on what; see `Trace.config`.
    prompt_ids
        The prompt's tokens.
    tokenizer
        Finds each token's text.
    """

    def __init__(self, config: dict[str, Any], prompt_ids: Sequence[int], tokenizer: Any) -> None:
        self.config = dict(config)
        self.observes, self.explains = bool(config.get("observe")), bool(config.get("explain"))
        self.records_entries = config.get("strategy") != "full" or self.observes
        self.prompt_size = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logprobs = [np.nan] * len(prompt_ids)
        self._harm: list[tuple[float, bool]] = []  # kl and agreement of each token of a followed answer
        self._texts = TokenTexts(tokenizer)
        self._tokenizer = tokenizer
        self._expected_texts = {-1: ""}
        self._texts.push(prompt_ids)
        self.tokens_seen = 0
        self.refreshed: list[Refreshed] = []
        self._lock = threading.Lock()  # a page reads while a worker records

    def add(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, PromptFed):
            if event.logprobs is not None:
                self._logprobs[self.tokens_seen : event.tokens_seen] = event.logprobs.tolist()
            self.tokens_seen = event.tokens_seen
        elif isinstance(event, Refreshed):
            self.refreshed.append(event)
        elif isinstance(event, TokenGenerated):
            self._ids.append(event.token_id)
            self._logprobs.append(event.logprob)
            if self.config.get("follows"):
                self._harm.append((event.kl, event.agrees))
            self._texts.push([event.token_id])
            self.tokens_seen = event.position  # the new token itself is not processed yet
        elif isinstance(event, Done):
            self.config["stop_reason"] = event.stop_reason

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self._ids) - self.prompt_size

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        with self._lock:
            return self._ids[self.prompt_size :]

    @property
    def text(self) -> str:
        """The text generated so far."""
        with self._lock:
            return "".join(self._texts.texts[self.prompt_size :])

    def trace(self) -> Trace:
        """A trace of what has happened so far; later events do not change it."""
        with self._lock:
            refreshed, config = list(self.refreshed), dict(self.config)
            columns_of_tokens = {
                "position": np.arange(len(self._ids)),
                "token_id": list(self._ids),
                "text": self._texts.texts,
                "generated": np.arange(len(self._ids)) >= self.prompt_size,
                "logprob": list(self._logprobs),
            }
            if config.get("follows"):
                of_prompt = [(np.nan, False)] * self.prompt_size
                columns_of_tokens["kl"], columns_of_tokens["agrees"] = zip(*of_prompt, *self._harm, strict=True)
        columns = COLUMNS["refreshes"]
        rows = [[getattr(event, name) for name in columns] for event in refreshed]
        refreshes = pd.DataFrame(rows, columns=list(columns))
        recorded = refreshed if self.records_entries else []
        columns_of_entries = _entry_columns(recorded, self.observes)
        if self.explains and any(event.expected is not None for event in refreshed):
            columns_of_entries |= self._expectations(recorded)
        entries = pd.DataFrame(columns_of_entries)
        return Trace(
            json.loads(json.dumps(config)),
            _typed("tokens", pd.DataFrame(columns_of_tokens)),
            _typed("refreshes", refreshes),
            _typed("entries", entries),
        )

    def _expectations(self, refreshed: list[Refreshed]) -> dict[str, Any]:
        """The columns that say what the future expected in each entry's place."""
        nothing = {
            event.size_before: Expected(
                np.full(event.size_before, np.nan, np.float32),
                np.full((event.size_before, len(EXPECTED_PLACES)), -1, np.int32),
                np.full((event.size_before, len(EXPECTED_PLACES)), np.nan, np.float32),
            )
            for event in refreshed
            if event.expected is None
        }
        told = [event.expected or nothing[event.size_before] for event in refreshed]
        token_ids = np.concatenate([one.token_ids for one in told])
        chances = np.concatenate([one.chances for one in told])
        for token in np.setdiff1d(token_ids, list(self._expected_texts)).tolist():
            self._expected_texts[token] = decode(self._tokenizer, [token])
        texts, places = np.unique(token_ids, return_inverse=True)
        words = np.array([self._expected_texts[token] for token in texts.tolist()], dtype=object)[places]
        columns: dict[str, Any] = {"probability": np.concatenate([one.probability for one in told])}
        for at, place in enumerate(EXPECTED_PLACES):
            columns[f"expected_{place}"] = words[:, at]
            columns[f"chance_{place}"] = chances[:, at]
        return columns


def _entry_columns(refreshed: list[Refreshed], observes: bool) -> dict[str, Any]:
    def joined(arrays: list[Any]) -> Any:
        return np.concatenate(arrays) if arrays else np.empty(0)

    def filled(values: Any, size: int) -> Any:
        return np.full(size, np.nan) if values is None else values

    sizes = [event.size_before for event in refreshed]
    columns = {
        "refresh": np.repeat([event.refresh for event in refreshed], sizes) if refreshed else np.empty(0),
        "position": joined([event.positions for event in refreshed]),
        "slot": joined([np.arange(size) for size in sizes]),
        "score": joined([filled(event.scores, event.size_before) for event in refreshed]),
        "kept": joined([event.kept for event in refreshed]),
        "protected": joined([event.protected for event in refreshed]),
    }
    if observes:
        columns["surprise"] = joined([filled(event.surprise, event.size_before) for event in refreshed])
    return columns
