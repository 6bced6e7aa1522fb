"""The library: every finished run, kept as a ``.ccviz`` file in the user's data folder, within bounds.

A run is one trace file and a card beside it, a JSON file with what a list shows. Both are written whole or not at all,
the trace first, so a run that is listed can be opened; a card that is missing is made again from its trace. Knows
traces and folders; knows nothing of models or pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
import time
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ccviz.errors import UserError
from ccviz.paths import data_folder
from ccviz.trace import SUFFIX, Trace, write_whole

MOST_RUNS: Final = 200
MOST_BYTES: Final = 500_000_000
START: Final = 160  # characters of prompt and answer that a card holds
LEFT_OVER: Final = 3600  # seconds after which a half-written file is nobody's any more

_ID = re.compile(r"[0-9a-z]+(-[0-9]+)?")


@dataclass(frozen=True)
class Card:
    """What a list shows of a run.

    Attributes
    ----------
    id, group, lane
        Names the run, the job it was part of, and the lane it was there.
    name
        What its user calls it; "" until they do.
    pinned
        Never goes by itself.
    prompt, answer
        How they begin, the template left out where it is known.
    saved
        When, ISO 8601, UTC.
    size
        Of its file, in bytes.
    """

    id: str
    group: str
    lane: str
    name: str
    pinned: bool
    strategy: str
    model: str
    cache_size: int
    chunk_size: int
    tokens: int
    refreshes: int
    stop_reason: str
    label: str
    prompt: str
    answer: str
    saved: str
    size: int = 0

    @property
    def title(self) -> str:
        """Its user's name for it, the sample it was made from, or how its prompt begins."""
        return self.name or self.label or " ".join(self.prompt.split())[:60] or "Empty prompt"


