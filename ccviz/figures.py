"""Interactive figures from traces, with Plotly.

Knows traces and colours; knows nothing of pages and files. A position has one colour everywhere: blue for the start
of the text, red for its end, as in the paper's Figure 4.
"""

from __future__ import annotations

import html

import numpy as np
import plotly.graph_objects as go

from ccviz.metrics import heatmap_sentence, slot_columns, slot_grid
from ccviz.trace import Trace

# Blue to red through light grey, readable on white and on black.
POSITION_COLOURS = ["#3b4cc0", "#6788ee", "#9abbff", "#c9d7f0", "#edd1c2", "#f7a889", "#e26952", "#b40426"]
TEXT_ON_HOVER_CELLS = 10_000  # above, a string a cell would weigh more than the picture
COLUMN_TITLES = {
    "rank": "slot, best score first",
    "position": "slot, oldest token first",
    "in place": "slot, each token in a column of its own while it lives",
}


def heatmap(
    trace: Trace, order: str = "position", highlight: int | None = None, last_position: int | None = None
) -> go.Figure:
    """What the cache held after each refresh: a row a refresh, a column a slot, coloured by position.

    Parameters
    ----------
    trace
        A finished or partial run.
    order
        ``"rank"``, ``"position"`` or ``"in place"``; see `metrics.slot_columns`.
    highlight
        A refresh to frame.
    last_position
        The position that is fully red; by default the run's last token. Give several figures one value to compare.

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    UserError
        If the order is unknown.
    """
    grid = slot_grid(trace, order)
    rows, columns = grid.shape
    top = max(len(trace.tokens) - 1, 1) if last_position is None else last_position
    figure = go.Figure(
        go.Heatmap(
            z=grid,
            zmin=0,
            zmax=top,
            colorscale=POSITION_COLOURS,
            customdata=_hover(trace, order, grid.shape),
            hovertemplate=HOVER_TEXT if grid.size <= TEXT_ON_HOVER_CELLS else HOVER_PLAIN,
            hoverongaps=False,
            xgap=1 if columns <= 40 else 0.4 if columns <= 160 else 0,
            ygap=1 if rows <= 80 else 0,
            colorbar={**COLOUR_BAR, "tickvals": [0, top], "ticktext": ["position 0", f"{top:,}"]},
        )
    )
    seen = trace.refreshes["tokens_seen"].tolist()
    ticks = list(range(0, rows, max(1, -(-rows // 16))))
    figure.update_yaxes(
        title="tokens seen at the refresh",
        autorange="reversed",
        tickvals=ticks,
        ticktext=[f"{seen[at]:,}" for at in ticks],
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title=COLUMN_TITLES[order], showgrid=False, zeroline=False, range=[-0.5, columns - 0.5])
    figure.update_layout(
        height=heatmap_height(rows),
        margin={"l": 64, "r": 16, "t": 40, "b": 44},
        meta={"summary": heatmap_sentence(trace)},
        uirevision=order,
    )
    _mark_frozen(figure, trace, columns)
    if highlight is not None and highlight in trace.refreshes["refresh"].to_numpy():
        row = int(np.flatnonzero(trace.refreshes["refresh"].to_numpy() == highlight)[0])
        box = {"x0": -0.5, "x1": columns - 0.5, "y0": row - 0.5, "y1": row + 0.5}
        figure.add_shape(type="rect", **box, line={"color": HIGHLIGHT, "width": 2.5})
    return figure


COLOUR_BAR = {
    "orientation": "h",
    "thickness": 8,
    "len": 0.4,
    "x": 1,
    "xanchor": "right",
    "y": 1,
    "yanchor": "bottom",
    "outlinewidth": 0,
    "tickangle": 0,
    "ypad": 2,
}
HIGHLIGHT = "#0a9396"
FROZEN = "#7b8496"
HOVER_TEXT = "position %{z}%{customdata}<extra></extra>"
HOVER_PLAIN = "position %{z}, slot %{x}<extra></extra>"


def heatmap_height(rows: int) -> int:
    """Pixels: tall enough to tell rows apart, never taller than a screen."""
    return int(min(max(120 + 22 * rows, 250), 620))


def _hover(trace: Trace, order: str, shape: tuple[int, int]) -> np.ndarray | None:
    """For each cell the token's text, score and protection, as one line; None for pictures too large for that."""
    if shape[0] * shape[1] > TEXT_ON_HOVER_CELLS:
        return None
    placed = slot_columns(trace, order)
    texts = trace.tokens.set_index("position")["text"]
    row_of = {refresh: row for row, refresh in enumerate(trace.refreshes["refresh"].tolist())}
    cells = np.full(shape, "", dtype=object)
    rows = zip(
        placed["refresh"], placed["column"], placed["position"], placed["score"], placed["protected"], strict=True
    )
    for refresh, column, position, score, protected in rows:
        text = html.escape(repr(texts.get(position, ""))[1:-1], quote=False)
        line = f" “{text}”" if text else ""
        if not np.isnan(score):
            line += f"<br>score {score:.4g}"
        cells[row_of[refresh], column] = line + (f"<br>{protected}" if protected else "")
    return cells


def _mark_frozen(figure: go.Figure, trace: Trace, columns: int) -> None:
    frozen = min(int(trace.number("frozen_size")), columns) if trace.strategy != "full" else 0
    if frozen > 0:
        figure.add_shape(
            type="line",
            xref="x",
            yref="paper",
            x0=-0.5,
            x1=frozen - 0.5,
            y0=1.015,
            y1=1.015,
            line={"width": 3, "color": FROZEN},
        )
        figure.add_annotation(
            x=-0.5, y=1.02, xref="x", yref="paper", text="frozen", showarrow=False, xanchor="left", yanchor="bottom"
        )
