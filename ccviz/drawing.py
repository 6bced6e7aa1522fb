"""The same pictures on paper: Matplotlib figures from traces, no browser needed.

Knows traces, colours, fonts and styles; writing files is `export`'s work.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ccviz import metrics
from ccviz.colours import BLUE_RED
from ccviz.errors import UserError
from ccviz.figures import (
    COLUMN_TITLES,
    LEAST_KL,
    SHARED_COLOURS,
    STOP_REASONS,
    SURVIVAL,
    lane_styles,
    length_edges,
    overlap_lanes,
    strategies_in,
    strategies_of,
    with_known_reasons,
)
from ccviz.metrics import heatmap_sentence, slot_grid, states_sentence, token_states
from ccviz.trace import Trace

POSITION_MAP = LinearSegmentedColormap.from_list("ccviz-position", BLUE_RED)
SHARED_MAP = LinearSegmentedColormap.from_list("ccviz-shared", SHARED_COLOURS)
SCORE_RGB = (0.93, 0.55, 0.08)  # the overlay's orange; how much of it shows says how high the score ranks
COLUMNS = 92  # characters a line of the overlay
LINE_INCHES, CHARACTER_INCHES = 0.19, 0.077
MONOSPACE = ["DejaVu Sans Mono", "WenQuanYi Zen Hei Mono", "Noto Sans Mono CJK SC", "Noto Emoji", "DejaVu Sans"]
DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.4)),
    "dashdot": (0, (5, 1.5, 1, 1.5)),
    "longdash": (0, (8, 2.5)),
    "longdashdot": (0, (8, 2, 1, 2)),
}
MARKERS = ["o", "s", "D", "^", "v", "P", "X", "*", "<", ">"]


@dataclass(frozen=True)
class Style:
    """How a figure is to look where it is printed or shown.

    Attributes
    ----------
    widths
        Inches wide, for a column and for the whole page.
    rc
        Matplotlib's own settings.
    position_map
        Colours of positions. On paper they grow lighter all the way, so that they survive a grey printer.
    line
        Points wide.
    shape
        Height to width where a figure may choose; None leaves it to its rows.
    sentence
        Whether the sentence that says what is seen stands below.
    """

    widths: Mapping[str, float]
    rc: Mapping[Any, Any]
    position_map: Any = field(default_factory=lambda: POSITION_MAP)
    line: float = 1.6
    shape: float | None = None
    sentence: bool = True
    survival: Sequence[str] = field(default_factory=lambda: tuple(SURVIVAL.values()))


_STYLES = {
    "screen": Style({"column": 7.0, "page": 7.0}, {"font.size": 9}),
    "paper": Style(
        {"column": 3.35, "page": 6.9},
        {
            "font.size": 7.5,
            "axes.titlesize": 8,
            "axes.labelsize": 7.5,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "legend.fontsize": 7,
            "axes.linewidth": 0.6,
            "hatch.linewidth": 0.5,
        },
        position_map="cividis",
        line=1.1,
        sentence=False,
        survival=("#ececec", "#1f3b6b", "#c98a3a"),
    ),
    "slides": Style(
        {"column": 13.33, "page": 13.33},
        {
            "font.size": 18,
            "axes.titlesize": 20,
            "axes.labelsize": 18,
            "xtick.labelsize": 15,
            "ytick.labelsize": 15,
            "legend.fontsize": 16,
            "axes.linewidth": 1.4,
        },
        line=3.2,
        shape=9 / 16,
        sentence=False,
    ),
}
STYLES = tuple(_STYLES)
WIDTHS = ("column", "page")


def style_named(name: str) -> Style:
    """A style by its name.

    Raises
    ------
    UserError
        If there is none.
    """
    if name not in _STYLES:
        raise UserError(f"style must be one of {', '.join(STYLES)}, not {name!r}.")
    return _STYLES[name]


# Fonts that fill in for missing scripts come in one weight; that they do is not worth a line each.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def fonts() -> list[str]:
    """The fonts of `MONOSPACE` that this machine has, so that Matplotlib falls back without a warning a glyph."""
    there = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in MONOSPACE if name in there]


def _canvas(style: Style, width: str, rows_inches: float) -> Figure:
    """A figure of the style's width, and its own or the given height in inches."""
    wide = style.widths[width]
    return Figure(figsize=(wide, rows_inches if style.shape is None else wide * style.shape), layout="constrained")


def _foot(figure: Figure, style: Style, sentence: str) -> None:
    if style.sentence:
        figure.supxlabel(sentence, fontsize=7, x=0.01, ha="left", wrap=True, parse_math=False)


# Grids: what was cached, and when it was lost


