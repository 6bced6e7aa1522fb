"""Figures and files: what is drawn is what the trace holds, text is only ever text, and no file needs a network."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from PIL import Image
from test_metrics import NAN, PROMPT, Entry, made, make

from ccviz import figures
from ccviz.colours import BLUE_RED
from ccviz.drawing import COLUMNS as LINE_WIDTH
from ccviz.drawing import draw_heatmap, draw_overlay, style_named
from ccviz.errors import UserError
from ccviz.export import FIGURE_SUFFIXES, TABLES, figure_bytes, read_lengths, save_figure, save_table, table_bytes
from ccviz.figures import TEXT_ON_HOVER_CELLS
from ccviz.metrics import ORDERS, heatmap_sentence, slot_grid, states_sentence
from ccviz.network import LanguageModel
from ccviz.trace import COLUMNS, Trace

OF_ONE_RUN = ("heatmap", "overlay")  # kinds that every run can be drawn as; the others are in test_figures
PICTURES = tuple(suffix for suffix in FIGURE_SUFFIXES if suffix != ".csv")
HOSTILE = [
    "<b>bold</b>",
    "</script><script>alert(1)</script>",
    "<img src='http://evil.example/x.png' onerror=alert(1)>",
    "$\\frac{1}{0}$",
    "100$ and $x_1^",
    "\ttab\t",
    "%{z} &amp; &lt;",
    "日本語のテキスト",
    "שלום עולם",
    "مرحبا",
    "👩‍👩‍👧‍👦",
    "e\u0301\u200d\u202e",
    "",
    "x" * 300,
    "日" * 150,
    "\n\n",
    "\r\n",
    "a\u2028b",
    "\"quoted\" 'too'",
    "=1+1",
]


@pytest.fixture(scope="session")
def trace(tiny_llama: LanguageModel) -> Trace:
    return make(tiny_llama, "counter_causal", frozen_size=3)


@pytest.fixture(scope="session")
def hostile() -> Trace:
    """Half of the texts kept, half evicted, with scores from best to worst."""
    row: list[Entry] = [(place, -float(place), place % 2 == 0, "") for place in range(len(HOSTILE))]
    return made([row], [len(HOSTILE)], HOSTILE)


def long_run(refreshes: int, width: int, text: str = "word ") -> Trace:
    rows: list[list[Entry]] = [
        [(refresh + place, float(place), place > 0, "") for place in range(width + 1)] for refresh in range(refreshes)
    ]
    seen = [width + 1 + refresh for refresh in range(refreshes)]
    return made(rows, seen, [text] * (seen[-1] + 5))


def svg_texts(data: bytes) -> list[str]:
    root = ElementTree.fromstring(data)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    said = str(error.value)
    assert said.strip()
    assert len(said.splitlines()) == 1
    return said


# The interactive heatmap


@pytest.mark.parametrize("order", ORDERS)
def test_the_heatmap_has_a_row_a_refresh_and_shows_the_grid(order: str, trace: Trace) -> None:
    figure = figures.heatmap(trace, order)
    drawn = figure.data[0]
    np.testing.assert_array_equal(np.float32(drawn.z), slot_grid(trace, order))
    assert len(drawn.z) == len(trace.refreshes) == 7
    assert figure.layout.yaxis.title.text == "tokens seen at the refresh"
    assert figure.layout.yaxis.ticktext == ("8", "16", "24", "32", "40", "48", "56")
    assert figure.layout.yaxis.range == (6.5, -0.5)
    assert figure.layout.xaxis.title.text.startswith("slot")
    assert figure.layout.meta["summary"] == heatmap_sentence(trace)


def test_one_scale_can_be_given_to_several_runs(trace: Trace, tiny_llama: LanguageModel) -> None:
    other = make(tiny_llama, "sliding_window", max_new_tokens=9)
    own = [figures.heatmap(run).data[0] for run in (trace, other)]
    assert [(drawn.zmin, drawn.zmax) for drawn in own] == [(0, 59), (0, 48)]
    shared = [figures.heatmap(run, last_position=59).data[0] for run in (trace, other)]
    assert [(drawn.zmin, drawn.zmax) for drawn in shared] == [(0, 59), (0, 59)]
    assert shared[0].colorscale == shared[1].colorscale
    assert [colour for _, colour in shared[0].colorscale] == BLUE_RED


def test_the_hover_says_text_and_score_of_the_entry_in_that_cell(trace: Trace) -> None:
    drawn = figures.heatmap(trace).data[0]
    assert "%{customdata}" in drawn.hovertemplate
    entries = trace.entries.set_index(["refresh", "position"])
    texts = trace.tokens["text"].tolist()
    for (row, column), position in np.ndenumerate(slot_grid(trace)):
        said = drawn.customdata[row, column]
        if np.isnan(position):
            assert said == ""
            continue
        entry = entries.loc[(row, int(position))]
        assert texts[int(position)] in said.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace(
            "\\\\", "\\"
        ).replace("\\'", "'")
        assert (f"score {entry['score']:.4g}" in said) == (not np.isnan(entry["score"]))
        assert said.endswith(entry["protected"])


def test_text_that_looks_like_markup_is_escaped_on_hover(hostile: Trace) -> None:
    cells = [cell.replace("<br>score", "|") for cell in figures.heatmap(hostile).data[0].customdata.ravel()]
    assert len(cells) == len(HOSTILE) // 2
    assert "“&lt;b&gt;bold&lt;/b&gt;”" in cells[0]
    assert not [cell for cell in cells if "<" in cell]
    assert not [cell for cell in cells if any(letter in cell for letter in "\n\r\t\x0b\u2028")]


def test_a_picture_with_many_cells_carries_no_text() -> None:
    small, large = figures.heatmap(long_run(10, 1000)).data[0], figures.heatmap(long_run(10, 1001)).data[0]
    assert (np.size(small.z), np.size(large.z)) == (TEXT_ON_HOVER_CELLS, TEXT_ON_HOVER_CELLS + 10)
    assert np.shape(small.customdata) == (10, 1000)
    assert large.customdata is None
    assert "customdata" not in large.hovertemplate


def test_a_highlighted_refresh_is_framed_and_an_unknown_one_is_not(trace: Trace) -> None:
    def frames(highlight: int | None) -> list[tuple[float, float]]:
        shapes = figures.heatmap(trace, highlight=highlight).layout.shapes
        return [(shape.y0, shape.y1) for shape in shapes if shape.type == "rect"]

    assert frames(4) == [(3.5, 4.5)]
    assert frames(None) == frames(99) == []


def test_the_frozen_part_is_marked_where_there_is_one(trace: Trace, tiny_llama: LanguageModel) -> None:
    marks = [shape for shape in figures.heatmap(trace).layout.shapes if shape.type == "line"]
    assert [(mark.x0, mark.x1) for mark in marks] == [(-0.5, 2.5)]
    assert [note.text for note in figures.heatmap(trace).layout.annotations] == ["frozen"]
    assert not figures.heatmap(make(tiny_llama, "full", frozen_size=3)).layout.shapes


# Files, opened


@pytest.mark.parametrize("order", ORDERS)
def test_the_svg_is_xml_with_labelled_axes_and_a_tick_a_refresh(order: str, trace: Trace) -> None:
    texts = svg_texts(figure_bytes(trace, "heatmap", ".svg", order))
    for label in ("tokens seen at the refresh", figures.COLUMN_TITLES[order], "position"):
        assert label in texts
    axes = draw_heatmap({"a": trace}, order, style_named("screen")).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8", "16", "24", "32", "40", "48", "56"]
    assert {"8", "16", "24", "32", "40", "48", "56"} <= set(texts)
    assert " ".join(heatmap_sentence(trace).split()) in " ".join(" ".join(texts).split())


def test_the_svg_overlay_holds_the_text(trace: Trace) -> None:
    texts = svg_texts(figure_bytes(trace, "overlay", ".svg"))
    assert states_sentence(trace, 6) in texts
    shown = "".join(trace.tokens["text"])
    assert shown in "".join(texts)


def pdf_streams(data: bytes) -> bytes:
    """All streams of a PDF, unpacked."""
    packed = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
    return b"\n".join(zlib.decompress(stream) for stream in packed)


def pdf_texts(data: bytes) -> list[str]:
    """The strings that a PDF shows; its fonts number characters by their code point, in two bytes."""
    shown = []
    for block in re.findall(rb"BT\n.*?ET\n", pdf_streams(data), re.DOTALL):
        pieces = re.findall(rb"\(((?:[^()\\]|\\.)*)\)", block, re.DOTALL)
        shown.append(re.sub(rb"\\(.)", rb"\1", b"".join(pieces)).decode("utf-16-be", "replace"))
    return shown


@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_the_pdf_has_its_text_as_text(kind: str, trace: Trace) -> None:
    data = figure_bytes(trace, kind, ".pdf")
    assert data.startswith(b"%PDF-")
    assert data.rstrip().endswith(b"%%EOF")
    assert b"/FontFile2" in data  # the font is there, as TrueType, and says which characters its glyphs are
    assert b"/ToUnicode" in data
    assert b"/Type3" not in data
    wanted = "tokens seen at the refresh" if kind == "heatmap" else states_sentence(trace, 6)
    assert wanted in pdf_texts(data)


@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_the_png_opens_and_is_not_blank(kind: str, trace: Trace) -> None:
    image = Image.open(io.BytesIO(figure_bytes(trace, kind, ".png"))).convert("RGB")
    assert image.width > 600
    assert image.height > 100
    colours = image.getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50
    most, colour = max(colours)
    assert colour == (255, 255, 255)
    assert most < 0.99 * image.width * image.height


class Page(HTMLParser):
    """What a page loads, shows and runs."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(data.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.inside[-1] if self.inside else ""
        self.texts[tag] = self.texts.get(tag, "") + data

    @property
    def counts(self) -> dict[str, int]:
        names = [tag for tag, _ in self.tags]
        return {name: names.count(name) for name in names}


