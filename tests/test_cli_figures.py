"""`ccviz figure` and `ccviz animate` of several runs: what is written is opened, and every mistake gets one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from commands import Ccviz, assert_one_line
from conftest import tiny
from PIL import Image

import ccviz
from ccviz import metrics
from ccviz.export import FIGURE_KINDS, FIGURE_SUFFIXES, figure_bytes, lengths_bytes, read_lengths
from ccviz.trace import Trace

PROMPT = [(11 * at) % 97 for at in range(60)]
ONE_RUN = ("overlay", "scores", "surprise")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full run and two bounded ones of several sizes that follow it, saved, and lengths of many answers."""
    folder = tmp_path_factory.mktemp("runs")
    budget: dict[str, Any] = {"chunk_size": 8, "frozen_size": 3, "observe": True, "max_new_tokens": 12}
    lanes = ["full", "counter_causal"]
    traces = ccviz.compare(tiny("llama"), PROMPT, lanes, cache_size=[16, 20], follow="full", **budget)
    names = {"full": "full", "counter_causal J=16": "small", "counter_causal J=20": "large"}
    saved = {names[name]: trace.save(folder / f"{names[name]}.ccviz") for name, trace in traces.items()}
    rows = [
        {"lane": lane, "tokens": size, "characters": 4 * size, "stop_reason": "length" if size == 40 else "eos"}
        for lane in ("full", "counter_causal J=16")
        for size in (3, 9, 20, 40)
    ]
    saved["results"] = folder / "results.jsonl"
    saved["results"].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return saved


def given(kind: str, files: dict[str, Path]) -> list[Path]:
    """The runs that a kind of figure is drawn of."""
    if kind in ONE_RUN:
        return [files["small"]]
    return [files["small"], files["large"]] if kind == "fidelity" else [files["full"], files["small"], files["large"]]


@pytest.mark.parametrize("kind", FIGURE_KINDS)
def test_every_kind_is_drawn_of_the_files_by_their_lanes_names(
    kind: str, files: dict[str, Path], ccviz_says: Ccviz, tmp_path: Path
) -> None:
    paths = given(kind, files)
    traces = [Trace.open(path) for path in paths]
    names = metrics.lane_names(traces)
    assert names[-2:] == ["counter_causal J=16", "counter_causal J=20"] or kind in ONE_RUN
    lanes = dict(zip(names, traces, strict=True))
    for suffix in FIGURE_SUFFIXES:
        path = tmp_path / f"figure{suffix}"
        assert ccviz_says("figure", *paths, "--kind", kind, "--output", path) == (0, "", "")
        data = path.read_bytes()
        if suffix == ".html":
            assert b"<!doctype html>" in data  # its ids are drawn by chance
        else:
            assert data == figure_bytes(lanes, kind, suffix)


def test_style_width_region_and_age_reach_the_figure(files: dict[str, Path], ccviz_says: Ccviz, tmp_path: Path) -> None:
    lanes = {"full": Trace.open(files["full"]), "counter_causal": Trace.open(files["small"])}
    path = tmp_path / "a.svg"
    for more, look in (
        (["--kind", "heatmap", "--style", "paper", "--width", "column"], {"style": "paper", "width": "column"}),
        (["--kind", "heatmap", "--style", "slides", "--order", "in place"], {"style": "slides", "order": "in place"}),
        (["--kind", "retention", "--by", "age"], {"by": "age"}),
        (["--kind", "overlap", "--region", "prompt"], {"region": "prompt"}),
    ):
        assert ccviz_says("figure", files["full"], files["small"], *more, "--output", path) == (0, "", "")
        assert path.read_bytes() == figure_bytes(lanes, more[1], ".svg", **look)
        assert path.read_bytes() != figure_bytes(lanes, more[1], ".svg")
    assert ccviz_says("figure", files["small"], "--kind", "scores", "--refresh", "4", "--output", path) == (0, "", "")
    assert path.read_bytes() == figure_bytes(lanes["counter_causal"], "scores", ".svg", refresh=4)


def test_lengths_are_drawn_of_a_sets_results(files: dict[str, Path], ccviz_says: Ccviz, tmp_path: Path) -> None:
    path, table = tmp_path / "a.svg", read_lengths(files["results"])
    assert len(table) == 8
    for more, look in (
        ([], {}),
        (["--unit", "characters"], {"unit": "characters"}),
        (["--layout", "overlaid", "--style", "paper"], {"layout": "overlaid", "style": "paper"}),
    ):
        said = ccviz_says("figure", files["results"], "--kind", "lengths", *more, "--output", path)
        assert said == (0, "", "")
        assert path.read_bytes() == lengths_bytes(table, ".svg", **look)
    texts = ["".join(element.itertext()) for element in ElementTree.parse(path).iter() if element.tag.endswith("text")]
    assert {"full", "counter causal J=16", "length of the answer, tokens"} <= set(texts)
    path = tmp_path / "a.csv"
    assert ccviz_says("figure", *2 * [files["results"]], "--kind", "lengths", "--output", path) == (0, "", "")
    assert len(pd.read_csv(path)) == 16


