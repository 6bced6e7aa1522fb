"""The library: what is kept, what goes when there is no room, and what a killed save or a full disk leaves."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from ccviz.errors import UserError
from ccviz.library import Library
from ccviz.trace import SUFFIX, Trace


@pytest.fixture
def trace(saved: Path) -> Trace:
    return Trace.open(saved)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "runs", most_runs=4)


def keep(library: Library, trace: Trace, *ids: str) -> None:
    for run_id in ids:
        library.save({trace.strategy: trace}, run_id)
        time.sleep(0.002)  # the order of saving is told to the millisecond


def ids(library: Library) -> list[str]:
    return [card.id for card in library.cards()]


def test_what_is_kept_comes_back(library: Library, trace: Trace) -> None:
    assert library.cards() == []
    (card,) = library.save({"counter_causal": trace}, "one")
    assert library.cards() == [card]
    assert library.open("one") == trace
    assert (card.strategy, card.cache_size, card.chunk_size) == ("counter_causal", 16, 8)
    assert (card.tokens, card.refreshes) == (len(trace.tokens), len(trace.refreshes))
    assert card.size == (library.folder / f"one{SUFFIX}").stat().st_size
    assert "sun" in card.prompt
    assert card.answer == trace.text[:160]


def test_lanes_of_a_job_are_found_together(library: Library, trace: Trace) -> None:
    library.save({"full": trace, "heavy_hitter J=8": trace}, "job")
    assert sorted(ids(library)) == ["job-1", "job-2"]
    assert list(library.find("job")) == ["full", "heavy_hitter J=8"]
    assert list(library.find("job-2")) == ["heavy_hitter J=8"]
    assert library.find("other") == {}


def test_the_oldest_that_are_not_pinned_go(library: Library, trace: Trace) -> None:
    keep(library, trace, "a", "b", "c", "d")
    library.pin("a", True)
    assert [card.id for card in library.leaving(runs=1)] == ["b"]
    keep(library, trace, "e")
    assert ids(library) == ["e", "d", "c", "a"]
    library.pin("a", False)
    assert [card.id for card in library.leaving(runs=2)] == ["a", "c"]


def test_size_is_bounded_too(tmp_path: Path, trace: Trace) -> None:
    size = len(trace.to_bytes())
    library = Library(tmp_path / "runs", most_bytes=int(2.5 * size))
    keep(library, trace, "a", "b")
    assert [card.id for card in library.leaving(1, size)] == ["a"]
    keep(library, trace, "c")
    assert ids(library) == ["c", "b"]
    with pytest.raises(UserError, match="leave no room"):
        Library(tmp_path / "small", most_bytes=size // 2).save({"x": trace})


def test_pinned_runs_are_never_pushed_out(library: Library, trace: Trace) -> None:
    keep(library, trace, "a", "b", "c", "d")
    for run_id in "abcd":
        library.pin(run_id, True)
    with pytest.raises(UserError, match="4 pinned runs leave no room for it: unpin or delete some, or download"):
        keep(library, trace, "e")
    assert sorted(ids(library)) == ["a", "b", "c", "d"]


def test_names_pins_and_deletion(library: Library, trace: Trace) -> None:
    keep(library, trace, "a", "b")
    assert library.rename("a", "  my\nfirst   run ").title == "my first run"
    library.pin("a", True)
    again = Library(library.folder)
    card = again.card("a")
    assert card is not None
    assert (card.name, card.pinned) == ("my first run", True)
    outside = library.folder.parent / f"mine{SUFFIX}"
    outside.write_bytes(b"mine")
    library.delete(["a", "never was", "../mine"])
    assert outside.exists()
    assert ids(again) == ["b"]
    with pytest.raises(UserError, match="no longer in the library"):
        library.rename("a", "gone")
    with pytest.raises(UserError, match="no longer in the library"):
        library.open("a")


@pytest.mark.parametrize("name", ["../runs/a", "a/../a", "", ".", "*", "a\x00", "A" * 300, "a.ccviz"])
def test_an_id_from_an_address_reaches_no_other_file(library: Library, trace: Trace, name: str) -> None:
    keep(library, trace, "a")
    assert library.card(name) is None
    assert library.find(name) == {}
    with pytest.raises(UserError):
        library.open(name)


def test_files_are_added_by_their_name(library: Library, trace: Trace) -> None:
    card = library.add(trace.to_bytes(), "from a friend.ccviz")
    assert card.title == "from a friend"
    with pytest.raises(UserError, match=r"broken\.ccviz is not a \.ccviz file"):
        library.add(b"PK no", "broken.ccviz")
    assert ids(library) == [card.id]


def test_several_runs_go_into_one_zip(library: Library, trace: Trace) -> None:
    keep(library, trace, "a", "b")
    library.rename("a", "../../<b>evil</b>")
    with zipfile.ZipFile(io.BytesIO(library.archive(["a", "b"]))) as archive:
        names = archive.namelist()
        assert len(set(names)) == 2
        assert all("/" not in name and "<" not in name and name.endswith(SUFFIX) for name in names)
        assert [Trace.open(archive.read(name)) for name in names] == [trace, trace]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"name": 3}', b"\xff\xfe", b'{"id": "x", "evil": "yes"}'], ids=repr
)
def test_a_card_that_is_missing_or_damaged_is_made_again(library: Library, trace: Trace, damage: bytes) -> None:
    keep(library, trace, "a")
    card = library.card("a")
    (library.folder / "a.json").write_bytes(damage)
    again = Library(library.folder).card("a")
    assert card is not None
    assert again is not None
    assert replace(again, saved="", lane="") == replace(card, saved="", lane="")
    (library.folder / "a.json").unlink()
    assert ids(Library(library.folder)) == ["a"]


def test_what_another_server_writes_is_listed_at_once(library: Library, trace: Trace) -> None:
    keep(library, trace, "a")
    assert ids(library) == ["a"]
    other = Library(library.folder)
    time.sleep(0.02)  # beyond the clock of the folder
    keep(other, trace, "b")
    assert ids(library) == ["b", "a"]
    other.rename("a", "renamed")
    other.delete(["b"])
    assert [card.title for card in library.cards()] == ["renamed"]


def test_what_is_no_trace_is_not_listed(library: Library, trace: Trace) -> None:
    keep(library, trace, "a")
    whole = trace.to_bytes()
    (library.folder / f"half{SUFFIX}").write_bytes(whole[: len(whole) // 2])
    (library.folder / f".b{SUFFIX}.tmp").write_bytes(whole)
    (library.folder / "notes.txt").write_text("mine")
    assert ids(library) == ["a"]
    assert (library.folder / "notes.txt").exists()


def test_only_old_leftovers_are_cleared(library: Library, trace: Trace) -> None:
    keep(library, trace, "a")
    young, old = library.folder / ".young", library.folder / ".old"
    for file in (young, old):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    keep(library, trace, "b")
    assert (young.exists(), old.exists()) == (True, False)


# A killed save and a full disk


SAVER = """
import sys
from ccviz.library import Library
from ccviz.trace import Trace
library, trace = Library(sys.argv[1], most_runs=20), Trace.open(sys.argv[2])
for number in range(100_000):
    library.save({"one": trace, "two": trace}, f"run{number}")
    if not number:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_no_half_run(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for delay in (0.05, 0.11, 0.173, 0.23, 0.31):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(folder), str(saved)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        library = Library(folder, most_runs=20)
        cards = library.cards()
        assert cards
        for card in cards:
            assert library.open(card.id) == Trace.open(saved)
    assert Library(folder).save({"after": Trace.open(saved)}, "after")


def test_a_full_disk_is_said_and_loses_nothing(library: Library, trace: Trace) -> None:
    keep(library, trace, "a", "b", "c", "d")
    before = {file.name: file.read_bytes() for file in library.folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"The run could not be kept in the library: .* cannot be written") as error:
            library.save({"x": trace}, "e")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(error.value).count(". ") == 0
    assert {file.name: file.read_bytes() for file in library.folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"could not be kept in the library: .*cannot be written to"):
        Library(tmp_path / "file" / "runs").save({"x": trace})


def test_cards_are_json_that_others_can_read(library: Library, trace: Trace) -> None:
    keep(library, trace, "a")
    stated = json.loads((library.folder / "a.json").read_text())
    assert stated["strategy"] == "counter_causal"
    shutil.copy(library.folder / f"a{SUFFIX}", library.folder / f"copy{SUFFIX}")
    assert sorted(ids(library)) == ["a", "copy"]