LOADING = ("src", "href", "srcset", "data", "action", "poster", "background", "xlink:href")


@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_the_html_loads_nothing_from_anywhere(kind: str, hostile: Trace) -> None:
    page = Page(figure_bytes(hostile, kind, ".html"))
    assert not page.inside  # every tag is closed
    assert not [(tag, found) for tag, found in page.tags if set(found) & set(LOADING)]
    assert not {"link", "iframe", "object", "embed", "img", "base", "form"} & set(page.counts)
    style = page.texts.get("style", "")
    assert "@import" not in style
    assert "url(" not in style
    assert not [attributes for _, attributes in page.tags if "url(" in (attributes.get("style") or "")]


@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_tokens_add_no_element_to_the_html(kind: str, hostile: Trace) -> None:
    tame = made([[(place, 0.0, True, "") for place in range(20)]], [20], ["x"] * 20)
    page, plain = Page(figure_bytes(hostile, kind, ".html")), Page(figure_bytes(tame, kind, ".html"))
    assert page.counts == plain.counts
    assert not [found for _, found in page.tags if any(name.startswith("on") for name in found)]


def test_the_html_heatmap_says_its_sentence_outside_the_script(trace: Trace) -> None:
    page = Page(figure_bytes(trace, "heatmap", ".html"))
    assert page.texts["p"] == heatmap_sentence(trace)
    assert page.texts["title"].startswith("counter_causal")
    assert page.counts["title"] == page.counts["html"] == page.counts["body"] == 1