@pytest.mark.parametrize("suffix", [".gif", ".apng", ".mp4"])
def test_a_film_is_written_of_one_run_and_of_several(
    suffix: str, files: dict[str, Path], ccviz_says: Ccviz, tmp_path: Path
) -> None:
    path = tmp_path / f"film{suffix}"
    more = ["--order", "rank", "--style", "paper", "--seconds-per-frame", "0.2"]
    for runs in ([files["small"]], [files["full"], files["small"]]):
        assert ccviz_says("animate", *runs, *more, "--output", path) == (0, "", "")
        data, count = path.read_bytes(), len(Trace.open(files["small"]).refreshes)
        if suffix == ".mp4":
            import av

            with av.open(io.BytesIO(data)) as film:
                assert sum(1 for _ in film.decode(video=0)) == count
                assert float(film.streams.video[0].average_rate or 0) == pytest.approx(5)
        else:
            film: Any = Image.open(io.BytesIO(data))
            film.seek(count - 1)
            assert (film.n_frames, film.info["duration"]) == (count, 200)


def test_a_page_that_plays_is_written_of_one_run(files: dict[str, Path], ccviz_says: Ccviz, tmp_path: Path) -> None:
    path = tmp_path / "film.html"
    assert ccviz_says("animate", files["small"], "--output", path) == (0, "", "")
    assert b"Plotly.addFrames" in path.read_bytes()


MISTAKES: dict[str, tuple[list[str], str]] = {
    "an unknown style": (["figure", "{full}", "--style", "poster", "--output", "a.svg"], "screen, paper, slides"),
    "an unknown width": (["figure", "{full}", "--width", "wide", "--output", "a.svg"], "'column', 'page'"),
    "an unknown unit": (["figure", "{full}", "--kind", "lengths", "--unit", "w", "--output", "a.svg"], "'characters'"),
    "an unknown layout": (["figure", "{results}", "--kind", "lengths", "--layout", "x", "--output", "a.svg"], "layout"),
    "results of another kind": (["figure", "{results}", "--output", "a.svg"], "as --kind lengths"),
    "results and a run": (["figure", "{results}", "{full}", "--kind", "lengths", "--output", "a.svg"], "drawn alone"),
    "results that are missing": (["figure", "no.jsonl", "--kind", "lengths", "--output", "a.svg"], "cannot be read"),
    "results that are none": (["figure", "{bad}", "--kind", "lengths", "--output", "a.svg"], "line 1 of"),
    "no answers": (["figure", "{none}", "--kind", "lengths", "--output", "a.svg"], "no answers yet"),
    "one run of two": (["figure", "{full}", "{small}", "--kind", "scores", "--output", "a.svg"], "shows one run"),
    "an overlap of one": (["figure", "{small}", "--kind", "overlap", "--output", "a.svg"], "at least two runs"),
    "harm of the full cache": (["figure", "{full}", "--kind", "fidelity", "--output", "a.svg"], "did not record harm"),
    "a film without a run": (["animate", "--output", "a.gif"], "required"),
    "a film without an output": (["animate", "{small}"], "--output"),
    "a film of another type": (["animate", "{small}", "--output", "a.avi"], ".gif, .apng, .mp4, .html"),
    "a film in an unknown order": (["animate", "{small}", "--order", "best", "--output", "a.gif"], "'in place'"),
    "a film that is too fast": (["animate", "{small}", "--seconds-per-frame", "0", "--output", "a.gif"], "not 0"),
    "a film in words": (["animate", "{small}", "--seconds-per-frame", "slow", "--output", "a.gif"], "'slow'"),
    "a film of nothing": (["animate", "no.ccviz", "--output", "a.gif"], "does not exist"),
    "a film in a missing folder": (["animate", "{small}", "--output", "missing/a.gif"], "cannot be written"),
}


@pytest.mark.parametrize(("arguments", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_gets_one_line_and_leaves_no_file(
    arguments: list[str],
    says: str,
    files: dict[str, Path],
    ccviz_says: Ccviz,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = {"bad": tmp_path / "bad.jsonl", "none": tmp_path / "none.jsonl"}
    inputs["bad"].write_text('{"lane": "full"}\n')
    inputs["none"].write_text("")
    assert says in assert_one_line(ccviz_says(*[word.format(**files, **inputs) for word in arguments]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "none.jsonl"]
