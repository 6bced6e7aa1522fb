"""Figures and tables to files, on a machine with no browser and no network.

Knows file types; the pictures come from `figures` (interactive) and `drawing` (on paper).
"""

from __future__ import annotations

import html
import io
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import plotly.graph_objects as go
import plotly.io

from ccviz import drawing, figures, metrics
from ccviz.drawing import SCORE_RGB, WIDTHS, draw_overlay, style_named
from ccviz.errors import UserError
from ccviz.metrics import ORDERS, states_sentence, token_states
from ccviz.trace import Trace, write_whole

FIGURE_SUFFIXES = (".html", ".svg", ".png", ".pdf", ".csv")
MOST_PIXELS = 16_000  # the longer side of a bitmap; viewers refuse much more
TABLES = ("entries", "tokens", "refreshes")
TABLE_SUFFIXES = (".csv", ".parquet", ".json")

# The same bytes for the same trace: no dates, ids from a fixed salt, text as text.
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ccviz",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # names are data
}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}

Traces = Trace | Mapping[str, Trace]


@dataclass(frozen=True)
class Look:
    """How a figure is to be drawn, where its kind leaves a choice.

    Attributes
    ----------
    order
        A heatmap's order of slots; see `metrics.slot_columns`.
    refresh
        The refresh that overlay, scores and surprise show; None: the last.
    style, width
        ``"screen"``, ``"paper"`` or ``"slides"``, and on paper ``"column"`` or ``"page"``.
    unit, layout
        Of lengths: ``"tokens"`` or ``"characters"``, ``"multiples"`` or ``"overlaid"``.
    region
        Of overlap: ``"all"`` or ``"prompt"``.
    by
        Of retention: ``"region"`` or ``"age"``.
    """

    order: str = "position"
    refresh: int | None = None
    style: str = "screen"
    width: str = "page"
    unit: str = "tokens"
    layout: str = "multiples"
    region: str = "all"
    by: str = "region"

    def __post_init__(self) -> None:
        style_named(self.style)
        for name, known in _KNOWN.items():
            given = getattr(self, name)
            if given not in known:
                raise UserError(f"{name} must be one of {', '.join(map(repr, known))}, not {given!r}.")


_KNOWN: dict[str, tuple[str, ...]] = {
    "width": WIDTHS,
    "order": ORDERS,
    "unit": ("tokens", "characters"),
    "layout": ("multiples", "overlaid"),
    "region": ("all", "prompt"),
    "by": ("region", "age"),
}


@dataclass(frozen=True)
class _Kind:
    """One kind of figure: on a page, on paper, and its numbers."""

    pages: Callable[[Mapping[str, Trace], Look], list[go.Figure]]
    paper: Callable[[Mapping[str, Trace], Look], Any]
    table: Callable[[Mapping[str, Trace], Look], pd.DataFrame]
    one_run: bool = False  # drawn of a single run
    needs_refresh: bool = True


def _by_lane(
    table: Callable[[Trace, Look], pd.DataFrame],
) -> Callable[[Mapping[str, Trace], Look], pd.DataFrame]:
    """A table of several runs, with a column that names them."""

    def joined(traces: Mapping[str, Trace], look: Look) -> pd.DataFrame:
        parts = [table(trace, look) for trace in traces.values()]
        return pd.concat(parts, keys=list(traces), names=["lane", None]).reset_index("lane").reset_index(drop=True)

    return joined


def _refresh_of(trace: Trace, look: Look) -> int:
    """The refresh that a figure shows, checked."""
    known = trace.refreshes["refresh"].tolist()
    refresh = int(known[-1]) if look.refresh is None else look.refresh
    if refresh not in known:
        raise UserError(f"This run has refreshes {min(known)} to {max(known)}, and none numbered {refresh}.")
    return refresh


