"""The record of a run: what it holds, that files give it back, and that broken files get one sentence."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import LetterTokenizer, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import ccviz
from ccviz import figures
from ccviz import trace as trace_module
from ccviz.embedded import embedded_model_folder
from ccviz.errors import UserError
from ccviz.events import Done, Event, PromptFed, Refreshed, TokenGenerated
from ccviz.export import figure_bytes
from ccviz.metrics import run_summary
from ccviz.network import LanguageModel
from ccviz.runs import Request, Run
from ccviz.settings import Settings
from ccviz.strategies import strategy_names
from ccviz.trace import COLUMNS, Recorder, Trace

PROMPT = [(7 * place + place * place) % 97 for place in range(40)]
MEMBERS = ["trace.json", "tokens.parquet", "refreshes.parquet", "entries.parquet"]


def make(model: LanguageModel, strategy: str, **given: Any) -> Trace:
    return ccviz.generate(model, PROMPT, strategy, **{"cache_size": 16, "chunk_size": 8, "max_new_tokens": 20, **given})


@pytest.fixture(scope="session")
def recorded(tiny_llama: LanguageModel) -> Trace:
    return make(tiny_llama, "counter_causal", frozen_size=3, logprobs=True)


def empty_trace(**config: Any) -> Trace:
    frames = {name: pd.DataFrame({c: [] for c in columns}).astype(columns) for name, columns in COLUMNS.items()}
    return Trace(config, **frames)


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def parquet(frame: pd.DataFrame) -> bytes:
    data: bytes = frame.to_parquet(index=False)
    return data


def refusal(source: Any) -> str:
    """What opening says; it must be one sentence, on one line."""
    with pytest.raises(UserError) as raised:
        Trace.open(source)
    said = str(raised.value)
    assert said.strip()
    assert len(said.splitlines()) == 1
    return said


def assert_follows_the_format(trace: Trace) -> None:
    for name, columns in COLUMNS.items():
        frame = getattr(trace, name)
        assert list(frame.columns) == list(columns)
        assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == columns
        assert isinstance(frame.index, pd.RangeIndex)
        assert (frame.index.start, frame.index.step) == (0, 1)
    assert json.loads(json.dumps(trace.config)) == trace.config


# What a trace holds


@pytest.mark.parametrize("strategy", strategy_names())
def test_saving_and_opening_gives_an_equal_trace(strategy: str, tiny_llama: LanguageModel, tmp_path: Path) -> None:
    trace = make(tiny_llama, strategy, frozen_size=2, logprobs=True, refresh_mode="both")
    assert_follows_the_format(trace)
    path = trace.save(tmp_path / "run.ccviz")
    assert path == tmp_path / "run.ccviz"
    for source in (path, str(path), path.read_bytes(), trace.to_bytes()):
        opened = Trace.open(source)
        assert opened == trace
        assert_follows_the_format(opened)
    assert opened.strategy == strategy


def test_traces_differ_where_anything_differs(recorded: Trace) -> None:
    def changed(table: str, column: str, value: Any) -> Trace:
        other = Trace.open(recorded.to_bytes())
        getattr(other, table).loc[5, column] = value
        return other

    assert recorded == Trace.open(recorded.to_bytes())
    assert recorded != changed("tokens", "token_id", 96 - recorded.tokens["token_id"][5])
    assert recorded != changed("entries", "score", 1e9)
    assert recorded != Trace({**recorded.config, "seed": 9}, recorded.tokens, recorded.refreshes, recorded.entries)
    assert recorded != "a trace"


def test_the_tables_say_what_the_events_said(tiny_llama: LanguageModel) -> None:
    run = Run(tiny_llama, {"lane": Request(PROMPT, Settings(16, 8, 20, 3, logprobs=True), "heavy_hitter", chat=False)})
    events = list(run.events())
    trace = run.recorders["lane"].trace()
    tokens, refreshes, entries = trace.tokens, trace.refreshes, trace.entries
    chosen = [event for event in events if isinstance(event, TokenGenerated)]
    refreshed = [event for event in events if isinstance(event, Refreshed)]
    assert tokens["position"].tolist() == list(range(60))
    assert tokens["token_id"].tolist() == PROMPT + [event.token_id for event in chosen]
    assert tokens["generated"].tolist() == [False] * 40 + [True] * 20
    assert np.isnan(tokens["logprob"][0])
    assert (tokens["logprob"][1:] < 0).all()
    np.testing.assert_array_equal(tokens["logprob"][40:], np.float32([event.logprob for event in chosen]))
    for column in COLUMNS["refreshes"]:
        assert refreshes[column].tolist() == [getattr(event, column) for event in refreshed]
    for event in refreshed:
        rows = entries[entries["refresh"] == event.refresh]
        assert event.scores is not None
        assert rows["position"].tolist() == event.positions.tolist()
        assert rows["slot"].tolist() == list(range(event.size_before))
        assert rows["kept"].tolist() == event.kept.tolist()
        assert rows["protected"].tolist() == event.protected.tolist()
        np.testing.assert_array_equal(rows["score"], event.scores)
    assert len(entries) == sum(event.size_before for event in refreshed)
    assert trace.prompt_text == LetterTokenizer().decode(PROMPT)
    assert trace.text == run.recorders["lane"].text == LetterTokenizer().decode([event.token_id for event in chosen])


def test_without_logprobs_none_are_recorded(tiny_llama: LanguageModel) -> None:
    assert make(tiny_llama, "sliding_window").tokens["logprob"].isna().all()


def test_the_full_cache_records_no_entries_and_readers_derive_them(tiny_llama: LanguageModel) -> None:
    trace = make(tiny_llama, "full")
    assert len(trace.entries) == 0
    assert trace.refreshes["size_after"].tolist() == [8, 16, 24, 32, 40, 48, 56]
    derived = trace.all_entries()
    assert {column: str(dtype) for column, dtype in derived.dtypes.items()} == COLUMNS["entries"]
    for refresh, seen in zip(trace.refreshes["refresh"], trace.refreshes["tokens_seen"], strict=True):
        rows = derived[derived["refresh"] == refresh]
        assert rows["position"].tolist() == rows["slot"].tolist() == list(range(seen))
    assert derived["kept"].all()
    assert derived["score"].isna().all()
    assert (derived["protected"] == "").all()


def test_all_entries_are_the_entries_where_they_were_recorded(recorded: Trace) -> None:
    assert recorded.all_entries() is recorded.entries


@pytest.mark.parametrize("strategy", ["full", "sliding_window"])
def test_a_run_without_a_refresh_has_no_entries(strategy: str, tiny_llama: LanguageModel) -> None:
    trace = make(tiny_llama, strategy, chunk_size=1000)
    assert len(trace.refreshes) == len(trace.all_entries()) == 0
    assert_follows_the_format(trace)
    assert Trace.open(trace.to_bytes()) == trace


def test_the_text_leaves_out_the_token_that_ended_it() -> None:
    model = tiny("llama")
    length = make(model, "full")
    assert length.stop_reason == "length"
    assert len(length.text) == 20
    vars(model)["eos_ids"] = frozenset([int(length.tokens["token_id"][49])])
    ended = make(model, "full")
    texts = ended.tokens["text"][ended.tokens["generated"]].tolist()
    assert ended.stop_reason == "eos"
    assert ended.text == "".join(texts[:-1])
    assert length.text.startswith(ended.text + texts[-1])


# Files give back whatever is put in

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32),
    "float64": st.floats(),
    "bool": st.booleans(),
    "str": TEXT,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any cells at all, where the format leaves them free."""
    count, refreshes = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    pairs = [(refresh, position) for refresh in range(refreshes) for position in range(count)]
    held = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    fixed: dict[str, dict[str, list[int]]] = {
        "tokens": {"position": list(range(count))},
        "refreshes": {"refresh": list(range(refreshes))},
        "entries": {"refresh": [pair[0] for pair in held], "position": [pair[1] for pair in held]},
    }
    for column in ("tokens_seen", "size_before", "size_after"):
        fixed["refreshes"][column] = [draw(st.integers(0, count)) for _ in range(refreshes)]
    frames = {}
    for name, columns in COLUMNS.items():
        size = len(next(iter(fixed[name].values())))
        cells = {
            column: fixed[name].get(column) or [draw(OF_TYPE[dtype]) for _ in range(size)]
            for column, dtype in columns.items()
        }
        frames[name] = pd.DataFrame(cells).astype(columns)
    return Trace(draw(st.dictionaries(st.text(max_size=6), JSON, max_size=4)), **frames)


