"""Films: a frame a refresh, by the tokens seen, in every type; what is written is opened and its pictures looked at."""

from __future__ import annotations

import builtins
import io
import itertools
from typing import Any

import av
import numpy as np
import pytest
from conftest import tiny
from PIL import Image

import ccviz
from ccviz.animation import ANIMATION_SUFFIXES, animation_bytes, frames, moments
from ccviz.drawing import STYLES, style_named
from ccviz.errors import UserError
from ccviz.export import Look, drawing_in
from ccviz.trace import Trace

PROMPT = [(11 * at) % 97 for at in range(60)]
NAMES = ["full", "sliding_window", "counter_causal"]
BLANK = 250  # a colour lighter than this in all channels is paper


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    """Three runs in step, 24 tokens each; the last one ended early."""
    model = tiny("llama", seed=4)
    budget: dict[str, Any] = {"cache_size": 20, "chunk_size": 8, "frozen_size": 3}
    traces = ccviz.compare(model, PROMPT, NAMES, max_new_tokens=24, **budget)
    traces["counter_causal"] = ccviz.generate(model, PROMPT, "counter_causal", max_new_tokens=5, **budget)
    return traces


@pytest.fixture(scope="module")
def steps() -> dict[str, Trace]:
    """Two lanes of different chunk sizes, refreshed at 8, 16, ..., 64 and at 12, 24, ..., 60."""
    model = tiny("llama", seed=4)
    return {
        f"h={chunk}": ccviz.generate(model, PROMPT, "sliding_window", 20, chunk, max_new_tokens=5) for chunk in (8, 12)
    }


def opened(data: bytes) -> list[Image.Image]:
    """The frames of a GIF or APNG."""
    film: Any = Image.open(io.BytesIO(data))
    pictures = []
    for at in range(film.n_frames):
        film.seek(at)
        assert film.info["duration"] == 400
        pictures.append(film.convert("RGB"))
    return pictures


def pictures_of(traces: dict[str, Trace], style: str = "screen") -> list[np.ndarray[Any, Any]]:
    look = Look(style=style)
    with drawing_in(look):
        return list(frames(traces, look))