def test_the_html_overlay_shows_every_token_and_what_became_of_it(hostile: Trace) -> None:
    page = Page(figure_bytes(hostile, "overlay", ".html"))
    shown = page.texts["span"].replace("⏎\n", "\n").replace("\r\n", "\n")
    assert shown == "".join(HOSTILE).replace("\r\n", "\n")
    spans = [found for tag, found in page.tags if tag == "span"]
    assert [found["class"] for found in spans] == ["kept", "evicted"] * 10
    assert [found["title"] for found in spans][:2] == ["position 0, kept, score -0", "position 1, evicted, score -1"]
    assert states_sentence(hostile, 0) in page.texts["p"]


def test_an_earlier_refresh_is_shown_where_it_is_asked_for(trace: Trace) -> None:
    first, last = (Page(figure_bytes(trace, "overlay", ".html", refresh=refresh)) for refresh in (1, None))
    assert [found["class"] for tag, found in first.tags if tag == "span"] == ["kept"] * 16 + ["unseen"] * 44
    assert "after refresh 1" in first.texts["title"]
    assert "after refresh 6" in last.texts["title"]


SAME = [("heatmap", suffix) for suffix in (".svg", ".pdf", ".png")] + [("overlay", suffix) for suffix in PICTURES]


@pytest.mark.parametrize(("kind", "suffix"), SAME)
def test_the_same_trace_gives_the_same_bytes(kind: str, suffix: str, trace: Trace) -> None:
    assert figure_bytes(trace, kind, suffix) == figure_bytes(Trace.open(trace.to_bytes()), kind, suffix)