def _heatmaps(traces: Mapping[str, Trace], look: Look) -> list[go.Figure]:
    last = max(max(len(trace.tokens) for trace in traces.values()) - 1, 1)
    rows = max(len(trace.refreshes) for trace in traces.values())
    height = max(2, min(22, 500 // rows)) if len(traces) > 1 else None
    return [
        _titled(figures.heatmap(trace, look.order, last_position=last, row_height=height, rows=rows), name, traces)
        for name, trace in traces.items()
    ]


def _titled(figure: go.Figure, name: str, traces: Mapping[str, Trace]) -> go.Figure:
    if len(traces) > 1:
        figure.update_layout(title={"text": html.escape(name), "font": {"size": 15}, "y": 0.99, "yanchor": "top"})
    return figure


def _heatmap_table(trace: Trace, look: Look) -> pd.DataFrame:
    placed = metrics.slot_columns(trace, look.order)
    return placed[["refresh", "column", "position", "score", "protected"]]


def _survival_table(trace: Trace, look: Look) -> pd.DataFrame:
    table = metrics.lifetimes(trace)
    return table[["position", "text", "generated", "evicted_at", "tokens_seen_at_loss"]]


def _overlap_table(traces: Mapping[str, Trace], look: Look) -> pd.DataFrame:
    names = list(traces)
    parts = [
        metrics.overlap(traces[a], traces[b], look.region).assign(a=a, b=b)
        for at, a in enumerate(names)
        for b in names[at + 1 :]
    ]
    if not parts:
        raise UserError("An overlap needs at least two runs: give several traces.")
    return pd.concat(parts, ignore_index=True)[["a", "b", "tokens_seen", "both", "only_a", "only_b", "jaccard"]]


def _overlaps(traces: Mapping[str, Trace], look: Look) -> list[go.Figure]:
    _overlap_table(traces, look)  # says what is missing
    return [
        figures.overlap_matrix(traces, region=look.region),
        figures.overlap_curve(traces, region=look.region),
    ]


def _paper_overlap(traces: Mapping[str, Trace], look: Look) -> Any:
    _overlap_table(traces, look)
    return drawing.draw_overlap(traces, look.region, style_named(look.style), look.width)


def _one(traces: Mapping[str, Trace]) -> Trace:
    return next(iter(traces.values()))


def _score_kind(column: str) -> _Kind:
    draw = figures.scores if column == "score" else figures.surprise

    def paper(traces: Mapping[str, Trace], look: Look) -> Any:
        trace = _one(traces)
        draw(trace, _refresh_of(trace, look))  # says what is missing
        return drawing.draw_scores(trace, _refresh_of(trace, look), column, style_named(look.style), look.width)

    def table(traces: Mapping[str, Trace], look: Look) -> pd.DataFrame:
        trace = _one(traces)
        draw(trace, _refresh_of(trace, look))
        return metrics.score_table(trace, _refresh_of(trace, look))

    return _Kind(
        pages=lambda traces, look: [draw(_one(traces), _refresh_of(_one(traces), look))],
        paper=paper,
        table=table,
        one_run=True,
    )


_KINDS: dict[str, _Kind] = {
    "heatmap": _Kind(
        pages=_heatmaps,
        paper=lambda traces, look: drawing.draw_heatmap(traces, look.order, style_named(look.style), look.width),
        table=_by_lane(_heatmap_table),
    ),
    "overlay": _Kind(
        pages=lambda traces, look: [],
        paper=lambda traces, look: draw_overlay(_one(traces), _refresh_of(_one(traces), look)),
        table=lambda traces, look: token_states(_one(traces), _refresh_of(_one(traces), look)),
        one_run=True,
    ),
    "survival": _Kind(
        pages=lambda traces, look: [_titled(figures.survival(trace), name, traces) for name, trace in traces.items()],
        paper=lambda traces, look: drawing.draw_survival(traces, style_named(look.style), look.width),
        table=_by_lane(_survival_table),
    ),
    "scores": _score_kind("score"),
    "surprise": _score_kind("surprise"),
    "retention": _Kind(
        pages=lambda traces, look: [figures.retention(traces, look.by)],
        paper=lambda traces, look: drawing.draw_retention(traces, look.by, style_named(look.style), look.width),
        table=_by_lane(lambda trace, look: metrics.retention(trace, look.by)),
    ),
    "overlap": _Kind(pages=_overlaps, paper=_paper_overlap, table=_overlap_table),
    "fidelity": _Kind(
        pages=lambda traces, look: [figures.fidelity(traces)],
        paper=lambda traces, look: drawing.draw_fidelity(traces, style_named(look.style), look.width),
        table=_by_lane(lambda trace, look: metrics.fidelity(trace)),
        needs_refresh=False,
    ),
    "lengths": _Kind(
        pages=lambda traces, look: [figures.lengths(metrics.lengths(traces.items()), look.unit, look.layout)],
        paper=lambda traces, look: _paper_lengths(metrics.lengths(traces.items()), look),
        table=lambda traces, look: metrics.lengths(traces.items()),
        needs_refresh=False,
    ),
}
FIGURE_KINDS = tuple(_KINDS)


def figure_bytes(
    traces: Traces, kind: str, suffix: str, order: str = "position", refresh: int | None = None, **look: Any
) -> bytes:
    """One figure as the bytes of a file.

    Parameters
    ----------
    traces
        A run, or several by their lanes' names, which become panels or lines of one figure.
    kind
        One of `FIGURE_KINDS`.
    suffix
        ".html" (self-contained, opens offline), ".svg", ".png", ".pdf", or ".csv" for the numbers it shows.
    order, refresh, look
        See `Look`.

    Raises
    ------
    UserError
        If the kind, the suffix or a part of the look is not one there is, or a run lacks what the figure shows.
    """
    if kind not in _KINDS:
        raise UserError(f"the kind of figure must be one of {', '.join(FIGURE_KINDS)}, not {kind!r}.")
    suffix = _checked_suffix(suffix)
    chosen = Look(order, refresh, **look)
    named = {traces.strategy: traces} if isinstance(traces, Trace) else dict(traces)
    drawn = _KINDS[kind]
    if not named:
        raise UserError("There is no run to draw: give at least one.")
    if drawn.one_run and len(named) > 1:
        raise UserError(f"The figure {kind} shows one run, and {len(named)} were given: choose one.")
    if drawn.needs_refresh and not all(len(trace.refreshes) for trace in named.values()):
        raise UserError("This run has no refresh to draw: it read fewer tokens than one chunk holds.")
    if suffix == ".csv":
        return drawn.table(named, chosen).to_csv(index=False).encode()
    if suffix == ".html":
        if kind == "overlay":
            return _overlay_page(_one(named), _refresh_of(_one(named), chosen)).encode()
        return page_of(f"{', '.join(named)}: {kind}", drawn.pages(named, chosen)).encode()
    with drawing_in(chosen):
        return _saved(drawn.paper(named, chosen), suffix)


def lengths_bytes(
    table: pd.DataFrame, suffix: str, unit: str = "tokens", layout: str = "multiples", **look: Any
) -> bytes:
    """The histograms of lengths of many answers; ``table`` as in `figures.lengths`, the rest as in `figure_bytes`."""
    suffix = _checked_suffix(suffix)
    chosen = Look(unit=unit, layout=layout, **look)
    if suffix == ".csv":
        figures.length_edges(table, unit, layout)
        return table[["lane", "tokens", "characters", "stop_reason"]].to_csv(index=False).encode()
    if suffix == ".html":
        return page_of("lengths", [figures.lengths(table, unit, layout)]).encode()
    with drawing_in(chosen):
        return _saved(_paper_lengths(table, chosen), suffix)


LENGTH_COLUMNS = {"lane": str, "tokens": int, "characters": int, "stop_reason": str}


def read_lengths(path: str | Path) -> pd.DataFrame:
    """The lengths in a file with a JSON object a line, such as a prompt set's ``results.jsonl``, for `lengths_bytes`.

    Returns
    -------
    DataFrame
        lane, tokens, characters, stop_reason; a row an answer. Lines with a problem are left out, a later line on the
        same item and lane replaces an earlier one, and a last line that a crash has cut off is passed over.

    Raises
    ------
    UserError
        If the file cannot be read, or a line lacks one of these or has another type there.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    rows: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) > 1 and not line.endswith(b"\n"):
                break
            row = None
        if isinstance(row, dict) and row.get("problem"):
            continue
        if not _is_length(row):
            columns = ", ".join(LENGTH_COLUMNS)
            raise UserError(f"line {number} of {path} is not a result: it must be a JSON object with {columns}.")
        rows[(str(row["item"]), row["lane"]) if "item" in row else number] = row
    extra = ["strategy"] if rows and all(isinstance(row.get("strategy"), str) for row in rows.values()) else []
    return pd.DataFrame(rows.values(), columns=[*LENGTH_COLUMNS, *extra])


def _is_length(row: object) -> bool:
    if not isinstance(row, dict) or not all(type(row.get(name)) is kind for name, kind in LENGTH_COLUMNS.items()):
        return False
    return bool(row["tokens"] >= 0 and row["characters"] >= 0)


def _paper_lengths(table: pd.DataFrame, look: Look) -> Any:
    return drawing.draw_lengths(table, look.unit, look.layout, style_named(look.style), look.width)


def _checked_suffix(suffix: str) -> str:
    if suffix.lower() not in FIGURE_SUFFIXES:
        raise UserError(
            f"a figure is written as {', '.join(FIGURE_SUFFIXES)}, not as {suffix or 'a file without suffix'!r}."
        )
    return suffix.lower()


@contextmanager
def drawing_in(look: Look) -> Any:
    """Matplotlib set up for a style, and quiet about fonts that are not there."""
    settings: dict[Any, Any] = {**_STYLE, **dict(style_named(look.style).rc)}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A script for which this machine has no font is drawn as boxes; a line about each is no help.
        warnings.filterwarnings("ignore", r"Glyph \d+")
        yield


def _saved(figure: Any, suffix: str) -> bytes:
    buffer = io.BytesIO()
    dpi = min(200.0, MOST_PIXELS / max(figure.get_size_inches()))
    figure.savefig(buffer, format=suffix[1:], metadata=_NO_DATE[suffix], dpi=dpi)
    return buffer.getvalue()


def save_figure(
    traces: Traces,
    path: str | Path,
    kind: str = "heatmap",
    order: str = "position",
    refresh: int | None = None,
    **look: Any,
) -> Path:
    """Write one figure; the file's suffix chooses the type. See `figure_bytes`."""
    target = Path(path)
    write_whole(target, figure_bytes(traces, kind, target.suffix, order, refresh, **look))
    return target


def page_of(title: str, shown: list[go.Figure]) -> str:
    """Plotly figures one below the other, with their sentences, on a page that needs nothing else."""
    parts = []
    for at, figure in enumerate(shown):
        figure.update_layout(template="plotly_white")
        drawn = plotly.io.to_html(figure, include_plotlyjs=at == 0, full_html=False, config=_PLOTLY, auto_play=False)
        parts.append(drawn)
        parts.append(
            f"<p style='font: 14px sans-serif; margin: 8px 16px'>{html.escape(figure.layout.meta['summary'])}</p>"
        )
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    title = html.escape(title)
    body = "".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}<title>{title}</title></head><body>{body}</body></html>"


_PLOTLY = {"displaylogo": False, "responsive": True}


_OVERLAY_STYLE = """
body { font: 15px/1.75 ui-monospace, Menlo, Consolas, monospace; margin: 24px auto; max-width: 60rem; padding: 0 16px;
  color: #1a1a1a; background: #fff; }
p { font: 14px/1.5 system-ui, sans-serif; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; }
.evicted { color: #767676; text-decoration: line-through; }
.unseen { color: #b8b8b8; }
"""


def _overlay_page(trace: Trace, refresh: int) -> str:
    states = token_states(trace, refresh)
    scored = max(int(states["rank"].max()), 1)
    red, green, blue = (round(255 * part) for part in SCORE_RGB)
    spans = []
    for row in states.to_dict("records"):
        alpha = 0.8 * (1 - (row["rank"] - 1) / scored) if row["rank"] and row["state"] == "kept" else 0
        colour = f" style='background: rgb({red} {green} {blue} / {alpha:.2f})'" if alpha else ""
        score = "" if pd.isna(row["score"]) else f", score {row['score']:.4g}"
        title = html.escape(f"position {row['position']}, {row['state']}{score}", quote=True)
        shown = html.escape(row["text"]).replace("\n", "⏎\n")
        spans.append(f"<span class='{row['state']}' title='{title}'{colour}>{shown}</span>")
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    title = f"{html.escape(trace.strategy)}: the text after refresh {refresh}"
    sentence = html.escape(states_sentence(trace, refresh))
    return (
        f"<!doctype html><html lang='en'><head>{head}<title>{title}</title><style>{_OVERLAY_STYLE}</style></head>"
        f"<body><p>{sentence} The stronger the colour, the higher the score ranks.</p>"
        f"<pre>{''.join(spans)}</pre></body></html>"
    )


def table_bytes(trace: Trace, suffix: str, table: str = "entries") -> bytes:
    """One table as CSV or Parquet, or the whole trace as JSON.

    Raises
    ------
    UserError
        If the suffix or the table is not one there is.
    """
    if table not in TABLES:
        raise UserError(f"the table must be one of {', '.join(TABLES)}, not {table!r}.")
    frame: pd.DataFrame = trace.all_entries() if table == "entries" else getattr(trace, table)
    writers: dict[str, Callable[[], bytes]] = {
        ".csv": lambda: frame.to_csv(index=False).encode(),
        ".parquet": lambda: bytes(frame.to_parquet(index=False)),
        ".json": lambda: _json(trace),
    }
    if suffix.lower() not in writers:
        raise UserError(
            f"a table is written as {', '.join(TABLE_SUFFIXES)}, not as {suffix or 'a file without suffix'!r}."
        )
    return writers[suffix.lower()]()


def save_table(trace: Trace, path: str | Path, table: str = "entries") -> Path:
    """Write a table; the file's suffix chooses the type. See `table_bytes`."""
    target = Path(path)
    write_whole(target, table_bytes(trace, target.suffix, table))
    return target


def _json(trace: Trace) -> bytes:
    frames = {"entries": trace.all_entries(), "tokens": trace.tokens, "refreshes": trace.refreshes}
    tables = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in frames.items()
    }
    return json.dumps({"config": trace.config, **tables}, ensure_ascii=False).encode()
