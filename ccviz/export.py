"""Figures and tables to files, on a machine with no browser and no network.

Knows file types; the pictures come from `figures` (interactive) and `drawing` (on paper).
"""

from __future__ import annotations

import html
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import plotly.io

from ccviz import figures
from ccviz.drawing import SCORE_RGB, draw_heatmap, draw_overlay
from ccviz.errors import UserError
from ccviz.metrics import ORDERS, states_sentence, token_states
from ccviz.trace import Trace, write_whole

FIGURE_KINDS = ("heatmap", "overlay")
FIGURE_SUFFIXES = (".html", ".svg", ".png", ".pdf")
MOST_PIXELS = 16_000  # the longer side of a bitmap; viewers refuse much more
TABLES = ("entries", "tokens", "refreshes")
TABLE_SUFFIXES = (".csv", ".parquet", ".json")

# The same bytes for the same trace: no dates, ids from a fixed salt, text as text.
_STYLE: dict[Any, Any] = {"svg.hashsalt": "ccviz", "svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 9}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {"Software": None}}


def figure_bytes(trace: Trace, kind: str, suffix: str, order: str = "position", refresh: int | None = None) -> bytes:
    """One figure as the bytes of a file.

    Parameters
    ----------
    trace
        A run with at least one refresh.
    kind
        "heatmap" or "overlay".
    suffix
        ".html" (self-contained, opens offline), ".svg", ".png" or ".pdf".
    order
        The heatmap's order of slots; see `metrics.slot_columns`.
    refresh
        The refresh the overlay shows; by default the last.

    Raises
    ------
    UserError
        If the kind, suffix, order or refresh is not one there is.
    """
    if kind not in FIGURE_KINDS:
        raise UserError(f"the kind of figure must be one of {', '.join(FIGURE_KINDS)}, not {kind!r}.")
    if suffix.lower() not in FIGURE_SUFFIXES:
        raise UserError(
            f"a figure is written as {', '.join(FIGURE_SUFFIXES)}, not as {suffix or 'a file without suffix'!r}."
        )
    if not len(trace.refreshes):
        raise UserError("This run has no refresh to draw: it read fewer tokens than one chunk holds.")
    if order not in ORDERS:
        raise UserError(f"order must be one of {', '.join(map(repr, ORDERS))}, not {order!r}.")
    if refresh is None:
        refresh = int(trace.refreshes["refresh"].iloc[-1])
    if refresh not in trace.refreshes["refresh"].to_numpy():
        raise UserError(f"This run has refreshes 0 to {len(trace.refreshes) - 1}, and none numbered {refresh}.")
    if suffix.lower() == ".html":
        return (_heatmap_page(trace, order) if kind == "heatmap" else _overlay_page(trace, refresh)).encode()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        figure = draw_heatmap(trace, order) if kind == "heatmap" else draw_overlay(trace, refresh)
        buffer = io.BytesIO()
        suffix = suffix.lower()
        # A script for which this machine has no font is drawn as boxes; a line about each is no help.
        warnings.filterwarnings("ignore", r"Glyph \d+")
        dpi = min(200.0, MOST_PIXELS / max(figure.get_size_inches()))
        figure.savefig(buffer, format=suffix[1:], metadata=_NO_DATE[suffix], dpi=dpi)
    return buffer.getvalue()


def save_figure(
    trace: Trace, path: str | Path, kind: str = "heatmap", order: str = "position", refresh: int | None = None
) -> Path:
    """Write one figure; the file's suffix chooses the type. See `figure_bytes`."""
    target = Path(path)
    write_whole(target, figure_bytes(trace, kind, target.suffix, order, refresh))
    return target


def _heatmap_page(trace: Trace, order: str) -> str:
    figure = figures.heatmap(trace, order)
    figure.update_layout(template="plotly_white")
    page: str = plotly.io.to_html(figure, include_plotlyjs=True, full_html=True, config={"displaylogo": False})
    title = f"<title>{html.escape(trace.strategy)}: what the cache held</title>"
    note = f"<p style='font: 14px sans-serif; margin: 8px 16px'>{html.escape(figure.layout.meta['summary'])}</p>"
    return page.replace("<head>", f"<head>{title}", 1).replace("</body>", f"{note}</body>", 1)


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