def inked(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which pixels are coloured, neither paper nor ink nor the grey between."""
    return np.ptp(picture.astype(int), axis=2) > 20


@pytest.mark.parametrize("suffix", [".gif", ".apng"])
def test_a_film_has_a_frame_a_refresh_and_no_two_are_the_same(runs: dict[str, Trace], suffix: str) -> None:
    for given in (runs["sliding_window"], runs):
        longest = max(len(trace.refreshes) for trace in runs.values())
        pictures = opened(animation_bytes(given, suffix))
        assert len({picture.tobytes() for picture in pictures}) == len(pictures) == longest == 10
        assert len({picture.size for picture in pictures}) == 1
        assert pictures[0].getpixel((1, 1)) == (255, 255, 255)  # a palette must not grey the paper


def test_frames_that_are_equal_are_not_merged_away() -> None:
    trace = ccviz.generate(tiny("llama"), PROMPT, "full", chunk_size=8, max_new_tokens=30)
    empty = trace.entries.iloc[:0]
    still = Trace(trace.config, trace.tokens, trace.refreshes.assign(tokens_seen=8, size_after=0), empty)
    for suffix in (".gif", ".apng"):
        film: Any = Image.open(io.BytesIO(animation_bytes(still, suffix)))
        assert film.n_frames == len(trace.refreshes) > 5


@pytest.mark.parametrize("seconds", [0.1, 0.5, 3.0])
def test_an_mp4_has_a_frame_a_refresh_each_as_long_as_asked(runs: dict[str, Trace], seconds: float) -> None:
    with av.open(io.BytesIO(animation_bytes(runs, ".mp4", seconds_per_frame=seconds))) as film:
        decoded = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        assert float(film.streams.video[0].average_rate or 0) == pytest.approx(1 / seconds, rel=1e-3)
    drawn = pictures_of(runs)
    assert len(decoded) == len(drawn) == 10
    for ours, theirs in zip(drawn, decoded, strict=True):
        height, width = theirs.shape[:2]
        assert np.abs(ours[:height, :width].astype(int) - theirs).mean() < 4  # the codec loses a little


def test_each_frame_adds_one_row_to_each_panel_below_those_there_are(runs: dict[str, Trace]) -> None:
    drawn = [inked(picture) for picture in pictures_of({"a": runs["sliding_window"]})]
    left = slice(0, int(0.85 * drawn[0].shape[1]))  # without the scale
    shown = [np.flatnonzero(picture[:, left].any(axis=1)) for picture in drawn]
    assert all(rows[0] == shown[0][0] for rows in shown)
    bottoms = [int(rows[-1]) for rows in shown]
    height = (bottoms[-1] - shown[0][0] + 1) / len(drawn)
    assert np.abs(np.diff(bottoms) - height).max() <= 1.5
    for before, after in itertools.pairwise(drawn):
        assert not (before & ~after).any()


def test_lanes_keep_step_by_the_tokens_seen_and_not_by_the_number_of_the_refresh(steps: dict[str, Trace]) -> None:
    seen = [8, 12, 16, 24, 32, 36, 40, 48, 56, 60, 64]
    assert moments(steps) == seen
    assert moments({"h=12": steps["h=12"]}) == [12, 24, 36, 48, 60]
    drawn = [inked(picture) for picture in pictures_of(steps)]
    assert len(drawn) == len(seen)
    half = int(0.46 * drawn[0].shape[1])  # the second panel starts before the middle, for the scale is at the right
    for at in range(1, len(seen)):
        changed = (drawn[at] != drawn[at - 1]).any(axis=0)
        assert changed[:half].any() == (seen[at] % 8 == 0)
        assert changed[half:].any() == (seen[at] % 12 == 0)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_leaves_room_for_the_words_above_the_panels(style: str, runs: dict[str, Trace]) -> None:
    drawn = pictures_of(runs, style)
    assert drawn[0].shape[1] == pytest.approx(110 * style_named(style).widths["page"], abs=2)
    first, last = (picture.astype(int) for picture in (drawn[0], drawn[-1]))
    changed = (np.abs(first - last).max(axis=2) > 60).any(axis=1)
    top = int(changed.argmax())  # the number of the refresh is what changes first from above
    band = first[top : top + int((~changed[top:]).argmax())]
    assert 5 < len(band) < len(first) / 10
    assert (band[:, : band.shape[1] // 2].min(axis=2) > BLANK).all()  # nothing else is on its line


def test_a_page_has_plotlys_frames_and_starts_with_all_there_is(runs: dict[str, Trace]) -> None:
    page = animation_bytes(runs["full"], ".html").decode()
    drawn = page.split("Plotly.newPlot")[-1]
    assert "Plotly.addFrames" in drawn
    assert drawn.count('tokens seen"') >= len(runs["full"].refreshes)
    assert "Plotly.animate" not in drawn  # it plays when it is asked to


def test_what_cannot_be_animated_is_said(runs: dict[str, Trace]) -> None:
    assert ANIMATION_SUFFIXES == (".gif", ".apng", ".mp4", ".html")
    for suffix in (".avi", "", "gif"):
        with pytest.raises(UserError, match=r"\.gif, \.apng, \.mp4, \.html"):
            animation_bytes(runs, suffix)
    assert animation_bytes(runs, ".html").count(b"Plotly.addFrames(") == len(runs)
    for seconds in (0, -1, 61, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"from 0\.02 to 60 seconds, not"):
            animation_bytes(runs, ".gif", seconds_per_frame=seconds)
    with pytest.raises(UserError, match="order must be one of"):
        animation_bytes(runs, ".gif", "sorted")
    with pytest.raises(UserError, match="style must be one of"):
        animation_bytes(runs, ".gif", style="poster")
    for nothing in ({}, ccviz.generate(tiny("llama"), PROMPT, "full", chunk_size=4000, max_new_tokens=2)):
        with pytest.raises(UserError, match="No refresh yet"):
            animation_bytes(nothing, ".gif")


def test_without_av_an_mp4_is_refused_with_the_line_that_installs_it(
    runs: dict[str, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_av(name: str, *rest: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(UserError, match="pip install av"):
        animation_bytes(runs["full"], ".mp4")
    assert animation_bytes(runs["full"], ".gif").startswith(b"GIF89a")


def test_a_long_film_is_made_smaller_and_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ccviz.generate(tiny("llama"), PROMPT, "sliding_window", 20, 1, 90)
    film = Image.open(io.BytesIO(animation_bytes(trace, ".gif")))
    assert film.n_frames == len(trace.refreshes) == 149
    monkeypatch.setattr("ccviz.animation.MOST_PIXELS", 149 * 100_000)
    small = Image.open(io.BytesIO(animation_bytes(trace, ".gif")))
    assert small.n_frames == 149
    assert small.size[0] * small.size[1] <= 102_000 < film.size[0] * film.size[1]
