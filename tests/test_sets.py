"""Prompt sets: prompts from files of every kind, results that survive a crash, and a set that is resumed."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny
from filelock import FileLock

from ccviz.errors import UserError
from ccviz.jobs import Runner
from ccviz.models import ModelSpec
from ccviz.network import LanguageModel
from ccviz.prompts import load_sample, sample_names
from ccviz.runs import Request, Run, lane_requests
from ccviz.sets import (
    Item,
    PromptSet,
    SetRun,
    items_of_files,
    items_of_lines,
    known_sets,
    new_folder,
    read_items,
    work_through,
)
from ccviz.settings import Settings
from ccviz.trace import Trace

SPEC = ModelSpec("tiny", "cpu", "float32")
PROMPTS = ["alpha beta gamma delta", "one two three four five", "to be or not to be", "ABCDEFGHIJ"]


def lanes(**given: Any) -> dict[str, Request]:
    settings = Settings(**{"cache_size": 8, "chunk_size": 4, "max_new_tokens": 6, **given})
    return lane_requests(Request("", settings, chat=False), ["full", "sliding_window"], [8])


def made(folder: Path, prompts: list[str] = PROMPTS, **given: Any) -> PromptSet:
    return PromptSet.create(folder, "Four lines", SPEC, items_of_lines("\n".join(prompts)), lanes(**given))


def runs_on(model: LanguageModel, prompts: PromptSet) -> Any:
    def run(item: Item) -> dict[str, Trace]:
        started = Run(model, prompts.requests(item), prompts.follow)
        for _event in started.events():
            pass
        return started.traces()

    return run


# Reading


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"prompt": "One?", "id": "x", "answer": 3}\n\n"Two?"\n', [("x", "One?", "3"), ("3", "Two?", "")]),
        ("a.jsonl", '{"problem": "One?", "unique_id": "t/1.json"}\n', [("t/1.json", "One?", "")]),
        ("a.csv", 'Prompt,answer\n"One, two?",yes\nThree?,\n', [("1", "One, two?", "yes"), ("2", "Three?", "")]),
        ("a.txt", "\ufeffOne?\n\n  Two? \n", [("1", "One?", ""), ("2", "Two?", "")]),
        ("a.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', [("1", "a", ""), ("1 (2)", "b", "")]),
    ],
)
def test_prompts_are_read_from_files(
    name: str, content: str, expected: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert [(item.id, item.prompt, item.answer) for item in read_items(tmp_path / name)] == expected


def test_a_folder_is_a_set_and_samples_bring_their_answers() -> None:
    items = read_items(ROOT / "sample_prompts")
    assert [item.id for item in items] == sample_names()
    first = load_sample(sample_names()[0])
    assert (items[0].prompt, items[0].answer, items[0].system) == (first.text, first.answer, first.system)


def test_uploaded_files_are_one_set() -> None:
    files = [("b.txt", b"Line one\nline two\n"), ("c.jsonl", b'"From JSON"'), ("d.md", b"# Title\nText")]
    assert [item.prompt for item in items_of_files(files)] == ["Line one\nline two", "From JSON", "# Title\nText"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{oops', "Line 2 of a.jsonl is not JSON"),
        ("a.jsonl", b'{"words": "x"}', "line 1 of a.jsonl has no prompt: it needs one of prompt, .* and has words"),
        ("a.jsonl", b"[1]", "neither text nor an object"),
        ("a.jsonl", b'{"prompt": "  ", "id": "q7"}', "The prompt 'q7' of a.jsonl is empty"),
        ("a.csv", b"words\nx\n", "row 1 of a.csv has no prompt"),
        ("a.csv", b"", "has no prompts"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.pdf", b"x", "not from 'a.pdf'"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_items(tmp_path / name)


def test_a_missing_file_and_an_empty_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="has no prompts"):
        read_items(tmp_path)


# Results


def test_results_equal_those_of_runs_alone_and_are_there_after_opening_again(tmp_path: Path) -> None:
    model = tiny("llama")
    prompts = made(tmp_path)
    told: list[str] = []
    work_through(prompts, runs_on(model, prompts), tell=lambda item: told.append(item.id))
    assert told == ["1", "2", "3", "4"]
    again = PromptSet.open(tmp_path)
    assert again == prompts
    assert again.pending() == []
    results = again.results()
    assert results["lane"].tolist() == ["full", "sliding_window"] * 4
    for row in results.to_dict("records"):
        item = again.items[int(row["item"]) - 1]
        trace = Trace.open(again.trace_path(item, row["lane"]))
        (alone,) = runs_on(model, PromptSet(tmp_path, "", SPEC, (item,), {row["lane"]: prompts.lanes[row["lane"]]}))(
            item
        ).values()
        assert trace.tokens["token_id"].tolist() == alone.tokens["token_id"].tolist()
        assert (row["tokens"], row["characters"], row["text"]) == (6, len(alone.text), alone.text)
        assert row["stop_reason"] == "length"


def test_a_followed_lane_measures_the_harm_to_the_others(tmp_path: Path) -> None:
    prompts = PromptSet.create(tmp_path, "Harm", SPEC, items_of_lines("\n".join(PROMPTS)), lanes(), follow="full")
    work_through(prompts, runs_on(tiny("llama"), prompts))
    harm = prompts.results().groupby("lane")["mean_kl"].mean()
    assert harm["sliding_window"] > 0
    assert harm.isna()["full"]


def test_a_crash_in_the_middle_of_a_line_loses_that_prompt_only(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), made(tmp_path)
    work_through(prompts, runs_on(model, prompts))
    whole = prompts.results()
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:5]) + lines[5][:20])  # prompt 3 has one lane and part of another
    assert [item.id for item in prompts.pending()] == ["3", "4"]
    work_through(prompts, runs_on(model, prompts))
    columns = ["item", "lane", "tokens", "text"]
    resumed = prompts.results()[columns].sort_values(["item", "lane"]).reset_index(drop=True)
    assert resumed.equals(whole[columns].sort_values(["item", "lane"]).reset_index(drop=True))
    for line in file.read_text().splitlines():
        json.loads(line)


def test_a_prompt_that_cannot_be_run_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    prompts = made(tmp_path, ["x" * 3000, "short one"])
    work_through(prompts, runs_on(tiny("llama"), prompts))
    results = prompts.results().set_index(["item", "lane"])
    assert "shorten the prompt" in results.loc[("1", "full"), "problem"]
    assert results.loc[("2", "full"), "problem"] == ""
    assert prompts.pending() == []


def test_another_set_in_the_same_folder_is_refused_and_the_same_one_goes_on(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert made(tmp_path) == first
    with pytest.raises(UserError, match="another set of prompts or settings"):
        made(tmp_path, chunk_size=5)
    with pytest.raises(UserError, match="holds no prompt set"):
        PromptSet.open(tmp_path / "none")
    (tmp_path / "set.json").write_text('{"schema_version": 1}')
    with pytest.raises(UserError, match="does not follow the format"):
        PromptSet.open(tmp_path)


def test_two_programs_do_not_run_one_set(tmp_path: Path) -> None:
    prompts = made(tmp_path)
    with FileLock(tmp_path / ".lock"), pytest.raises(UserError, match="by another program"):
        work_through(prompts, lambda _item: {})


def test_a_folder_that_cannot_be_written_to_stops_the_set_and_keeps_what_was_done(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), made(tmp_path)
    run = runs_on(model, prompts)

    def lose_the_folder(item: Item) -> None:
        if item.id == "2":
            shutil.rmtree(tmp_path / "traces")

    with pytest.raises(UserError, match="cannot be written"):
        work_through(prompts, run, tell=lose_the_folder)
    assert set(prompts.results()["item"]) == {"1", "2"}
    (tmp_path / "traces").mkdir()
    work_through(prompts, run)
    assert prompts.pending() == []


def test_trace_files_of_odd_names_stay_apart(tmp_path: Path) -> None:
    prompts = made(tmp_path)
    names = {prompts.trace_path(Item(name, ""), "a J=8").name for name in ("a/b", "a b", "../a", "a-b", "é")}
    assert len(names) == 5
    assert all("/" not in name and not name.startswith("..") for name in names)


def test_sets_are_listed_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCVIZ_DATA", str(tmp_path))
    assert known_sets() == []
    folder = new_folder("A title / with marks")
    made(folder)
    assert known_sets() == [folder]


# On a server


def test_a_set_run_stops_within_a_token_and_resumes_where_it_was(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), made(tmp_path, max_new_tokens=40)
    runner = Runner(lambda *_given, **_progress: model)
    reached = threading.Event()
    running: list[SetRun] = []

    def stop_in_the_third(*_: Any) -> None:
        if running and running[0].done == 2 and not reached.is_set():
            reached.set()
            running[0].stop()

    handle = model.model.register_forward_pre_hook(stop_in_the_third)
    base = model.model.base_model.register_forward_pre_hook(stop_in_the_third)
    running.append(SetRun(runner, prompts))
    assert running[0].wait(60)
    handle.remove()
    base.remove()
    assert reached.is_set()
    assert running[0].message == ""
    assert [item.id for item in prompts.pending()] == ["3", "4"]

    again = SetRun(Runner(lambda *_given, **_progress: model), PromptSet.open(tmp_path))
    assert again.wait(60)
    assert (again.done, again.total) == (4, 4)
    assert prompts.pending() == []


def test_a_set_whose_model_cannot_be_loaded_says_so_and_loses_nothing(tmp_path: Path) -> None:
    def refuse(*_given: Any, **_progress: Any) -> LanguageModel:
        raise UserError("there is no such model.")

    running = SetRun(Runner(refuse), made(tmp_path))
    assert running.wait(60)
    assert running.message == "there is no such model."
    assert len(PromptSet.open(tmp_path).pending()) == 4


def test_runs_of_a_set_do_not_push_other_runs_out_of_memory(tmp_path: Path) -> None:
    model = tiny("llama")
    runner = Runner(lambda *_given, **_progress: model)
    mine = runner.submit(SPEC, {"full": Request("hello", Settings(8, 4, 2), "full", chat=False)})
    running = SetRun(runner, made(tmp_path))
    assert running.wait(60)
    assert running.job is not None
    assert runner.get(running.job.id) is None
    assert runner.get(mine.id) is mine


def test_time_left_is_told_after_the_first_prompt(tmp_path: Path) -> None:
    model = tiny("llama")
    prompts = made(tmp_path)
    running: list[SetRun] = []
    seen: list[tuple[int, bool]] = []

    def look(*_: Any) -> None:
        if running:
            seen.append((running[0].done, running[0].seconds_left is not None))

    handle = model.model.base_model.register_forward_pre_hook(look)
    running.append(SetRun(Runner(lambda *_given, **_progress: model), prompts))
    assert running[0].wait(60)
    handle.remove()
    assert {done for done, _ in seen} >= {1, 2, 3}
    assert all(told == (done > 0) for done, told in seen)
    assert running[0].seconds_left == 0
