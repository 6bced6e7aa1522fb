"""The command line: what each command writes, and one line, without a traceback, for all that can be mended."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import SMALL, Ccviz, assert_one_line, process
from conftest import ROOT
from PIL import Image

from ccviz.cli import main
from ccviz.prompts import load_sample
from ccviz.trace import Trace
from ccviz.version import __version__


def tiny_run(folder: str, *arguments: Any) -> list[Any]:
    return ["run", "--model", folder, "--device", "cpu", "--dtype", "float32", *arguments]


# run


def test_a_run_prints_the_answer_and_saves_what_was_asked(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    asked = ["--strategy", "heavy_hitter", "--option", "recent=3", "--refresh-mode", "both", "--logprobs"]
    asked += ["--frozen-size", "4", "--temperature", "0.5", "--seed", "7"]
    status, out, err = ccviz_says(*tiny_run(folder, "--prompt", "The sun is out.", *SMALL, *asked, "--output", path))
    trace = Trace.open(path)
    assert (status, out, err) == (0, f"{trace.text}\n", f"saved {path}\n")
    expected: dict[str, Any] = {
        "strategy": "heavy_hitter",
        "options": {"recent": 3},
        "cache_size": 16,
        "chunk_size": 8,
        "max_new_tokens": 12,
        "frozen_size": 4,
        "refresh_mode": "both",
        "temperature": 0.5,
        "seed": 7,
        "logprobs": True,
        "chat": True,
        "system": None,
        "label": "",
        "model": folder,
        "device": "cpu",
        "dtype": "float32",
        "stop_reason": "length",
    }
    assert {name: trace.config[name] for name in expected} == expected
    assert trace.prompt_text == "<|user|>The sun is out.\n<|assistant|>"
    assert set(trace.entries["protected"]) == {"", "frozen", "recent"}
    assert trace.tokens["logprob"][1:].notna().all()


def test_a_run_does_what_the_python_call_does(folder: str, ccviz_says: Ccviz, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    assert ccviz_says(*tiny_run(folder, "--prompt", "The sun is out.", *SMALL, "--output", path))[0] == 0
    trace, direct = Trace.open(path), Trace.open(saved)
    assert trace.tokens.equals(direct.tokens)
    assert trace.entries.equals(direct.entries)


def test_without_an_output_nothing_is_saved(
    folder: str, ccviz_says: Ccviz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = ccviz_says(*tiny_run(folder, "--prompt", "Hello", *SMALL))
    assert (status, err) == (0, "")
    assert len(out) == 12 + 1
    assert list(tmp_path.iterdir()) == []


def test_without_chat_the_prompt_is_read_as_it_is(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    assert ccviz_says(*tiny_run(folder, "--prompt", "Hello", "--no-chat", *SMALL, "--output", path))[0] == 0
    assert Trace.open(path).prompt_text == "Hello"
    assert Trace.open(path).config["chat"] is False


def test_a_prompt_comes_from_a_file_or_from_standard_input(
    folder: str, ccviz_says: Ccviz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "First line\nsecond (line)"
    (tmp_path / "prompt.txt").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    for place, source in enumerate((tmp_path / "prompt.txt", "-")):
        path = tmp_path / f"{place}.ccviz"
        assert ccviz_says(*tiny_run(folder, "--prompt-file", source, *SMALL, "--output", path))[0] == 0
        assert text in Trace.open(path).prompt_text
    assert Trace.open(tmp_path / "0.ccviz").tokens.equals(Trace.open(tmp_path / "1.ccviz").tokens)


def test_a_sample_brings_its_text_and_system_and_what_is_given_here_goes_first(
    folder: str, ccviz_says: Ccviz, tmp_path: Path
) -> None:
    path, sample = tmp_path / "run.ccviz", load_sample("1-recall-a-fact")
    budgets = ["--cache-size", "128", "--max-new-tokens", "4"]
    assert ccviz_says(*tiny_run(folder, "--sample", sample.name, *budgets, "--output", path))[0] == 0
    trace = Trace.open(path)
    head = f"<|system|>{sample.system}\n<|user|>"
    assert trace.prompt_text == f"{head}{sample.text}\n<|assistant|>"
    assert (trace.config["cache_size"], trace.config["max_new_tokens"]) == (128, 4)
    assert trace.config["chunk_size"] == sample.chunk_size
    assert trace.config["label"] == sample.title
    assert trace.config["system"] == sample.system
    assert trace.config["frozen_size"] == len(head)  # the system part is frozen unless something else is asked for
    last = trace.entries[(trace.entries["refresh"] == trace.entries["refresh"].max()) & trace.entries["kept"]]
    assert last["position"].tolist()[: len(head)] == list(range(len(head)))


def test_the_system_part_can_be_frozen_and_a_samples_left_free(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    asked = ["--system", "Be brief", "--frozen-size", "system", "--cache-size", "40", "--chunk-size", "8"]
    assert ccviz_says(*tiny_run(folder, "--prompt", "Hello", *asked, "--max-new-tokens", "2", "--output", path))[0] == 0
    assert Trace.open(path).config["frozen_size"] == len("<|system|>Be brief\n<|user|>")
    free = ["--sample", "1-recall-a-fact", *SMALL, "--frozen-size", "0", "--system", "Be brief"]
    assert ccviz_says(*tiny_run(folder, *free, "--output", path))[0] == 0
    assert Trace.open(path).config["frozen_size"] == 0
    assert Trace.open(path).prompt_text.startswith("<|system|>Be brief\n<|user|>Here are")


def test_options_are_read_as_numbers_words_and_truths(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    asked = ["--strategy", "counter_causal_fast", "--option", "score=probability", "--option", "ffn=true"]
    asked += ["--option", "min_gap=2", "--output", path]
    assert ccviz_says(*tiny_run(folder, "--prompt", "Hello there", *SMALL, *asked))[0] == 0
    options = Trace.open(path).config["options"]
    assert (options["score"], options["ffn"], options["min_gap"], options["recent"]) == ("probability", True, 2, 0)


# figure and export


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png", ".pdf"])
@pytest.mark.parametrize("kind", ["heatmap", "overlay"])
def test_a_figure_is_drawn_as_its_suffix_says(
    kind: str, suffix: str, saved: Path, ccviz_says: Ccviz, tmp_path: Path
) -> None:
    path = tmp_path / f"figure{suffix}"
    assert ccviz_says("figure", saved, "--kind", kind, "--output", path) == (0, "", "")
    data = path.read_bytes()
    if suffix == ".png":
        Image.open(io.BytesIO(data)).load()
    else:
        begins = {".html": (b"<!doctype html>", b"<html>"), ".svg": b"<?xml", ".pdf": b"%PDF-"}
        assert data.startswith(begins[suffix])


def test_orders_and_refreshes_change_the_figure(saved: Path, ccviz_says: Ccviz, tmp_path: Path) -> None:
    drawn = []
    for place, more in enumerate(
        [
            ["--order", "rank"],
            ["--order", "in place"],
            [],
            ["--kind", "overlay"],
            ["--kind", "overlay", "--refresh", "1"],
        ]
    ):
        path = tmp_path / f"{place}.svg"
        assert ccviz_says("figure", saved, *more, "--output", path) == (0, "", "")
        drawn.append(path.read_bytes())
    assert len(set(drawn)) == 5


@pytest.mark.parametrize("table", ["entries", "tokens", "refreshes"])
def test_a_table_is_exported_as_its_suffix_says(table: str, saved: Path, ccviz_says: Ccviz, tmp_path: Path) -> None:
    expected = getattr(Trace.open(saved), table)
    for suffix in (".csv", ".parquet", ".json"):
        path = tmp_path / f"run{suffix}"
        assert ccviz_says("export", saved, "--table", table, "--output", path) == (0, "", "")
    assert pd.read_parquet(tmp_path / "run.parquet").equals(expected)
    assert len(pd.read_csv(tmp_path / "run.csv", keep_default_na=False)) == len(expected)
    whole = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert len(whole[table]) == len(expected)
    assert whole["config"] == Trace.open(saved).config


# What a newcomer gets wrong

RUN = ["run", "--model", "{folder}", "--device", "cpu", "--dtype", "float32"]
HELLO = [*RUN, "--prompt", "Hello"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "required"),
    "unknown command": (["runn"], "invalid choice: 'runn'"),
    "no prompt": (["run"], "--prompt"),
    "two prompts": (["run", "--prompt", "a", "--sample", "1-recall-a-fact"], "not allowed with"),
    "an argument that is none": ([*HELLO, "--cache", "8", "--budget", "8"], "--budget"),
    "an argument without its value": ([*RUN, "--prompt"], "expected one argument"),
    "empty prompt": ([*RUN, "--prompt", ""], "prompt is empty"),
    "blank prompt": ([*RUN, "--prompt", " \n\t"], "prompt is empty"),
    "no known letter": ([*RUN, "--no-chat", "--prompt", "日本"], "prompt is empty"),
    "empty prompt file": ([*RUN, "--prompt-file", "{tmp}/empty.txt"], "prompt is empty"),
    "missing prompt file": ([*RUN, "--prompt-file", "{tmp}/missing.txt"], "missing.txt cannot be read"),
    "binary prompt file": ([*RUN, "--prompt-file", "{tmp}/binary.txt"], "not UTF-8"),
    "a folder for a prompt file": ([*RUN, "--prompt-file", "{tmp}"], "cannot be read"),
    "unknown sample": ([*RUN, "--sample", "nothing"], "1-recall-a-fact"),
    "cache size 0": ([*HELLO, "--cache-size", "0"], "cache_size (J)"),
    "cache size 1": ([*HELLO, "--cache-size", "1"], "at least 2"),
    "cache size below 0": ([*HELLO, "--cache-size", "-5"], "-5"),
    "cache size in words": ([*HELLO, "--cache-size", "eight"], "'eight'"),
    "cache size in halves": ([*HELLO, "--cache-size", "8.5"], "'8.5'"),
    "chunk size 0": ([*HELLO, "--chunk-size", "0"], "chunk_size (h)"),
    "no new tokens": ([*HELLO, "--max-new-tokens", "0"], "max_new_tokens"),
    "frozen as large as the cache": ([*HELLO, "--cache-size", "8", "--frozen-size", "8"], "frozen_size (8)"),
    "frozen in words": ([*HELLO, "--frozen-size", "all"], "'all'"),
    "frozen below 0": ([*HELLO, "--frozen-size=-1"], "'-1'"),
    "frozen in a digit that is no number": ([*HELLO, "--frozen-size", "²"], "'²'"),
    "frozen system larger than the cache": (
        [*HELLO, "--system", "Be very brief", "--frozen-size", "system", "--cache-size", "8"],
        "frozen_size",
    ),
    "prompt longer than the context": ([*RUN, "--prompt-file", "{tmp}/long.txt"], "at most 512"),
    "answer longer than the context": ([*HELLO, "--max-new-tokens", "600"], "new tokens"),
    "unknown refresh mode": ([*HELLO, "--refresh-mode", "never"], "prefill_end"),
    "temperature below 0": ([*HELLO, "--temperature", "-1"], "temperature"),
    "temperature in words": ([*HELLO, "--temperature", "hot"], "'hot'"),
    "temperature without end": ([*HELLO, "--temperature", "inf"], "temperature"),
    "seed below 0": ([*HELLO, "--seed", "-1"], "seed"),
    "seed too large": ([*HELLO, "--seed", str(10**30)], "seed"),
    "unknown strategy": ([*HELLO, "--strategy", "best"], "counter_causal"),
    "unknown option": ([*HELLO, "--strategy", "heavy_hitter", "--option", "size=3"], "its options are recent"),
    "an option where there is none": ([*HELLO, "--strategy", "full", "--option", "recent=3"], "it has none"),
    "an option without a value": ([*HELLO, "--option", "recent"], "NAME=VALUE"),
    "an option of the wrong kind": ([*HELLO, "--option", "recent=many"], "'many'"),
    "an option below 0": ([*HELLO, "--option", "recent=-1"], "-1"),
    "an option that is no choice": ([*HELLO, "--option", "score=best"], "'probability'"),
    "an option that is a list": ([*HELLO, "--option", "score=[1]"], "[1]"),
    "more protected than fits": (
        [*HELLO, "--strategy", "heavy_hitter", "--cache-size", "8", "--option", "recent=9"],
        "protects 9",
    ),
    "unknown device": ([*RUN[:3], "--device", "gpu", "--prompt", "a"], "'gpu'"),
    "unknown type": ([*RUN[:3], "--dtype", "int8", "--prompt", "a"], "'int8'"),
    "no model folder": (["run", "--model", "{tmp}/missing", "--prompt", "a"], "no model folder"),
    "a folder without a model": (["run", "--model", "{tmp}/empty", "--prompt", "a"], "no config.json"),
    "a model without a cache": (["run", "--model", "{tmp}/mamba", "--prompt", "a"], "recurrent state"),
    "an output of another kind": ([*HELLO, "--output", "{tmp}/run.txt"], ".ccviz"),
    "an output in a missing folder": ([*HELLO, "--output", "{tmp}/missing/run.ccviz"], "missing"),
    "no trace": (["figure"], "required"),
    "a figure without an output": (["figure", "{run}"], "--output"),
    "a missing trace": (["figure", "{tmp}/missing.ccviz", "--output", "{tmp}/a.svg"], "does not exist"),
    "a broken trace": (
        ["figure", "{tmp}/broken.ccviz", "--output", "{tmp}/a.svg"],
        "broken.ccviz is not a .ccviz file",
    ),
    "a folder for a trace": (["export", "{tmp}", "--output", "{tmp}/a.csv"], "is a folder"),
    "a figure of another kind": (["figure", "{run}", "--kind", "pie", "--output", "{tmp}/a.svg"], "heatmap, overlay"),
    "an unknown order": (["figure", "{run}", "--order", "best", "--output", "{tmp}/a.svg"], "'in place'"),
    "an unknown refresh": (
        ["figure", "{run}", "--kind", "overlay", "--refresh", "99", "--output", "{tmp}/a.svg"],
        "none numbered 99",
    ),
    "a refresh in words": (["figure", "{run}", "--refresh", "last", "--output", "{tmp}/a.svg"], "'last'"),
    "a figure's suffix": (["figure", "{run}", "--output", "{tmp}/a.eps"], ".pdf"),
    "a figure without a suffix": (["figure", "{run}", "--output", "{tmp}/a"], "without suffix"),
    "a figure in a missing folder": (["figure", "{run}", "--output", "{tmp}/missing/a.svg"], "cannot be written"),
    "a table's suffix": (["export", "{run}", "--output", "{tmp}/a.xlsx"], ".parquet"),
    "an unknown table": (["export", "{run}", "--table", "scores", "--output", "{tmp}/a.csv"], "refreshes"),
    "a table in a missing folder": (["export", "{run}", "--output", "{tmp}/missing/a.csv"], "cannot be written"),
}


@pytest.fixture(scope="module")
def wrong_things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    (place / "empty").mkdir()
    (place / "mamba").mkdir()
    (place / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    (place / "empty.txt").write_text("")
    (place / "long.txt").write_text("word " * 200)
    (place / "binary.txt").write_bytes(bytes(range(256)))
    (place / "broken.ccviz").write_bytes(b"PK\x03\x04 and then nothing")
    return place


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_that_names_it(
    mistake: str, folder: str, saved: Path, wrong_things: Path, ccviz_says: Ccviz
) -> None:
    arguments, named = MISTAKES[mistake]
    filled = [part.format(folder=folder, tmp=wrong_things, run=saved) for part in arguments]
    before = sorted(wrong_things.rglob("*"))
    assert named in assert_one_line(ccviz_says(*filled))
    assert sorted(wrong_things.rglob("*")) == before


def test_a_run_without_a_refresh_cannot_be_drawn(folder: str, ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    short = ["--prompt", "Hello", "--chunk-size", "300", "--max-new-tokens", "2", "--output", path]
    assert ccviz_says(*tiny_run(folder, *short))[0] == 0
    assert "no refresh" in assert_one_line(ccviz_says("figure", path, "--output", tmp_path / "a.svg"))


def test_an_answer_the_terminal_cannot_show_is_saved_all_the_same(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.ccviz"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    asked = tiny_run(folder, "--prompt", "Hello", "--max-new-tokens", 60, "--output", path)
    assert main([str(part) for part in asked]) == 0
    assert not Trace.open(path).text.isascii()


# In a process of its own


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["figure", "--help"], ["export", "-h"]]
)
def test_help_is_quick_because_it_loads_nothing(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ccviz", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert {"ccviz", "argparse"} <= loaded
    assert not loaded & {"torch", "transformers", "pandas", "numpy", "plotly", "matplotlib", "streamlit"}
    if arguments == ["--version"]:
        assert done.stdout == f"ccviz {__version__}\n"
    else:
        assert done.stdout.startswith("usage: ccviz")


@pytest.mark.slow
def test_a_process_reads_standard_input_and_shows_no_bar_where_there_is_no_terminal(
    folder: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.ccviz"
    asked = tiny_run(folder, "--prompt-file", "-", *SMALL, "--output", path)
    done = process(*asked, input="The sun is out.", environment={"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stderr) == (0, f"saved {path}\n")
    assert done.stdout == f"{Trace.open(path).text}\n"
    drawn = process("figure", path, "--output", tmp_path / "a.svg")
    assert (drawn.returncode, drawn.stdout, drawn.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nobody-xyz/no-such-model-xyz", "no-such-model-xyz"])
def test_a_hub_id_that_is_not_there_gets_one_line(name: str) -> None:
    done = process("run", "--model", name, "--prompt", "Hello", environment={"HF_HUB_OFFLINE": "1"})
    said = assert_one_line((done.returncode, done.stdout, done.stderr))
    assert name in said
    assert "smollm2-135m" in said


def on_a_terminal(*arguments: Any) -> tuple[int, str, str]:
    """Exit status, standard output, and what a terminal on standard error was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "ccviz", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=theirs) as child:
        os.close(theirs)
        sent = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # how Linux says that the other side is closed
                break
            if not piece:
                break
            sent += piece
        assert child.stdout is not None
        out = child.stdout.read().decode()
    os.close(ours)
    return child.returncode, out, sent.decode()


@pytest.mark.slow
def test_a_terminal_is_shown_how_far_the_run_is(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ccviz"
    status, out, sent = on_a_terminal(*tiny_run(folder, "--prompt", "The sun is out.", *SMALL, "--output", path))
    assert (status, out) == (0, f"{Trace.open(path).text}\n")
    assert re.search(r"answer: 100%.* 12/12 ", sent)
    assert "prompt" in sent
    assert f"Loading {folder}." in sent
    assert sent.endswith(f"saved {path}\r\n")
