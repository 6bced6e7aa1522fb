"""Figures of several runs: what they show is what the tables hold, and what is written opens as what it is."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from conftest import tiny
from matplotlib import colormaps
from matplotlib.colors import to_rgb

import ccviz
from ccviz import figures, metrics
from ccviz.drawing import STYLES, draw_heatmap, style_named
from ccviz.errors import UserError
from ccviz.export import FIGURE_KINDS, FIGURE_SUFFIXES, figure_bytes, lengths_bytes
from ccviz.trace import Trace

PROMPT = [(11 * at) % 97 for at in range(60)]
NAMES = ["full", "sliding_window", "counter_causal"]
ONE_RUN = ("overlay", "scores", "surprise")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    """Three runs with everything recorded; the last is shorter than the others."""
    model = tiny("llama", seed=4)
    budget: dict[str, Any] = {"cache_size": 20, "chunk_size": 8, "frozen_size": 3, "observe": True}
    traces = ccviz.compare(model, PROMPT, NAMES, follow="full", max_new_tokens=24, **budget)
    short = ccviz.generate(model, PROMPT, "full", max_new_tokens=5, chunk_size=8)
    traces["counter_causal"] = ccviz.generate(model, PROMPT, "counter_causal", follow=short, **budget)
    return traces


@pytest.fixture(scope="module")
def answers() -> pd.DataFrame:
    random = np.random.default_rng(0)
    rows = [
        (lane, int(size), int(4 * size), "length" if size >= 64 else "eos")
        for lane in ("full", "sliding_window")
        for size in np.minimum(random.gamma(3, 12, 60).astype(int) + 1, 64)
    ]
    return pd.DataFrame(rows, columns=["lane", "tokens", "characters", "stop_reason"])


def subject(kind: str, runs: dict[str, Trace]) -> Trace | dict[str, Trace]:
    """What a kind of figure is drawn of."""
    if kind in ONE_RUN:
        return runs["counter_causal"]
    return {name: trace for name, trace in runs.items() if "kl" in trace.tokens} if kind == "fidelity" else runs


def cells(figure: Any) -> np.ndarray[Any, Any]:
    return np.array(figure.data[0].z, np.float64)


# On the page


def test_heatmaps_share_scale_and_row_height_and_a_shorter_run_has_fewer_rows(runs: dict[str, Trace]) -> None:
    rows = max(len(trace.refreshes) for trace in runs.values())
    drawn = {name: figures.heatmap(trace, last_position=90, row_height=10, rows=rows) for name, trace in runs.items()}
    assert {figure.layout.height for figure in drawn.values()} == {84 + 10 * rows}
    assert {tuple(figure.layout.yaxis.range) for figure in drawn.values()} == {(rows - 0.5, -0.5)}
    assert {(figure.data[0].zmin, figure.data[0].zmax) for figure in drawn.values()} == {(0, 90)}
    counts = {name: len(cells(figure)) for name, figure in drawn.items()}
    assert counts == {name: len(trace.refreshes) for name, trace in runs.items()}
    assert counts["counter_causal"] < counts["full"]


def test_a_wide_heatmap_is_thinned_and_its_cells_stay_true(runs: dict[str, Trace]) -> None:
    whole = metrics.slot_grid(runs["full"])
    figure = figures.heatmap(runs["full"], most_columns=10)
    step = figure.data[0].dx
    assert cells(figure).shape[1] <= 10 + 1
    for column, values in enumerate(cells(figure).T):
        np.testing.assert_array_equal(values, whole[:, int(figure.data[0].x0 + step * column)])


def test_the_survival_map_is_the_table(runs: dict[str, Trace]) -> None:
    for trace in runs.values():
        np.testing.assert_array_equal(cells(figures.survival(trace)), metrics.survival_grid(trace))


def test_scores_show_each_entry_once_in_its_group(runs: dict[str, Trace]) -> None:
    trace = runs["counter_causal"]
    refresh = int(trace.refreshes["refresh"].iloc[-1])
    for figure, column in ((figures.scores(trace), "score"), (figures.surprise(trace), "surprise")):
        table = metrics.score_table(trace, refresh)
        shown = sorted((int(x), float(y)) for part in figure.data for x, y in zip(part.x, part.y, strict=True))
        there = table[table[column].notna()]
        assert shown == sorted(zip(there["position"], there[column].astype(float), strict=True))
        assert [part.marker.symbol for part in figure.data] == ["circle", "diamond-open", "x"]
    plain = ccviz.generate(tiny("llama"), PROMPT, "importance", 20, 8, 2)
    with pytest.raises(UserError, match="did not record surprise"):
        figures.surprise(plain)


def test_curves_are_the_tables(runs: dict[str, Trace]) -> None:
    bounded = {name: trace for name, trace in runs.items() if name != "full"}
    harm = figures.fidelity(bounded)
    for name, trace in bounded.items():
        above, below = (part for part in harm.data if part.name == name)
        table = metrics.fidelity(trace)
        np.testing.assert_allclose(np.array(above.y, float), np.maximum(table["kl"], figures.LEAST_KL), rtol=1e-6)
        np.testing.assert_allclose(np.array(below.y, float), table["agrees"].expanding().mean())
    kept = figures.retention(runs)
    for part in kept.data:
        group = ["frozen", "prompt", "generated"][int((part.xaxis or "x").removeprefix("x") or 1) - 1]
        table = metrics.retention(runs[part.name], "region")
        np.testing.assert_allclose(np.array(part.y, float), table.loc[table["group"] == group, "share"])
    curve = figures.overlap_curve(runs)
    assert [part.name for part in curve.data] == ["counter_causal"]  # against the first bounded one
    shared = metrics.overlap(runs["sliding_window"], runs["counter_causal"])
    np.testing.assert_allclose(np.array(curve.data[0].y, float), shared["jaccard"])
    matrix = figures.overlap_matrix(runs)
    np.testing.assert_allclose(cells(matrix), metrics.overlap_matrix(runs, 10**6).to_numpy())


@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_histograms_count_every_answer_once_in_shared_bins(answers: pd.DataFrame, unit: str) -> None:
    figure = figures.lengths(answers, unit)
    assert sum(int(np.sum(part.y)) for part in figure.data) == len(answers)
    limited = sum(int(np.sum(part.y)) for part in figure.data if part.name == "stopped at the length limit")
    assert limited == (answers["stop_reason"] == "length").sum() > 0
    patterns = {part.marker.pattern.shape for part in figure.data}
    assert patterns == {"", "/"}
    assert len({tuple(part.x) for part in figure.data}) == 1
    over = figures.lengths(answers, unit, "overlaid")
    assert [int(np.sum(part.y[:-1])) for part in over.data] == [60, 60]
    for unit_, layout, says in (("words", "multiples", "unit"), ("tokens", "pie", "layout")):
        with pytest.raises(UserError, match=says):
            figures.lengths(answers, unit_, layout)
    with pytest.raises(UserError, match="no answers yet"):
        figures.lengths(answers[:0])


def test_a_strategy_looks_the_same_everywhere_and_two_of_one_are_told_apart() -> None:
    one = figures.lane_styles({"a": "importance", "b": "full"})
    other = figures.lane_styles({"full": "full", "importance J=8": "importance", "importance J=9": "importance"})
    assert one["a"] == other["importance J=8"]
    assert one["b"] == other["full"]
    assert other["importance J=8"][0] == other["importance J=9"][0]
    assert other["importance J=8"][1] != other["importance J=9"][1]
    many = figures.lane_styles({name: name for name in ccviz.strategy_names()})
    assert len(set(many.values())) == len(many)


def test_the_animation_has_a_frame_a_refresh_that_ends_as_the_heatmap(runs: dict[str, Trace]) -> None:
    trace = runs["sliding_window"]
    film = figures.animation(trace, "rank")
    count = len(trace.refreshes)
    assert len(film.frames) == len(film.layout.sliders[0].steps) == count
    np.testing.assert_array_equal(cells(film), cells(figures.heatmap(trace, "rank")))
    for row, frame in enumerate(film.frames):
        heights = np.diff(np.array(frame.data[0].y, np.float64))
        assert heights.tolist() == [1] * (row + 1) + [0] * (count - row - 1)  # rows to come have no height
        assert frame.data[0].y[0] == -0.5
        assert frame.layout.title.text == f"refresh {row + 1} of {count}, {8 * (row + 1)} tokens seen"
    assert len(film.to_json()) < 3 * len(figures.heatmap(trace, "rank").to_json())  # the cells are sent once


def test_the_full_cache_is_compared_with_only_where_it_is_asked_for(runs: dict[str, Trace]) -> None:
    def lines(lanes: list[str], reference: str | None = None) -> list[str]:
        return [part.name for part in figures.overlap_curve({name: runs[name] for name in lanes}, reference).data]

    assert lines(NAMES, "full") == ["sliding_window", "counter_causal"]
    assert lines(NAMES, "counter_causal") == ["sliding_window"]
    assert lines(["full", "counter_causal"]) == ["full"]  # there is nothing else
    assert lines(["counter_causal"]) == []
    for lanes in (NAMES, []):
        with pytest.raises(UserError, match="not 'importance'"):
            lines(lanes, "importance")


def test_hovering_over_the_survival_map_says_text_and_state(runs: dict[str, Trace]) -> None:
    trace = runs["counter_causal"]
    texts = ["<b>&"] * len(trace.tokens)
    drawn = figures.survival(Trace(trace.config, trace.tokens.assign(text=texts), trace.refreshes, trace.entries))
    grid, states = metrics.survival_grid(trace), ["not read yet", "kept", "lost"]
    for (row, position), state in np.ndenumerate(grid):
        said = drawn.data[0].customdata[row, position]
        assert said == f" “&lt;b&gt;&amp;”<br>{states[state]} when {8 * (row + 1)} had been seen"


def test_an_end_that_only_another_program_knows_is_counted_too(answers: pd.DataFrame) -> None:
    foreign = answers.assign(stop_reason=answers["stop_reason"].replace("eos", "max_tokens"))
    drawn = figures.lengths(foreign)
    assert sum(int(np.sum(part.y)) for part in drawn.data) == len(answers)
    assert {part.name for part in drawn.data} == {"end unknown", "stopped at the length limit"}
    assert "end unknown" in lengths_bytes(foreign, ".svg").decode()


def test_large_grids_have_no_gaps_and_no_text_a_cell(runs: dict[str, Trace]) -> None:
    trace = runs["full"]
    refreshes = trace.refreshes.loc[np.arange(24) % len(trace.refreshes)].assign(refresh=range(24))
    rows = np.repeat(np.arange(24), 3000)
    columns = {"refresh": rows, "position": np.tile(np.arange(3000), 24), "slot": 0, "score": 0.0, "kept": True}
    tokens = pd.DataFrame({"position": range(3000), "token_id": 0, "text": "a", "generated": False, "logprob": 0.0})
    wide = Trace(trace.config, tokens, refreshes, pd.DataFrame({**columns, "protected": ""}))
    for figure in (figures.heatmap(wide), figures.survival(wide)):
        drawn = figure.data[0]
        assert drawn.customdata is None
        assert not drawn.ygap
        assert cells(figure).shape == (24, 1000)
        assert '"z":{"dtype":' in figure.to_json()  # typed bytes, not a number a word
    assert figures.heatmap(trace).data[0].ygap == 1


@pytest.mark.parametrize("kind", [kind for kind in FIGURE_KINDS if kind != "overlay"])
def test_hostile_names_stay_text_on_pages(kind: str, runs: dict[str, Trace]) -> None:
    given = subject(kind, runs)
    hostile = (
        given if isinstance(given, Trace) else {f"<img src=x onerror=y>{at}": t for at, t in enumerate(given.values())}
    )
    page = figure_bytes(hostile, kind, ".html").decode()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<img" not in outside
    drawn = re.sub(r'"meta":\{"summary":".*?"\}', "", page.split("Plotly.newPlot")[-1])  # data, never drawn
    assert "\\u003cimg" not in drawn
    assert ("&lt;img" in page) == isinstance(given, dict)


# On paper and in files


@pytest.mark.parametrize("suffix", FIGURE_SUFFIXES)
@pytest.mark.parametrize("kind", FIGURE_KINDS)
def test_every_kind_is_written_in_every_type_and_the_same_each_time(
    kind: str, suffix: str, runs: dict[str, Trace]
) -> None:
    data = figure_bytes(subject(kind, runs), kind, suffix)
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".html": b"<!doctype html>"}
    assert data.startswith(starts.get(suffix, b""))
    if suffix in (".svg", ".pdf", ".csv"):
        assert figure_bytes(subject(kind, runs), kind, suffix) == data
    if suffix == ".html":
        scripts = re.findall(rb"<script.*?</script>", data, re.DOTALL)
        bundled = [script for script in scripts if b"plotly.js v" in script]
        assert len(bundled) == (kind != "overlay")
        page = data.replace(bundled[0], b"") if bundled else data
        assert not re.search(rb"(src|href)\s*=|(https?|wss?):|//[a-z]", page)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [kind for kind in FIGURE_KINDS if kind != "overlay"])
def test_every_style_draws_every_kind_with_labelled_axes(kind: str, style: str, runs: dict[str, Trace]) -> None:
    widths = ["column", "page"] if style == "paper" else ["page"]
    for width in widths:
        root = ElementTree.fromstring(figure_bytes(subject(kind, runs), kind, ".svg", style=style, width=width))
        texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
        words = {
            "heatmap": ["tokens seen", "slot, oldest token first", "position"],
            "survival": ["tokens seen", "position in the text", "lost"],
            "scores": ["position in the text", "score, higher is kept"],
            "surprise": ["position in the text", "surprise, minus the logit"],
            "retention": ["tokens seen", "share still kept"],
            "overlap": ["tokens seen", "share in common (Jaccard)"],
            "fidelity": ["token of the answer", "divergence (KL), nats"],
            "lengths": ["answers", "length of the answer, tokens"],
        }[kind]
        assert set(words) <= set(texts), texts
        inches = float(root.attrib["width"].removesuffix("pt")) / 72
        assert inches == pytest.approx(style_named(style).widths[width], abs=0.01)


def test_panels_of_the_svg_have_a_group_a_row(runs: dict[str, Trace]) -> None:
    for kind in ("heatmap", "survival"):
        root = ElementTree.fromstring(figure_bytes(runs, kind, ".svg"))
        ids = {element.attrib.get("id", "") for element in root.iter()}
        for panel, trace in enumerate(runs.values()):
            rows = {at for at in ids if at.startswith(f"panel-{panel}-row-")}
            assert len(rows) == len(trace.refreshes)
        texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
        assert [t for t in texts if t.startswith("(")] == ["(a) full", "(b) sliding window", "(c) counter causal"]


def test_panels_share_one_scale_and_rows_of_one_height(runs: dict[str, Trace]) -> None:
    figure = draw_heatmap(runs, "position", style_named("paper"))
    panels = figure.axes[:3]
    assert {mesh.get_clim() for axes in panels for mesh in axes.collections} == {(0, 83)}
    figure.draw_without_rendering()
    heights = [axes.get_window_extent().height / abs(np.diff(axes.get_ylim())[0]) for axes in panels]
    assert max(heights) - min(heights) < 0.02 * max(heights)


def test_the_pdf_has_its_text_as_text(runs: dict[str, Trace]) -> None:
    data = figure_bytes(runs, "heatmap", ".pdf")
    assert b"/Type0" in data or b"/TrueType" in data
    told = subprocess.run(["pdftotext", "-", "-"], input=data, capture_output=True, check=True).stdout.decode()
    for words in ("(b) sliding window", "tokens seen", "slot, oldest token first"):
        assert words in told


def test_the_paper_style_survives_a_grey_printer() -> None:
    def grey(colour: Any) -> float:
        red, green, blue = to_rgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    paper = style_named("paper")
    ramp = [grey(colormaps[paper.position_map](at / 20)[:3]) for at in range(21)]
    assert all(b > a for a, b in itertools.pairwise(ramp))
    unread, kept, lost = (grey(colour) for colour in paper.survival)
    assert unread - lost > 0.2
    assert lost - kept > 0.2


@pytest.mark.parametrize("kind", FIGURE_KINDS)
def test_the_csv_reads_back_to_the_same_numbers(kind: str, runs: dict[str, Trace]) -> None:
    given = subject(kind, runs)
    table = pd.read_csv(io.BytesIO(figure_bytes(given, kind, ".csv")))
    trace = runs["counter_causal"]
    refresh = int(trace.refreshes["refresh"].iloc[-1])
    expected = {
        "heatmap": lambda: pd.concat([metrics.slot_columns(t) for t in runs.values()])["position"],
        "overlay": lambda: metrics.token_states(trace, refresh)["score"],
        "survival": lambda: pd.concat([metrics.lifetimes(t) for t in runs.values()])["evicted_at"],
        "scores": lambda: metrics.score_table(trace, refresh)["score"],
        "surprise": lambda: metrics.score_table(trace, refresh)["surprise"],
        "retention": lambda: pd.concat([metrics.retention(t, "region") for t in runs.values()])["share"],
        "overlap": lambda: pd.concat(
            [metrics.overlap(runs[a], runs[b]) for a, b in (NAMES[:2], NAMES[::2], NAMES[1:])]
        )["jaccard"],
        "fidelity": lambda: pd.concat([metrics.fidelity(runs[name]) for name in NAMES[1:]])["kl"],
        "lengths": lambda: metrics.lengths(runs.items())["tokens"],
    }[kind]()
    ours = table[str(expected.name)].to_numpy(np.float64)
    np.testing.assert_allclose(ours, expected.to_numpy(np.float64), rtol=1e-6)


def test_lengths_of_a_table_are_written_too(answers: pd.DataFrame) -> None:
    for suffix in FIGURE_SUFFIXES:
        assert lengths_bytes(answers, suffix)
    pd.testing.assert_frame_equal(pd.read_csv(io.BytesIO(lengths_bytes(answers, ".csv"))), answers)


@pytest.mark.parametrize(
    ("kind", "look", "says"),
    [
        ("heatmap", {"style": "poster"}, "style must be one of screen, paper, slides"),
        ("heatmap", {"style": "paper", "width": "wide"}, "width must be one of 'column', 'page'"),
        ("retention", {"by": "size"}, "by must be one of 'region', 'age'"),
        ("overlap", {"region": "answer"}, "region must be one of 'all', 'prompt'"),
        ("lengths", {"unit": "words"}, "unit must be one of 'tokens', 'characters'"),
        ("scores", {}, "shows one run, and 3 were given"),
        ("fidelity", {}, "did not record harm"),
    ],
)
@pytest.mark.parametrize("suffix", [".html", ".svg", ".csv"])
def test_what_cannot_be_drawn_is_said(
    kind: str, look: dict[str, str], says: str, suffix: str, runs: dict[str, Trace]
) -> None:
    with pytest.raises(UserError, match=says):
        figure_bytes(runs, kind, suffix, **look)
    with pytest.raises(UserError, match="at least two runs"):
        figure_bytes(runs["full"], "overlap", suffix)


def test_drawing_leaves_matplotlibs_settings_alone(runs: dict[str, Trace]) -> None:
    before = dict(matplotlib.rcParams)
    figure_bytes(runs, "heatmap", ".svg", style="slides")
    assert dict(matplotlib.rcParams) == before