class Library:
    """The runs in a folder.

    Parameters
    ----------
    folder
        Where they lie; the user's data folder if None. Made when first written to.
    most_runs, most_bytes
        The bounds. When a new run exceeds them, the oldest that are not pinned go.
    """

    def __init__(
        self, folder: str | Path | None = None, most_runs: int = MOST_RUNS, most_bytes: int = MOST_BYTES
    ) -> None:
        self.folder = Path(folder) if folder is not None else data_folder() / "runs"
        self.most_runs, self.most_bytes = most_runs, most_bytes
        self._lock = threading.RLock()
        self._listed: tuple[int, list[Card]] = (-1, [])  # of which state of the folder, and what was there

    # Reading

    def cards(self) -> list[Card]:
        """All runs, newest first; read again only when the folder has changed, since pages ask at every pass."""
        with self._lock:
            try:
                state = self.folder.stat().st_mtime_ns  # every file there is put in place by a rename, which changes it
            except OSError:
                return []
            if state != self._listed[0]:
                cards = [card for file in self.folder.glob(f"[!.]*{SUFFIX}") if (card := self._card(file)) is not None]
                self._listed = state, sorted(cards, key=lambda card: (card.saved, card.id), reverse=True)
            return list(self._listed[1])

    def card(self, run_id: str) -> Card | None:
        """The run of this id, or None."""
        file = self.folder / f"{run_id}{SUFFIX}"
        return self._card(file) if _ID.fullmatch(run_id) and file.is_file() else None

    def open(self, run_id: str) -> Trace:
        """The trace of this run.

        Raises
        ------
        UserError
            If there is none, or it cannot be read.
        """
        if self.card(run_id) is None:
            raise UserError("This run is no longer in the library: it was deleted, or newer runs took its place.")
        return Trace.open(self.folder / f"{run_id}{SUFFIX}")

    def find(self, name: str) -> dict[str, Trace]:
        """The traces of a run, or of all lanes of a job, by lane; empty where the library has neither."""
        card = self.card(name)
        found = [card] if card else [card for card in reversed(self.cards()) if card.group == name]
        found.sort(key=lambda card: [int(part) for part in re.findall(r"-(\d+)$", card.id)])
        traces = {}
        for one in found:
            with contextlib.suppress(UserError):
                traces[one.lane or one.strategy] = self.open(one.id)
        return traces

    def archive(self, run_ids: Sequence[str]) -> bytes:
        """A zip of several runs, each under a name that says what it is."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for run_id in run_ids:
                card = self.card(run_id)
                if card is None:
                    continue  # it went meanwhile
                trace = self.open(run_id)
                title = re.sub(r"\W+", "-", f"{card.title}-{trace.strategy}").strip("-")[:60]
                archive.writestr(f"{title}-{run_id}{SUFFIX}", trace.to_bytes())
        return buffer.getvalue()

    def leaving(self, runs: int = 1, size: int = 0) -> list[Card]:
        """The runs that would go if this many more, of this many bytes together, were saved now."""
        cards = self.cards()
        over_runs = len(cards) + runs - self.most_runs
        over_bytes = sum(card.size for card in cards) + size - self.most_bytes
        gone: list[Card] = []
        for card in reversed(cards):
            if len(gone) >= over_runs and sum(one.size for one in gone) >= over_bytes:
                break
            if not card.pinned:
                gone.append(card)
        return gone

    def next_to_go(self, runs: int = 1) -> list[Card]:
        """The runs that the next ones will take the place of, if they are as large as the largest there is."""
        return self.leaving(runs, runs * max((card.size for card in self.cards()), default=0))

    # Writing

    def save(self, traces: Mapping[str, Trace], group: str = "") -> list[Card]:
        """Keep a job's traces, and let the oldest go that are not pinned and have no room any more.

        What is new is written before anything old goes, so a full disk loses nothing.

        Raises
        ------
        UserError
            If there is no room that pinned runs leave, the folder may not be written to, or the disk is full.
        """
        group = group or uuid.uuid4().hex[:10]
        with self._lock:
            packed = {lane: trace.to_bytes() for lane, trace in traces.items()}
            size = sum(map(len, packed.values()))
            self._check_room(len(packed), size)
            self._make_folder()
            leaving = self.leaving(len(packed), size)
            cards: list[Card] = []
            try:
                for at, (lane, trace) in enumerate(traces.items(), 1):
                    run_id = f"{group}-{at}" if len(traces) > 1 else group
                    write_whole(self.folder / f"{run_id}{SUFFIX}", packed[lane])
                    cards.append(replace(_card_of(trace, run_id, group, lane), size=len(packed[lane])))
                    self._write_card(cards[-1])
            except UserError as error:
                raise UserError(f"The run could not be kept in the library: {error}") from None
            self.delete([card.id for card in leaving])
            return cards

    def add(self, data: bytes, name: str) -> Card:
        """Keep a trace that came as a file of this name.

        Raises
        ------
        UserError
            If it is no trace, or `save` cannot keep it.
        """
        try:
            trace = Trace.open(data)
        except UserError as error:
            raise UserError(str(error).replace("the file", name, 1)) from None
        card = self.save({trace.strategy: trace})[0]
        return self.rename(card.id, Path(name).stem)

    def rename(self, run_id: str, name: str) -> Card:
        """Call a run something; "" takes its name away."""
        return self._change(run_id, name=" ".join(name.split())[:80])

    def pin(self, run_id: str, pinned: bool) -> Card:
        """Keep a run whatever comes, or let it go again when its time has come."""
        return self._change(run_id, pinned=pinned)

    def delete(self, run_ids: Iterable[str]) -> None:
        """Delete runs; those that are not there are left at that.

        Raises
        ------
        UserError
            If the folder does not let them be deleted.
        """
        with self._lock:
            self._listed = (-1, [])
            known = [run_id for run_id in run_ids if _ID.fullmatch(run_id)]
            for file in [self.folder / f"{run_id}{suffix}" for run_id in known for suffix in (SUFFIX, ".json")]:
                try:
                    file.unlink(missing_ok=True)
                except OSError as error:
                    raise UserError(f"{file} cannot be deleted: {error.strerror or error}.") from None

    def _change(self, run_id: str, **changes: Any) -> Card:
        with self._lock:
            card = self.card(run_id)
            if card is None:
                raise UserError("This run is no longer in the library: it was deleted, or newer runs took its place.")
            card = replace(card, **changes)
            self._write_card(card)
            return card

    def _check_room(self, runs: int, size: int) -> None:
        pinned = [card for card in self.cards() if card.pinned]
        if len(pinned) + runs > self.most_runs or sum(card.size for card in pinned) + size > self.most_bytes:
            raise UserError(
                f"The run was not kept in the library, where {len(pinned)} pinned runs leave no room for it: unpin or "
                f"delete some, or download the run."
            )

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.glob(".*"):  # left by a write that was killed
                if time.time() - file.stat().st_mtime > LEFT_OVER:
                    file.unlink()
        except OSError as error:
            raise UserError(
                f"The run could not be kept in the library: {self.folder} cannot be written to "
                f"({error.strerror or error})."
            ) from None

    def _write_card(self, card: Card) -> None:
        self._listed = (-1, [])  # two changes can be too close for the clock of the folder
        stated = {name: value for name, value in asdict(card).items() if name not in ("id", "size")}
        write_whole(self.folder / f"{card.id}.json", json.dumps(stated, indent=1).encode())

    def _card(self, file: Path) -> Card | None:
        """The card beside a trace file, made again if it is missing or damaged; None if the trace cannot be read."""
        try:
            size = file.stat().st_size
            stated = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
            card = Card(**stated, id=file.stem, size=size)
            kinds = {"str": str, "bool": bool, "int": int}
            if all(type(getattr(card, field.name)) is kinds[str(field.type)] for field in fields(Card)):
                return card
        except (OSError, ValueError, TypeError):
            pass
        return self._made_again(file)

    def _made_again(self, file: Path) -> Card | None:
        if not _ID.fullmatch(file.stem):
            return None
        try:
            trace = Trace.open(file)
            found = _card_of(trace, file.stem, file.stem.partition("-")[0], trace.strategy)
            saved = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="milliseconds")
            card = replace(found, size=file.stat().st_size, saved=saved)
        except (UserError, OSError):
            return None
        with contextlib.suppress(UserError):
            self._write_card(card)
        return card


def _card_of(trace: Trace, run_id: str, group: str, lane: str) -> Card:
    said = trace.config
    return Card(
        id=run_id,
        group=group,
        lane=lane,
        name="",
        pinned=False,
        strategy=trace.strategy,
        model=Path(str(said.get("model", ""))).name,
        cache_size=int(trace.number("cache_size")),
        chunk_size=int(trace.number("chunk_size")),
        tokens=len(trace.tokens),
        refreshes=len(trace.refreshes),
        stop_reason=trace.stop_reason,
        label=str(said.get("label") or ""),
        prompt=_start_of_prompt(trace),
        answer=trace.text[:START],
        saved=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def _start_of_prompt(trace: Trace) -> str:
    """How the user's words begin: after the frozen part, where what the template writes was frozen."""
    if trace.config.get("chat"):
        skipped = int(trace.number("system_size"))
        prompt = trace.tokens.loc[~trace.tokens["generated"], "text"].iloc[skipped:]
        return "".join(prompt)[:START]
    return trace.prompt_text[:START]