@pytest.mark.parametrize("suffix", [".svg", ".pdf"])
def test_another_process_draws_the_same_bytes(suffix: str, trace: Trace, tmp_path: Path) -> None:
    path = trace.save(tmp_path / "run.ccviz")
    code = "import sys; from ccviz.export import *; save_figure(Trace.open(sys.argv[1]), sys.argv[2])"
    target = tmp_path / f"figure{suffix}"
    subprocess.run([sys.executable, "-c", code, str(path), str(target)], cwd=ROOT, check=True)
    assert target.read_bytes() == figure_bytes(trace, "heatmap", suffix)


# Text of every kind


@pytest.mark.parametrize("suffix", PICTURES)
@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_any_text_can_be_drawn(kind: str, suffix: str, hostile: Trace) -> None:
    data = figure_bytes(hostile, kind, suffix)
    assert len(data) > 1000
    if suffix == ".svg":
        ElementTree.fromstring(data)


def test_the_overlay_on_paper_shows_all_of_the_text_on_lines_that_hold_it(hostile: Trace) -> None:
    texts = draw_overlay(hostile, 0).axes[0].texts[2:]
    drawn = "".join(text.get_text() for text in texts)
    assert drawn == re.sub(r"\r\n|\n", "⏎", "".join(HOSTILE).replace("\t", "    "))
    assert not any(text.get_parse_math() for text in texts)
    places = [text.get_position() for text in texts]
    assert len(set(places)) == len(places) - sum(not text.get_text().strip("\u200d") for text in texts)
    for text in texts:
        wide = any(letter == "日" for letter in text.get_text())
        width = len(text.get_text()) * (2 if wide and set(text.get_text()) == {"日"} else 1)
        assert text.get_position()[0] + width <= LINE_WIDTH + 8  # joiners count here and take no room there


@pytest.mark.parametrize("text", ["\x00", "\x08\x1b[31m", "\ufffe\uffff", "\x7f\x85"])
@pytest.mark.parametrize("suffix", PICTURES)
def test_control_characters_do_not_break_a_file(text: str, suffix: str) -> None:
    run = made([[(0, 1.0, True, ""), (1, 0.5, True, "")]], [2], ["before", text])
    data = figure_bytes(run, "overlay", suffix)
    if suffix == ".svg":
        assert "before" in "".join(svg_texts(data))


@pytest.mark.parametrize("label", ["costs $5 and $6", "$\\frac{1}{0$", "a_b^c", "<b>", "日本"])
@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_a_label_is_shown_as_it_is(kind: str, label: str, trace: Trace) -> None:
    named = Trace({**trace.config, "label": label}, trace.tokens, trace.refreshes, trace.entries)
    assert any(text.startswith(f"{label} · counter causal") for text in svg_texts(figure_bytes(named, kind, ".svg")))


# Long runs


@pytest.mark.parametrize("suffix", PICTURES)
def test_a_long_run_is_drawn(suffix: str) -> None:
    data = figure_bytes(long_run(200, 300), "heatmap", suffix)
    assert 5000 < len(data) < 8_000_000