@pytest.mark.parametrize(
    ("table", "column", "value", "says"),
    [
        ("tokens", "position", 7, "positions in tokens must count up"),
        ("refreshes", "refresh", 0, "refreshes must be numbered upwards"),
        ("refreshes", "tokens_seen", 9999, "tokens_seen in refreshes must lie between 0 and the"),
        ("refreshes", "size_after", -1, "size_after in refreshes must lie between"),
        ("entries", "refresh", 99, "name a refresh that is not in refreshes"),
        ("entries", "position", 9999, "name a position that is not in tokens"),
        ("entries", "position", 0, "name a position twice"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(
    table: str, column: str, value: int, says: str, tiny_llama: LanguageModel
) -> None:
    trace = make(tiny_llama, "sliding_window")
    getattr(trace, table).loc[1, column] = value
    with pytest.raises(UserError, match=says):
        Trace.open(trace.to_bytes())


@pytest.mark.parametrize("config", [{}, {"seconds": "soon", "frozen_size": None, "strategy": 5, "label": [1]}])
def test_a_configuration_of_another_program_is_read_tolerantly(
    config: dict[str, Any], tiny_llama: LanguageModel
) -> None:
    made = make(tiny_llama, "sliding_window")
    trace = Trace.open(Trace(config, made.tokens, made.refreshes, made.entries).to_bytes())
    assert run_summary(trace)["seconds"] == 0.0
    assert len(figures.heatmap(trace).data) == 1
    assert figure_bytes(trace, "heatmap", ".svg").startswith(b"<?xml")


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_whatever_a_trace_holds_survives_a_file(trace: Trace) -> None:
    assert Trace.open(trace.to_bytes()) == trace


def test_more_columns_are_kept(recorded: Trace) -> None:
    more = Trace.open(recorded.to_bytes())
    more.entries["surprise"] = np.linspace(-1, 1, len(more.entries), dtype=np.float32)
    more.tokens["note"] = "日本"
    opened = Trace.open(more.to_bytes())
    assert opened == more
    assert opened.entries["surprise"].dtype == np.float32
    assert opened != recorded


def test_columns_of_another_width_are_read_as_the_formats_own(recorded: Trace) -> None:
    members = members_of(recorded.to_bytes())
    wide = {"position": "int64", "refresh": "int64", "score": "float64", "slot": "int16"}
    members["entries.parquet"] = parquet(recorded.entries.astype(wide))
    members["tokens.parquet"] = parquet(recorded.tokens.astype({"text": "object"})[[*reversed(COLUMNS["tokens"])]])
    opened = Trace.open(zipped(members, zipfile.ZIP_DEFLATED))
    assert opened.entries.equals(recorded.entries)
    assert opened.tokens[list(COLUMNS["tokens"])].equals(recorded.tokens)


def test_a_file_holds_json_and_parquet_and_nothing_else(recorded: Trace) -> None:
    members = members_of(recorded.to_bytes())
    assert list(members) == MEMBERS
    header = json.loads(members["trace.json"])
    assert header == {"schema_version": 1, "config": recorded.config}
    for name in MEMBERS[1:]:
        assert members[name].startswith(b"PAR1")
        assert members[name].endswith(b"PAR1")


# A recorder can be asked at any moment


def assert_prefix(part: Trace, whole: Trace) -> None:
    for name in COLUMNS:
        some, full = getattr(part, name), getattr(whole, name)
        assert some.equals(full.iloc[: len(some)].reset_index(drop=True))


def test_the_trace_at_any_event_is_a_prefix_of_the_last(tiny_llama: LanguageModel) -> None:
    run = Run(tiny_llama, {"lane": Request(PROMPT, Settings(16, 8, 20), "importance", chat=False)})
    parts = [run.recorders["lane"].trace()]
    for event in run.events():
        parts.append(run.recorders["lane"].trace())
        if isinstance(event, TokenGenerated):
            assert run.recorders["lane"].generated == len(parts[-1].text)
    whole = run.recorders["lane"].trace()
    assert [part.stop_reason for part in parts] == [""] * (len(parts) - 1) + ["length"]
    assert (len(parts[0].tokens), len(parts[0].refreshes), parts[0].text) == (40, 0, "")
    for part in parts:
        assert_follows_the_format(part)
        assert_prefix(part, whole)
        assert whole.text.startswith(part.text)
        assert Trace.open(part.to_bytes()) == part


def test_a_cancelled_run_leaves_what_it_had(tiny_llama: LanguageModel) -> None:
    run, asked = Run(tiny_llama, {"lane": Request(PROMPT, Settings(16, 8, 20), "importance", chat=False)}), 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 12

    list(run.events(cancelled))
    part, whole = run.recorders["lane"].trace(), make(tiny_llama, "importance")
    assert part.stop_reason == "cancelled"
    assert 0 < len(part.text) < 20
    for table, left_out in (("tokens", []), ("refreshes", ["seconds"]), ("entries", [])):
        some = getattr(part, table).drop(columns=left_out)
        assert some.equals(getattr(whole, table).drop(columns=left_out).iloc[: len(some)])


@pytest.mark.model
def test_the_text_so_far_is_the_decoded_text_so_far_inside_a_character_too() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder())
    prompt, ids = tokenizer("Hi \U0001f469")["input_ids"], tokenizer("a \U0001f468\u200d\U0001f467 日本 b")["input_ids"]
    recorder = Recorder({"strategy": "full"}, prompt, tokenizer)
    for count, token in enumerate(ids, start=1):
        recorder.add(TokenGenerated("full", len(prompt) + count - 1, token, float("nan")))
        trace = recorder.trace()
        assert trace.text == recorder.text == tokenizer.decode(ids[:count])
        assert trace.prompt_text == tokenizer.decode(prompt)


def events_of(count: int) -> list[Event]:
    events: list[Event] = [PromptFed("lane", 4, None)]
    for place in range(count):
        events.append(TokenGenerated("x", 4 + place, place % 97, -float(place)))
        if place % 5 == 0:
            kept, positions = np.arange(3) > 0, np.arange(place, place + 3, dtype=np.int32)
            score, protected = np.full(3, place, np.float32), np.full(3, "", "<U6")
            refresh = (place // 5, place + 5, "decode", 3, 2, 0.0, 100, positions, score, kept, protected)
            events.append(Refreshed("x", *refresh))
    return [*events, Done("x", "length")]


def test_one_thread_may_record_while_another_reads() -> None:
    events = events_of(1500)
    expected = Recorder({"strategy": "importance"}, [1, 2, 3, 4], LetterTokenizer())
    for event in events:
        expected.add(event)
    whole, recorder = expected.trace(), Recorder({"strategy": "importance"}, [1, 2, 3, 4], LetterTokenizer())
    failures: list[BaseException] = []
    begun, ended = threading.Event(), threading.Event()
    seen: list[Trace] = []

    def read() -> None:
        try:
            while not ended.is_set():
                seen.append(recorder.trace())
                assert len(recorder.text) <= 1500
                begun.set()
        except BaseException as error:
            failures.append(error)
            begun.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    try:
        reader.start()
        begun.wait()
        for event in events:
            recorder.add(event)
    finally:
        ended.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert len(seen) > 1
    for part in seen:
        assert_prefix(part, whole)
    assert recorder.trace() == whole


# Broken files


@settings(max_examples=80, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True), from_path=st.booleans())
def test_a_truncated_file_gets_one_sentence(
    recorded: Trace, tmp_path_factory: pytest.TempPathFactory, cut: float, from_path: bool
) -> None:
    data = recorded.to_bytes()
    part = data[: int(cut * len(data))]
    if from_path:
        path = tmp_path_factory.getbasetemp() / "cut.ccviz"
        path.write_bytes(part)
        assert "cut.ccviz" in refusal(path)
    else:
        assert "the file" in refusal(part)


@settings(max_examples=40, deadline=None)
@given(back=st.integers(1, 400))
def test_a_file_that_lost_its_last_bytes_gets_one_sentence(recorded: Trace, back: int) -> None:
    refusal(recorded.to_bytes()[:-back])


@settings(max_examples=300, deadline=None)
@given(places=st.lists(st.tuples(st.integers(-700, 700), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_of_the_container_get_one_sentence_or_do_no_harm(
    recorded: Trace, places: list[tuple[int, int]]
) -> None:
    assert_sound(recorded, flipped(recorded.to_bytes(), places))


@settings(max_examples=100, deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bytes_anywhere_get_one_sentence_or_do_no_harm(recorded: Trace, places: list[tuple[int, int]]) -> None:
    assert_sound(recorded, flipped(recorded.to_bytes(), places))


def flipped(data: bytes, places: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for place, mask in places:
        changed[place % len(data)] ^= mask
    return bytes(changed)


def opened_or_refused(data: bytes) -> Trace | None:
    """The trace, or None where it was refused in one line; nothing else may be raised."""
    try:
        return Trace.open(data)
    except UserError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    return None


def assert_sound(recorded: Trace, data: bytes) -> None:
    """What opens is the trace: checksums see to that."""
    opened = opened_or_refused(data)
    assert opened is None or opened == recorded


@settings(max_examples=150, deadline=None)
@given(
    table=st.sampled_from(MEMBERS[1:]),
    places=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_a_damaged_table_with_a_right_checksum_gets_one_sentence_or_follows_the_format(
    recorded: Trace, table: str, places: list[tuple[int, int]]
) -> None:
    members = members_of(recorded.to_bytes())
    members[table] = flipped(members[table], places)
    opened = opened_or_refused(zipped(members))
    if opened is not None:
        for name, columns in COLUMNS.items():
            assert {column: str(getattr(opened, name)[column].dtype) for column in columns} == columns


@pytest.mark.parametrize(
    ("field", "value"),
    [("flag_bits", 0x1), ("compress_type", 99), ("compress_type", 12), ("compress_type", 8), ("extract_version", 99)],
)
def test_a_member_that_cannot_be_unpacked_gets_one_sentence(recorded: Trace, field: str, value: int) -> None:
    """Encrypted, by an unknown method, by a wrong one, by a later version of zip."""
    data = bytearray(recorded.to_bytes())
    offset = {"flag_bits": 8, "compress_type": 10, "extract_version": 6}[field]
    directory = data.index(b"PK\x01\x02")  # the first member's entry in the directory
    data[directory + offset] = value
    data[offset - 2] = value  # its local header starts the file and has no "made by" field
    refusal(bytes(data))


@pytest.mark.parametrize("data", [b"", b"PK", b"hello", b"PK\x05\x06" + bytes(18), b"\x00" * 1000, b"PAR1" * 9])
def test_what_is_no_zip_of_ours_gets_one_sentence(data: bytes) -> None:
    assert "not a .ccviz file" in refusal(data)


def test_a_folder_a_missing_file_and_impossible_names_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder.ccviz").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.ccviz")
    assert "does not exist" in refusal(tmp_path / "missing.ccviz")
    assert "does not exist" in refusal(str(tmp_path / "no folder" / "missing.ccviz"))
    (tmp_path / "file").write_text("x")
    refusal(tmp_path / "file" / "below.ccviz")
    refusal(tmp_path / ("n" * 300 + ".ccviz"))


def test_a_name_with_a_null_byte_gets_one_sentence() -> None:
    refusal("a\0b.ccviz")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_gets_one_sentence(recorded: Trace, tmp_path: Path) -> None:
    path = recorded.save(tmp_path / "run.ccviz")
    path.chmod(0)
    assert "may not be read" in refusal(path)


@pytest.mark.parametrize("missing", MEMBERS)
def test_a_missing_member_is_named(recorded: Trace, missing: str) -> None:
    members = members_of(recorded.to_bytes())
    del members[missing]
    assert missing in refusal(zipped(members))


@pytest.mark.parametrize(("table", "column"), [(table, column) for table in COLUMNS for column in COLUMNS[table]])
def test_a_missing_column_is_named(recorded: Trace, table: str, column: str) -> None:
    members = members_of(recorded.to_bytes())
    members[f"{table}.parquet"] = parquet(getattr(recorded, table).drop(columns=column))
    said = refusal(zipped(members))
    assert table in said
    assert column in said


def change(table: str, column: str, values: Callable[[pd.Series], Any]) -> Callable[[Trace], tuple[str, pd.DataFrame]]:
    def changed(trace: Trace) -> tuple[str, pd.DataFrame]:
        frame = getattr(trace, table).copy()
        frame[column] = values(frame[column])
        return table, frame

    return changed


WRONG_TYPES = {
    "words for a position": change("entries", "position", lambda old: "x"),
    "none for a position": change("entries", "position", lambda old: old.astype("Int32").mask(old == old[0])),
    "a fraction for a position": change("entries", "position", lambda old: old + 0.5),
    "a position over int32": change("entries", "position", lambda old: old.astype("int64") + 2**40),
    "lists for a score": change("entries", "score", lambda old: [[1.0]] * len(old)),
    "words for a score": change("entries", "score", lambda old: "high"),
    "words for kept": change("entries", "kept", lambda old: "False"),
    "numbers for kept": change("entries", "kept", lambda old: 7),
    "dates for seconds": change("refreshes", "seconds", lambda old: pd.Timestamp("2026-11-30")),
    "numbers for a text": change("tokens", "text", lambda old: 5),
    "bytes for a text": change("tokens", "text", lambda old: [b"\xff"] * len(old)),
    "none for a text": change("tokens", "text", lambda old: [None] * len(old)),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_column_of_a_wrong_type_is_refused(recorded: Trace, case: str) -> None:
    table, frame = WRONG_TYPES[case](recorded)
    members = members_of(recorded.to_bytes())
    members[f"{table}.parquet"] = parquet(frame)
    assert f"table {table}" in refusal(zipped(members))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"schema_version": 2, "config": {}}, "format version 2"),
        ({"schema_version": "1", "config": {}}, "format version '1'"),
        ({"schema_version": None, "config": {}}, "format version"),
        ({"schema_version": [1, {}], "config": {}}, "format version"),
        ({"config": {}}, "trace.json"),
        ({"schema_version": 1}, "trace.json"),
        ({"schema_version": 1, "config": [1]}, "trace.json"),
        ([1, 2], "trace.json"),
        ("text", "trace.json"),
        (None, "trace.json"),
    ],
)
def test_another_version_or_header_is_refused(recorded: Trace, header: Any, says: str) -> None:
    members = members_of(recorded.to_bytes())
    members["trace.json"] = json.dumps(header).encode()
    assert says in refusal(zipped(members))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(recorded: Trace, data: bytes) -> None:
    refusal(zipped({**members_of(recorded.to_bytes()), "trace.json": data}))


@pytest.mark.parametrize("bomb", MEMBERS)
def test_a_zip_bomb_is_not_unpacked(recorded: Trace, bomb: str) -> None:
    members = {**members_of(recorded.to_bytes()), bomb: bytes(50_000_000)}
    data = zipped(members, zipfile.ZIP_DEFLATED)
    assert len(data) < 100_000
    assert "would unpack to 50 MB" in refusal(data)


def test_a_file_over_the_size_limit_is_not_unpacked(recorded: Trace) -> None:
    """The directory declares 2 GB and as much packed, so that the ratio looks honest."""
    data = bytearray(recorded.to_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = (2_000_000_000).to_bytes(4, "little") * 2
    assert "would unpack to 2,000 MB" in refusal(bytes(data))


def test_a_declared_size_that_lies_is_found_out(recorded: Trace) -> None:
    data = bytearray(zipped({**members_of(recorded.to_bytes()), "trace.json": bytes(90_000)}, zipfile.ZIP_DEFLATED))
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (100).to_bytes(4, "little")
    refusal(bytes(data))


def test_a_table_whose_rows_unpack_over_the_limit_is_refused(recorded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet packs too: a member of a few kB, not compressed as the zip sees it, can hold any number of equal rows."""
    rows = 500_000
    cells = {column: np.zeros(rows, dtype) for column, dtype in COLUMNS["entries"].items() if dtype != "str"}
    table = pa.table({**cells, "protected": pa.array([""]).take(pa.array(np.zeros(rows, np.int32)))})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
        for _ in range(4):
            writer.write_table(table)
    members = {**members_of(recorded.to_bytes()), "entries.parquet": sink.getvalue()}
    assert len(sink.getvalue()) < 100_000
    monkeypatch.setattr(trace_module, "MOST_BYTES", 10_000_000)  # the rows take 34
    refusal(zipped(members))


# Nothing is half written


@pytest.mark.parametrize("name", ["run.csv", "run", "run.ccviz.zip", "run.CCVIZ"])
def test_a_trace_is_saved_under_its_own_suffix_only(recorded: Trace, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"saved as \.ccviz") as raised:
        recorded.save(tmp_path / name)
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_saving_into_a_missing_folder_makes_nothing(recorded: Trace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written") as raised:
        recorded.save(tmp_path / "missing" / "run.ccviz")
    assert len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_saving_over_a_folder_leaves_it_as_it_was(recorded: Trace, tmp_path: Path) -> None:
    (tmp_path / "run.ccviz").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        recorded.save(tmp_path / "run.ccviz")
    assert [path.name for path in tmp_path.iterdir()] == ["run.ccviz"]


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    recorded: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, existing: bool
) -> None:
    path = tmp_path / "run.ccviz"
    old = empty_trace(strategy="importance")
    if existing:
        old.save(path)

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(UserError, match="No space left") as raised:
            recorded.save(path)
    assert len(str(raised.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == (["run.ccviz"] if existing else [])
    if existing:
        assert Trace.open(path) == old


def test_an_interrupt_while_saving_leaves_the_old_file_and_no_other(
    recorded: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = empty_trace(strategy="importance")
    path = old.save(tmp_path / "run.ccviz")

    def interrupted(_handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorded.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.ccviz"]
    assert Trace.open(path) == old


def test_saving_again_replaces_the_file(recorded: Trace, tmp_path: Path) -> None:
    path = empty_trace().save(tmp_path / "日本 run.ccviz")
    recorded.save(path)
    assert Trace.open(path) == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["日本 run.ccviz"]


def test_the_configuration_says_what_was_asked_and_on_what(recorded: Trace) -> None:
    config = recorded.config
    asked = {"strategy": "counter_causal", "cache_size": 16, "chunk_size": 8, "max_new_tokens": 20, "frozen_size": 3}
    assert asked.items() <= config.items()
    assert config["options"] == {"score": "logit", "min_gap": 0, "recent": 0}
    on = {"model": "tiny-llama", "dtype": "float32", "device": "cpu", "seed": 0, "stop_reason": "length"}
    assert on.items() <= config.items()
    assert config["versions"]["torch"] == torch.__version__
    assert config["seconds"] > 0