def draw_heatmap(traces: Mapping[str, Trace], order: str, style: Style, width: str = "page") -> Figure:
    """The position heatmap of one run, or a panel a run on one scale with rows of one height (the paper's Figure 4)."""
    last = max(max(len(trace.tokens) for trace in traces.values()) - 1, 1)
    grids = {name: slot_grid(trace, order) for name, trace in traces.items()}
    figure, panels = _grid_panels(traces, grids, style, width, COLUMN_TITLES[order], "tokens seen at the refresh")
    for at, (axes, grid) in enumerate(zip(panels, grids.values(), strict=True)):
        image = _rows(axes, grid, at, len(traces) == 1, cmap=style.position_map, vmin=0, vmax=last)
    tall = figure.get_size_inches()[1]
    bar = figure.colorbar(image, ax=panels, label="position", pad=0.01, aspect=25, shrink=min(1.0, 3.0 / tall))
    bar.ax.set_gid("scale")
    if len(traces) == 1:
        _foot(figure, style, heatmap_sentence(next(iter(traces.values()))))
    return figure


def draw_survival(traces: Mapping[str, Trace], style: Style, width: str = "page") -> Figure:
    """What had become of each token at each refresh, a panel a run: a column a position, a row a refresh."""
    grids = {name: metrics.survival_grid(trace).astype(np.float32) for name, trace in traces.items()}
    title = "position in the text"
    figure, panels = _grid_panels(traces, grids, style, width, title, "tokens seen at the refresh")
    for at, (axes, grid) in enumerate(zip(panels, grids.values(), strict=True)):
        _rows(axes, grid, at, cmap=ListedColormap(list(style.survival)), vmin=-0.5, vmax=2.5)
    marks = [Patch(facecolor=colour, label=words) for words, colour in zip(SURVIVAL, style.survival, strict=True)]
    figure.legend(handles=marks, loc="outside upper right", ncols=3, frameon=False)
    if len(traces) == 1:
        _foot(figure, style, metrics.survival_sentence(next(iter(traces.values()))))
    return figure