def test_a_long_run_has_few_ticks_and_no_gaps() -> None:
    run = long_run(200, 300)
    figure = figures.heatmap(run)
    assert np.shape(figure.data[0].z) == (200, 300)
    assert 8 <= len(figure.layout.yaxis.ticktext) <= 16
    assert figure.data[0].xgap == figure.data[0].ygap == 0
    assert 8 <= len(draw_heatmap({"a": run}, "position", style_named("screen")).axes[0].get_yticks()) <= 16


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_an_overlay_of_many_lines_is_drawn(suffix: str) -> None:
    data = figure_bytes(long_run(3, 2000, "\n"), "overlay", suffix)
    if suffix == ".png":
        Image.open(io.BytesIO(data)).load()


# Tables


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("strategy", ["full", "heavy_hitter"])
def test_csv_and_parquet_read_back_to_the_same_numbers(strategy: str, table: str, tiny_llama: LanguageModel) -> None:
    run = make(tiny_llama, strategy, frozen_size=3, logprobs=True)
    expected = run.all_entries() if table == "entries" else getattr(run, table)
    assert len(expected)
    pd.testing.assert_frame_equal(pd.read_parquet(io.BytesIO(table_bytes(run, ".parquet", table))), expected)
    text = table_bytes(run, ".csv", table).decode()
    read = pd.read_csv(io.StringIO(text, newline=""), keep_default_na=False, na_values={"score": "", "logprob": ""})
    for column, dtype in COLUMNS[table].items():
        np.testing.assert_array_equal(read[column].astype(dtype), expected[column])


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_any_text_survives_a_table(suffix: str, hostile: Trace) -> None:
    data = table_bytes(hostile, suffix, "tokens")
    if suffix == ".csv":
        read = pd.read_csv(io.StringIO(data.decode(), newline=""), keep_default_na=False)
    else:
        read = pd.read_parquet(io.BytesIO(data))
    assert read["text"].tolist() == HOSTILE


@pytest.mark.parametrize("strategy", ["counter_causal", "heavy_hitter"])
def test_json_holds_everything(strategy: str, tiny_llama: LanguageModel) -> None:
    run = make(tiny_llama, strategy, frozen_size=3, logprobs=True)
    data = table_bytes(run, ".json")
    assert b"NaN" not in data
    read = json.loads(data)
    assert list(read) == ["config", *TABLES]
    assert read["config"] == run.config
    for table in TABLES:
        expected = getattr(run, table)
        for column, dtype in COLUMNS[table].items():
            found = [row[column] for row in read[table]]
            if dtype == "float32":
                numbers = np.float32([NAN if value is None else value for value in found])
                np.testing.assert_array_equal(numbers, expected[column])
            else:
                assert found == expected[column].tolist()


def test_json_keeps_small_and_large_scores() -> None:
    scores = [1.2345678e-12, -3.3e-9, 7.7e20, -0.1]
    run = made([[(place, score, True, "") for place, score in enumerate(scores)]], [4], ["x"] * 4)
    read = [row["score"] for row in json.loads(table_bytes(run, ".json"))["entries"]]
    assert np.float32(read).tolist() == np.float32(scores).tolist()


def test_json_keeps_any_text(hostile: Trace) -> None:
    data = table_bytes(hostile, ".json")
    assert [row["text"] for row in json.loads(data)["tokens"]] == HOSTILE
    assert "日本語".encode() in data


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


ANSWER = {"lane": "full", "tokens": 3, "characters": 9, "stop_reason": "eos"}


def test_lengths_are_read_from_a_file_with_a_line_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(lines(ANSWER, ANSWER, {**ANSWER, "lane": "b", "more": [1]}))
    read = read_lengths(path)
    assert list(read) == list(ANSWER)
    assert read.to_dict("records") == [ANSWER, ANSWER, {**ANSWER, "lane": "b"}]
    path.write_text("")
    assert list(read_lengths(path)) == list(ANSWER)
    assert not len(read_lengths(path))


