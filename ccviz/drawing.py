"""The same pictures on paper: Matplotlib axes from traces, no browser needed.

Knows traces, colours and fonts; writing files is `export`'s work.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ccviz.figures import COLUMN_TITLES, POSITION_COLOURS
from ccviz.metrics import heatmap_sentence, slot_grid, states_sentence, token_states
from ccviz.trace import Trace

POSITION_MAP = LinearSegmentedColormap.from_list("ccviz-position", POSITION_COLOURS)
SCORE_RGB = (0.93, 0.55, 0.08)  # the overlay's orange; how much of it shows says how high the score ranks
COLUMNS = 92  # characters a line of the overlay
LINE_INCHES, CHARACTER_INCHES = 0.19, 0.077
MONOSPACE = ["DejaVu Sans Mono", "WenQuanYi Zen Hei Mono", "Noto Sans Mono CJK SC", "Noto Emoji", "DejaVu Sans"]


# Fonts that fill in for missing scripts come in one weight; that they do is not worth a line each.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def fonts() -> list[str]:
    """The fonts of `MONOSPACE` that this machine has, so that Matplotlib falls back without a warning a glyph."""
    there = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in MONOSPACE if name in there]


def draw_heatmap(trace: Trace, order: str) -> Figure:
    """The position heatmap, as `figures.heatmap` shows it."""
    grid = slot_grid(trace, order)
    rows, columns = grid.shape
    figure = Figure(figsize=(7.0, min(max(1.7 + 0.16 * rows, 2.4), 9.0)), layout="constrained")
    axes = figure.subplots()
    last = max(len(trace.tokens) - 1, 1)
    image = axes.pcolormesh(grid, cmap=POSITION_MAP, vmin=0, vmax=last, edgecolors="white", linewidth=0.4)
    if columns > 160 or rows > 80:
        image.set_linewidth(0)
        image.set_rasterized(True)
    axes.invert_yaxis()
    ticks = list(range(0, rows, max(1, -(-rows // 16))))
    seen = trace.refreshes["tokens_seen"].tolist()
    axes.set_yticks([at + 0.5 for at in ticks], [f"{seen[at]:,}" for at in ticks])
    axes.set_ylabel("tokens seen at the refresh")
    axes.set_xlabel(COLUMN_TITLES[order])
    axes.set_title(_title(trace), loc="left", fontsize=10, parse_math=False, family=fonts())
    axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=axes, label="position", pad=0.01)
    figure.supxlabel(heatmap_sentence(trace), fontsize=7, x=0.01, ha="left", wrap=True)
    return figure


def draw_overlay(trace: Trace, refresh: int) -> Figure:
    """The text, each token coloured by its score at one refresh; evicted tokens struck through, unread ones pale."""
    pieces = list(_laid_out(trace, refresh))
    lines = max(piece.line for piece in pieces) + 1 if pieces else 1
    width, height = COLUMNS * CHARACTER_INCHES + 0.4, (lines + 4) * LINE_INCHES
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.2 / width, 0.0, 1 - 0.4 / width, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(lines + 4, 0)
    family = fonts()
    axes.text(0, 1, _title(trace), fontsize=10, va="center", parse_math=False, family=fonts())
    axes.text(0, 2.1, states_sentence(trace, refresh), fontsize=7.5, va="center")
    for piece in pieces:
        _draw_piece(axes, piece, family)
    return figure


@dataclass(frozen=True)
class _Piece:
    """A token's text, or part of it, on one line of the overlay."""

    text: str
    line: int
    column: int
    width: int
    state: str
    shade: float  # 0 to 1: how high the score ranks


def _laid_out(trace: Trace, refresh: int) -> Iterator[_Piece]:
    states = token_states(trace, refresh)
    scored = max(int(states["rank"].max()), 1)
    line, column = 0, 0
    for text, state, rank in zip(states["text"], states["state"], states["rank"], strict=True):
        shade = 1 - (rank - 1) / scored if rank else 0.0
        for part in text.replace("\t", "    ").splitlines(keepends=True):
            shown = part.rstrip("\r\n")
            broken = shown != part
            shown = "".join(map(_drawable, shown)) + ("⏎" if broken else "")
            for chunk in _wrapped(shown, COLUMNS - column):
                width = sum(_cells(letter) for letter in chunk)
                if column + width > COLUMNS:
                    line, column = line + 1, 0
                yield _Piece(chunk, line, column, width, state, shade)
                column += width
            if broken:
                line, column = line + 1, 0


def _wrapped(text: str, room: int) -> Iterator[str]:
    """Cut text that is longer than a line; what fits on a line of its own stays whole."""
    while sum(map(_cells, text)) > COLUMNS:
        take = max(1, room // 2)
        yield text[:take]
        text, room = text[take:], COLUMNS
    if text:
        yield text


def _drawable(letter: str) -> str:
    """The letter, or U+FFFD for those that no picture can hold (XML forbids most control characters)."""
    return "\ufffd" if unicodedata.category(letter) in ("Cc", "Cn", "Cs") else letter


def _cells(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _draw_piece(axes: Axes, piece: _Piece, family: list[str]) -> None:
    top = piece.line + 3
    if piece.state == "kept":
        colour = np.array(SCORE_RGB) * piece.shade * 0.8 + (1 - piece.shade * 0.8)
        axes.add_patch(Rectangle((piece.column, top), piece.width, 0.92, color=tuple(colour), linewidth=0))
    ink = {"kept": "#1a1a1a", "evicted": "#8a8a8a", "unseen": "#c4c4c4"}[piece.state]
    style: dict[str, Any] = {"family": family, "fontsize": 9.2, "color": ink, "parse_math": False}
    axes.text(piece.column, top + 0.48, piece.text, va="center", **style)
    if piece.state == "evicted":
        axes.plot([piece.column, piece.column + piece.width], [top + 0.5, top + 0.5], color="#8a8a8a", linewidth=0.8)


def _title(trace: Trace) -> str:
    config = trace.config
    words = [str(config.get("label") or ""), trace.strategy.replace("_", " ")]
    if trace.strategy != "full":
        words.append(f"J = {config.get('cache_size')}, h = {config.get('chunk_size')}")
        if config.get("frozen_size"):
            words.append(f"{config['frozen_size']} frozen")
    return " · ".join([word for word in [*words, str(config.get("model", ""))] if word])
