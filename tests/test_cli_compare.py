"""The compare command: several strategies on one prompt, sets of prompts, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import SMALL, Ccviz, assert_one_line, process

import ccviz
from ccviz.models import load_model
from ccviz.sets import PromptSet
from ccviz.trace import Trace

BUDGET = {"cache_size": 16, "chunk_size": 8, "max_new_tokens": 12}


def comparing(model: str, *arguments: Any) -> list[Any]:
    return ["compare", "--model", model, "--device", "cpu", "--dtype", "float32", *arguments]


def test_runs_are_saved_as_they_would_be_alone(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    asked = ["--prompt", "The sun is out.", "--strategies", "full,sliding_window,heavy_hitter"]
    asked += ["--option", "heavy_hitter.recent=3", *SMALL, "--output-dir", tmp_path / "runs"]
    status, out, err = ccviz_says(*comparing(folder, *asked))
    assert (status, err) == (0, f"saved 3 runs in {tmp_path / 'runs'}\n")
    model = load_model(folder, device="cpu", dtype="float32")
    for name in ("full", "sliding_window", "heavy_hitter"):
        options = {"recent": 3} if name == "heavy_hitter" else {}
        alone = ccviz.generate(model, "The sun is out.", name, options=options, **BUDGET)
        trace = Trace.open(tmp_path / "runs" / f"{name}.ccviz")
        assert trace.entries[["refresh", "position", "kept"]].equals(alone.entries[["refresh", "position", "kept"]])
        assert trace.config["options"] == alone.config["options"]
        assert f"[{name}] {' '.join(trace.text.split())}" in out
    header, *rows = out.split("\n\n")[0].splitlines()
    assert header.split()[:3] == ["lane", "tokens", "stop_reason"]
    assert [row.split()[:2] for row in rows] == [["full", "12"], ["sliding_window", "12"], ["heavy_hitter", "12"]]


def test_several_sizes_and_the_harm_they_do(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    asked = ["--prompt", "The sun is out.", "--strategies", "full,importance", "--follow", "full", "--observe"]
    asked += ["--chunk-size", "8", "--max-new-tokens", "12", "--cache-size", "12,16", "--output-dir", tmp_path]
    status, out, _ = ccviz_says(*comparing(folder, *asked))
    assert status == 0
    assert "mean_kl" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "full.ccviz",
        "importance-J=12.ccviz",
        "importance-J=16.ccviz",
    }
    for size in (12, 16):
        trace = Trace.open(tmp_path / f"importance-J={size}.ccviz")
        assert trace.config["cache_size"] == size
        assert trace.config["follows"] == "full"
        assert trace.tokens.loc[trace.tokens["generated"], "kl"].notna().all()
        assert trace.entries["surprise"].notna().any()


def test_a_saved_run_is_followed(folder: str, saved: Path, ccviz_says: Ccviz, tmp_path: Path) -> None:
    output = tmp_path / "follows.ccviz"
    asked = ["run", "--model", folder, "--device", "cpu", "--dtype", "float32", "--prompt", "The sun is out."]
    status, _, _ = ccviz_says(*asked, *SMALL, "--strategy", "importance", "--follow", saved, "--output", output)
    assert status == 0
    assert Trace.open(output).text == Trace.open(saved).text


def test_a_set_of_prompts_is_run_kept_and_resumed(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "three.jsonl"
    records = [{"prompt": f"Line {at}.", "id": f"p{at}", "answer": "x"} for at in range(3)]
    prompts.write_text("\n".join(map(json.dumps, records)))
    output = tmp_path / "out"
    asked = comparing(folder, "--prompts", prompts, "--strategies", "full,importance", *SMALL, "--output-dir", output)
    done = process(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    results = PromptSet.open(output).results()
    assert results["item"].tolist() == ["p0", "p0", "p1", "p1", "p2", "p2"]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["lane", "prompts", "tokens", "characters", "right", "seconds"]
    assert rows[1][:3] == ["full", "3", "12"]

    file = output / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:9])  # as a crash leaves it
    again = process(*asked)
    assert again.returncode == 0
    columns = ["item", "lane", "text"]
    resumed = PromptSet.open(output).results()
    pd.testing.assert_frame_equal(resumed[columns], results[columns])
    assert file.read_bytes().startswith(b"".join(lines[:2]))


MISTAKES = {
    "an unknown strategy": (["--prompt", "a", "--strategies", "full,best"], "there is no strategy 'best'"),
    "a strategy twice": (["--prompt", "a", "--strategies", "full,full"], "each once"),
    "no strategy": (["--prompt", "a", "--strategies", ","], "at least one"),
    "an option of none": (["--prompt", "a", "--strategies", "full", "--option", "x=1"], "STRATEGY.NAME=VALUE"),
    "a size in words": (["--prompt", "a", "--strategies", "full", "--cache-size", "big"], "separated by commas"),
    "a lane to follow that is not there": (
        ["--prompt", "a", "--strategies", "importance", "--follow", "full"],
        "follow must name one of the lanes importance",
    ),
    "a set without a place": (["--prompts", "{tmp}/p.txt", "--strategies", "full"], "--output-dir"),
    "a set that is not there": (
        ["--prompts", "{tmp}/none", "--strategies", "full", "--output-dir", "{tmp}/o"],
        "No such file",
    ),
    "a set that follows a file": (
        ["--prompts", "{tmp}/p.txt", "--strategies", "full", "--output-dir", "{tmp}/o", "--follow", "a.ccviz"],
        "names one of the lanes full",
    ),
    "an empty prompt": (["--prompt", " ", "--strategies", "full"], "empty"),
    "no prompt": (["--strategies", "full"], "required"),
    "a strategy file that is not there": (["--prompt", "a", "--strategies", "{tmp}/mine.py:Mine"], "mine.py"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_can_be_mended_is_one_line(mistake: str, folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("One prompt.\n")
    asked, says = MISTAKES[mistake]
    line = assert_one_line(ccviz_says(*comparing(folder, *(word.replace("{tmp}", str(tmp_path)) for word in asked))))
    assert says in line


def test_another_set_in_the_same_place_is_refused(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("One prompt.\n")
    asked = comparing(folder, "--prompts", tmp_path / "p.txt", "--output-dir", tmp_path / "o", *SMALL, "--strategies")
    assert ccviz_says(*asked, "full")[0] == 0
    assert "another set of prompts or settings" in assert_one_line(ccviz_says(*asked, "importance"))


def test_what_the_future_expected_is_recorded_when_asked_for(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    asked = ["--prompt", "The sun is out.", "--strategies", "sliding_window,counter_causal", "--explain", *SMALL]
    status, _, _ = ccviz_says(*comparing(folder, *asked, "--output-dir", tmp_path / "runs"))
    assert status == 0
    entries = Trace.open(tmp_path / "runs" / "counter_causal.ccviz").entries
    assert entries["probability"].between(0, 1).any()
    assert "probability" not in Trace.open(tmp_path / "runs" / "sliding_window.ccviz").entries
    asked = ["--prompt", "The sun is out.", "--strategies", "sliding_window,importance", "--explain", *SMALL]
    assert "importance makes none" in assert_one_line(
        ccviz_says(*comparing(folder, *asked, "--output-dir", tmp_path / "no"))
    )