def test_of_a_sets_results_the_last_on_an_item_counts_and_problems_and_a_cut_line_do_not(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = {**ANSWER, "strategy": "full", "problem": ""}
    failed = {"item": "c", "lane": "full", "problem": "The prompt is too long."}
    again = {**done, "item": "a", "tokens": 7}
    path.write_text(lines({**done, "item": "a"}, {**done, "item": "b"}, failed, again) + '{"item": "d", "la')
    read = read_lengths(path)
    assert read["tokens"].tolist() == [7, 3]
    assert read["strategy"].tolist() == ["full", "full"]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "7", "null", "{}", "[" * 5000]
    + [json.dumps({**ANSWER, key: value}) for key, value in {"tokens": "3", "characters": -1, "lane": None}.items()]
    + [json.dumps({**ANSWER, "tokens": True}), json.dumps({k: v for k, v in ANSWER.items() if k != "stop_reason"})],
)
def test_a_line_that_is_no_answer_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{lines(ANSWER)}{line}\n{lines(ANSWER)}")
    with pytest.raises(UserError) as raised:
        read_lengths(path)
    assert "line 2 of" in one_line(raised)
    assert "lane, tokens, characters, stop_reason" in one_line(raised)


def test_lengths_that_cannot_be_read_get_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(UserError) as raised:
            read_lengths(path)
        assert "cannot be read" in one_line(raised)


# Saving, and what is refused


def test_the_suffix_chooses_the_type_whatever_its_case(trace: Trace, tmp_path: Path) -> None:
    assert save_figure(trace, tmp_path / "a.SVG").read_bytes() == figure_bytes(trace, "heatmap", ".svg")
    saved = save_figure(trace, str(tmp_path / "b.pdf"), "overlay", refresh=2)
    assert saved.read_bytes() == figure_bytes(trace, "overlay", ".pdf", refresh=2)
    assert save_table(trace, tmp_path / "c.CSV", "tokens").read_bytes() == table_bytes(trace, ".csv", "tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.SVG", "b.pdf", "c.CSV"]


def test_what_there_is_none_of_is_refused_with_what_there_is(trace: Trace) -> None:
    with pytest.raises(UserError) as raised:
        figure_bytes(trace, "pie", ".svg")
    assert "heatmap, overlay, survival, scores" in one_line(raised)
    for suffix in (".eps", "", ".svg.gz", "svg"):
        with pytest.raises(UserError) as raised:
            figure_bytes(trace, "heatmap", suffix)
        assert all(known in one_line(raised) for known in FIGURE_SUFFIXES)
        with pytest.raises(UserError) as raised:
            table_bytes(trace, suffix)
        assert ".csv, .parquet, .json" in one_line(raised)
    for suffix in FIGURE_SUFFIXES:
        with pytest.raises(UserError) as raised:
            figure_bytes(trace, "heatmap", suffix, order="sorted")
        assert "'sorted'" in one_line(raised)
        with pytest.raises(UserError) as raised:
            figure_bytes(trace, "overlay", suffix, refresh=99)
        assert "0 to 6" in one_line(raised)
    with pytest.raises(UserError) as raised:
        table_bytes(trace, ".csv", "config")
    assert "entries, tokens, refreshes, not 'config'" in one_line(raised)


@pytest.mark.parametrize("suffix", PICTURES)
@pytest.mark.parametrize("kind", OF_ONE_RUN)
def test_a_run_without_a_refresh_cannot_be_drawn(kind: str, suffix: str, tiny_llama: LanguageModel) -> None:
    run = make(tiny_llama, "importance", chunk_size=1000)
    with pytest.raises(UserError) as raised:
        figure_bytes(run, kind, suffix)
    assert "no refresh" in one_line(raised)
    assert len(pd.read_csv(io.BytesIO(table_bytes(run, ".csv", "tokens")))) == len(PROMPT) + 20


def test_a_file_that_cannot_be_written_gets_one_sentence(trace: Trace, tmp_path: Path) -> None:
    for save, name in ((save_figure, "x.svg"), (save_table, "x.csv")):
        with pytest.raises(UserError) as raised:
            save(trace, tmp_path / "missing" / name)
        assert "cannot be written" in one_line(raised)
    assert list(tmp_path.iterdir()) == []