def _grid_panels(
    traces: Mapping[str, Trace],
    grids: Mapping[str, npt.NDArray[Any]],
    style: Style,
    width: str,
    x_title: str,
    y_title: str,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel a run, two a row where there is room, rows of one height, captions (a), (b), ..."""
    count = len(traces)
    columns = 1 if count == 1 or style.widths[width] < 5 else 2
    most = max(grid.shape[0] for grid in grids.values())
    panel_rows = -(-count // columns)
    row_inches = 0.16 if count == 1 else 0.1
    inches = max(1.7 if count == 1 else 1.25, 0.75 + row_inches * most) * panel_rows + 0.7
    figure = _canvas(style, width, min(max(inches, 2.4), 9.0 if count == 1 else 11.0))
    made = figure.subplots(panel_rows, columns, squeeze=False).ravel()
    for spare in made[count:]:
        spare.remove()
    for at, (axes, (name, trace)) in enumerate(zip(made[:count], traces.items(), strict=True)):
        seen = trace.refreshes["tokens_seen"].tolist()
        axes.set_ylim(most, 0)
        axes.set_xlim(0, max(grid.shape[1] for grid in grids.values()))
        ticks = list(range(0, len(seen), max(1, -(-len(seen) // (16 if count == 1 else 6)))))
        axes.set_yticks([tick + 0.5 for tick in ticks], [f"{seen[tick]:,}" for tick in ticks])
        axes.spines[["top", "right"]].set_visible(False)
        caption = _title(trace) if count == 1 else f"({_letter(at)}) {_short(name)}"
        axes.set_title(caption, loc="left", parse_math=False, family=fonts() if count == 1 else None)
        if at % columns == 0:
            axes.set_ylabel(y_title if count == 1 else "tokens seen")
        if at + columns >= count:
            axes.set_xlabel(x_title)
    return figure, list(made[:count])


def _letter(at: int) -> str:
    return chr(ord("a") + at) if at < 26 else str(at + 1)


def _short(name: str) -> str:
    return name.replace("_", " ")


def _rows(axes: Axes, grid: npt.NDArray[Any], panel: int, gaps: bool = False, **colours: Any) -> Any:
    """Draw a grid row by row, each a group of its own in an SVG ("panel-0-row-3"); returns the last one drawn."""
    rows, columns = grid.shape
    fine = columns > 160 or rows > 80
    edges: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.4} if gaps and not fine else {"linewidth": 0}
    image: Any = None
    for row in range(rows):
        values = np.ma.masked_invalid(grid[row : row + 1])
        image = axes.pcolormesh(np.arange(columns + 1), [row, row + 1], values, **edges, **colours)
        image.set_gid(f"panel-{panel}-row-{row}")
        image.set_rasterized(fine)
    return image


def _line(axes: Axes, x: Any, y: Any, look: Mapping[str, Any], label: str | None = None) -> None:
    """A line with about ten markers, whatever its length."""
    axes.plot(x, y, label=label, markevery=max(1, len(x) // 10), **look)


# Lines and points


def draw_scores(trace: Trace, refresh: int, column: str, style: Style, width: str = "page") -> Figure:
    """Each entry's score or surprise at one refresh over its position; kept, protected and evicted told apart."""
    table = metrics.score_table(trace, refresh)
    figure = _canvas(style, width, 3.6)
    axes = figure.subplots()
    kept, free = table["kept"], table["protected"] == ""
    size = 14 * style.line
    groups: list[tuple[str, Any, dict[str, Any]]] = [
        ("kept", kept & free, {"marker": "o", "color": style.survival[1]}),
        ("kept, protected", kept & ~free, {"marker": "D", "facecolors": "none", "edgecolors": "#666f80"}),
        ("evicted", ~kept, {"marker": "x", "color": style.survival[2]}),
    ]
    for words, mask, look in groups:
        part = table[mask & table[column].notna()]
        if len(part):
            axes.scatter(part["position"], part[column], s=size, label=f"{words} ({len(part)})", **look)
    ranked = table.loc[kept & free, column].dropna()
    if column == "score" and len(ranked) and not kept.all():
        axes.axhline(float(ranked.min()), color="#444444", linestyle="--", linewidth=0.8, label="lowest that was kept")
    axes.set_xlabel("position in the text")
    axes.set_ylabel("score, higher is kept" if column == "score" else "surprise, minus the logit")
    axes.set_title(_title(trace), loc="left", parse_math=False, family=fonts())
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    _open(axes)
    _foot(figure, style, metrics.scores_sentence(trace, refresh, column))
    return figure


def draw_retention(traces: Mapping[str, Trace], by: str, style: Style, width: str = "page") -> Figure:
    """The share of tokens still cached over the tokens seen, a line a run, a panel a group."""
    tables = {name: metrics.retention(trace, by) for name, trace in traces.items() if len(trace.refreshes)}
    groups = list(dict.fromkeys(group for table in tables.values() for group in table["group"]))
    if by == "region":
        groups = [group for group in metrics.REGIONS if group in groups]
    columns = min(3 if style.widths[width] > 5 else 1, len(groups))
    rows = -(-len(groups) // columns)
    figure = _canvas(style, width, 0.9 + 1.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for spare in panels[len(groups) :]:
        spare.remove()
    words = {"frozen": "frozen prefix", "prompt": "prompt", "generated": "answer"}
    looks = _line_looks(strategies_of({name: traces[name] for name in tables}), style)
    for at, (axes, group) in enumerate(zip(panels, groups, strict=False)):
        for name, look in looks.items():
            part = tables[name][tables[name]["group"] == group]
            if len(part):
                _line(axes, part["tokens_seen"], part["share"], look)
        axes.set_title(words.get(group, f"{group} tokens ago"), loc="left")
        axes.set_ylim(-0.03, 1.03)
        axes.tick_params(labelbottom=at + columns >= len(groups))  # the panel below may have been left out
        if at + columns >= len(groups):
            axes.set_xlabel("tokens seen")
        if at % columns == 0:
            axes.set_ylabel("share still kept")
        _open(axes)
    _legend(figure, style, width, looks)
    _foot(figure, style, metrics.retention_sentence(traces, by))
    return figure


def draw_overlap(traces: Mapping[str, Trace], region: str, style: Style, width: str = "page") -> Figure:
    """How much every two caches share at the end (the Jaccard index), and with the first bounded one over time."""
    moment = max(int(trace.refreshes["tokens_seen"].max()) for trace in traces.values())
    matrix = metrics.overlap_matrix(traces, moment, region)
    wide = style.widths[width] > 5
    figure = _canvas(style, width, 3.4 if wide else 5.6)
    left, right = figure.subplots(1, 2) if wide else figure.subplots(2, 1)
    names = [_short(name) for name in matrix.index]
    values = matrix.to_numpy()
    mesh = left.pcolormesh(values, cmap=SHARED_MAP, vmin=0, vmax=1, edgecolors="white", linewidth=1)
    mesh.set_gid("overlap")
    left.invert_yaxis()
    places = np.arange(len(names)) + 0.5
    left.set_xticks(places, names, rotation=35, ha="right")
    left.set_yticks(places, names)
    for row, column in np.ndindex(*values.shape):
        ink = "white" if values[row, column] > 0.55 else "black"
        left.text(column + 0.5, row + 0.5, f"{values[row, column]:.2f}", ha="center", va="center", color=ink)
    left.set_title(f"shared after {moment:,} tokens", loc="left")
    reference, others = overlap_lanes(traces)
    for name, look in _line_looks(strategies_of(traces), style).items():
        if name in others:
            table = metrics.overlap(traces[reference], traces[name], region)
            _line(right, table["tokens_seen"], table["jaccard"], look, _short(name))
    right.set_ylim(-0.03, 1.03)
    right.set_xlabel("tokens seen")
    right.set_ylabel("share in common (Jaccard)")
    right.set_title(f"shared with {_short(reference)}", loc="left", parse_math=False)
    right.legend(frameon=False)
    _open(right)
    _foot(figure, style, metrics.overlap_sentence(matrix, moment))
    return figure


def draw_fidelity(traces: Mapping[str, Trace], style: Style, width: str = "page") -> Figure:
    """The harm to each prediction of a followed answer: divergence a token, and agreement so far, a line a run."""
    figure = _canvas(style, width, 4.4 if style.widths[width] > 5 else 3.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    looks = _line_looks(strategies_of(traces), style)
    for name, look in looks.items():
        table = metrics.fidelity(traces[name])
        _line(above, table["step"] + 1, np.maximum(table["kl"], LEAST_KL), look)
        _line(below, table["step"] + 1, table["agrees"].expanding().mean(), look)
    above.set_yscale("log")
    above.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    above.set_ylabel("divergence (KL), nats")
    below.set_ylabel("agreement so far")
    below.set_ylim(-0.03, 1.05)
    below.set_xlabel("token of the answer")
    _open(above)
    _open(below)
    _legend(figure, style, width, looks)
    _foot(figure, style, metrics.fidelity_sentence(traces))
    return figure


def draw_lengths(table: pd.DataFrame, unit: str, layout: str, style: Style, width: str = "page") -> Figure:
    """How long answers are, a histogram a lane with shared bins, stop reasons kept apart (the paper's Figure 3)."""
    edges, table = length_edges(table, unit, layout), with_known_reasons(table)
    names = list(dict.fromkeys(table["lane"]))
    colours = lane_styles(strategies_in(table))
    looks = _line_looks(strategies_in(table), style)
    single = layout == "overlaid"
    figure = _canvas(style, width, 3.2 if single else 0.8 + 1.15 * len(names))
    if single:
        axes = figure.subplots()
        for name in names:
            counts, _ = np.histogram(table.loc[table["lane"] == name, unit], edges)
            look = {key: value for key, value in looks[name].items() if key in ("color", "linestyle", "linewidth")}
            axes.stairs(counts, edges, label=_short(name), **look)
        axes.set_xlabel(f"length of the answer, {unit}")
        axes.set_ylabel("answers")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)
        _open(axes)
    else:
        panels = figure.subplots(len(names), 1, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, name in zip(panels, names, strict=True):
            _stacked(axes, table[table["lane"] == name], unit, edges, colours[name][0])
            axes.set_title(_short(name), loc="left", parse_math=False)
            axes.set_ylabel("answers")
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
            _open(axes)
        panels[-1].set_xlabel(f"length of the answer, {unit}")
        reasons = [reason for reason in STOP_REASONS if (table["stop_reason"] == reason).any()]
        marks = [
            Patch(facecolor="#c8ccd6", edgecolor="#333333", hatch=_hatch(reason), label=STOP_REASONS[reason][0])
            for reason in reasons
        ]
        figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False)
    _foot(figure, style, metrics.lengths_sentence(table, unit))
    return figure


def _stacked(axes: Axes, table: pd.DataFrame, unit: str, edges: npt.NDArray[Any], colour: str) -> None:
    base = np.zeros(len(edges) - 1)
    for reason in STOP_REASONS:
        counts, _ = np.histogram(table.loc[table["stop_reason"] == reason, unit], edges)
        if counts.any():
            look: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.4, "hatch": _hatch(reason)}
            axes.bar(edges[:-1], counts, np.diff(edges), bottom=base, align="edge", **look)
            base += counts


def _hatch(reason: str) -> str:
    return {"/": "////", "x": "xxxx", ".": "....", "-": "----"}.get(STOP_REASONS[reason][1], "")


def _line_looks(strategies: Mapping[str, str], style: Style) -> dict[str, dict[str, Any]]:
    """Colour, dash and marker of each run's line: two of the three tell them apart without colour."""
    return {
        name: {
            "color": colour,
            "linestyle": DASHES[dash],
            "linewidth": style.line,
            "marker": MARKERS[at % len(MARKERS)],
            "markersize": 2.6 * style.line,
        }
        for at, (name, (colour, dash)) in enumerate(lane_styles(strategies).items())
    }


def _legend(figure: Figure, style: Style, width: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A legend of all lanes in their order, whichever panel they are in."""
    lines = [Line2D([], [], label=_short(name), **look) for name, look in looks.items()]
    columns = min(len(lines), 4 if style.widths[width] > 5 else 2)
    figure.legend(handles=lines, loc="outside upper center", ncols=columns, frameon=False)


def _open(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8dbe2", linewidth=0.4)
    axes.set_axisbelow(True)


# The text


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
