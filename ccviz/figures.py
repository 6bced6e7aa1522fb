"""Interactive figures from traces, with Plotly.

Knows traces and colours; knows nothing of pages and files. A position has one colour everywhere: blue for the start
of the text, red for its end, as in the paper's Figure 4. A strategy has one colour and one dash everywhere.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ccviz import metrics
from ccviz.colours import BLUE_RED
from ccviz.errors import UserError
from ccviz.metrics import heatmap_sentence, slot_columns, slot_grid
from ccviz.trace import Trace

TEXT_ON_HOVER_CELLS = 10_000  # above, a string a cell would weigh more than the picture
MOST_GAPS = 20_000  # cells; a browser draws cells with gaps one by one, six times slower than without
MOST_COLUMNS = 1_024  # drawn; more slots than that are pooled, which no screen could tell apart
COLUMN_TITLES = {
    "rank": "slot, best score first",
    "position": "slot, oldest token first",
    "in place": "slot, each token in a column of its own while it lives",
}
SURVIVAL = {"not read yet": "#cfd4de", "kept": "#2f6db5", "lost": "#d9822b"}
STRATEGY_COLOURS = {  # Okabe and Ito's, told apart by the colour-blind, and dashes for those who see no colour at all
    "full": ("#6b7280", "solid"),
    "sliding_window": ("#e69f00", "dash"),
    "importance": ("#56b4e9", "dot"),
    "heavy_hitter": ("#009e73", "dashdot"),
    "counter_causal": ("#d55e00", "solid"),
    "counter_causal_fast": ("#cc79a7", "longdash"),
}
MORE_COLOURS = ["#0072b2", "#8c6d31", "#7f3c8d", "#3d8b8b", "#a8323e", "#5b7f1c", "#4b4b9d"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]


def lane_styles(strategies: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each lane, given its strategy: the same everywhere; a second lane has another dash."""
    others = [name for name in dict.fromkeys(strategies.values()) if name not in STRATEGY_COLOURS]
    styles: dict[str, tuple[str, str]] = {}
    seen: list[str] = []
    for lane, strategy in strategies.items():
        if strategy in STRATEGY_COLOURS:
            colour, dash = STRATEGY_COLOURS[strategy]
        else:
            at = others.index(strategy)
            colour, dash = MORE_COLOURS[at % len(MORE_COLOURS)], DASHES[at % len(DASHES)]
        styles[lane] = (colour, DASHES[(DASHES.index(dash) + seen.count(strategy)) % len(DASHES)])
        seen.append(strategy)
    return styles


def strategies_of(traces: Mapping[str, Trace]) -> dict[str, str]:
    """The strategy of each lane."""
    return {name: trace.strategy for name, trace in traces.items()}


def strategies_in(table: pd.DataFrame) -> dict[str, str]:
    """The strategy of each lane in a table of lengths: its column, where it has one, else the lane's first word."""
    if "strategy" not in table:
        return {name: name.split(" ")[0] for name in dict.fromkeys(table["lane"])}
    return dict(zip(table["lane"], table["strategy"], strict=True))


def heatmap(
    trace: Trace,
    order: str = "position",
    highlight: int | None = None,
    last_position: int | None = None,
    row_height: int | None = None,
    rows: int | None = None,
    most_columns: int = MOST_COLUMNS,
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
    row_height, rows
        Pixels a row, and for how many rows to leave room: give several figures the same to compare. By default the
        figure chooses its height.
    most_columns
        Of more slots than this, every k-th is drawn, the middle one of k neighbours: no screen could show them all.

    Returns
    -------
    plotly.graph_objects.Figure

    Raises
    ------
    UserError
        If the order is unknown.
    """
    grid = slot_grid(trace, order)
    count, slots = grid.shape
    step = -(-slots // most_columns)
    shown = grid[:, step // 2 :: step] if step > 1 else grid
    top = max(len(trace.tokens) - 1, 1) if last_position is None else last_position
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            zmin=0,
            zmax=top,
            colorscale=BLUE_RED,
            x0=step // 2,
            dx=step,
            customdata=_hover(trace, order, grid.shape) if step == 1 else None,
            hovertemplate=HOVER_TEXT
            if grid.size <= TEXT_ON_HOVER_CELLS
            else HOVER_PLAIN
            if step == 1
            else HOVER_POOLED,
            hoverongaps=False,
            xgap=1 if slots <= 40 else 0.4 if slots <= 160 else 0,
            ygap=1 if count <= 80 and shown.size <= MOST_GAPS else 0,
            colorbar={**COLOUR_BAR, "tickvals": [0, top], "ticktext": ["position 0", f"{top:,}"]},
        )
    )
    seen = trace.refreshes["tokens_seen"].tolist()
    ticks = list(range(0, count, max(1, -(-count // 16))))
    reserved = max(rows or count, count)
    figure.update_yaxes(
        title="tokens seen at the refresh",
        range=[reserved - 0.5, -0.5],
        tickvals=ticks,
        ticktext=[f"{seen[at]:,}" for at in ticks],
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title=COLUMN_TITLES[order], showgrid=False, zeroline=False, range=[-0.5, slots - 0.5])
    margin = {"l": 64, "r": 16, "t": 40, "b": 44}
    figure.update_layout(
        height=heatmap_height(count) if row_height is None else margin["t"] + margin["b"] + row_height * reserved,
        margin=margin,
        meta={"summary": heatmap_sentence(trace)},
        uirevision=order,
    )
    _mark_frozen(figure, trace, slots)
    if highlight is not None and highlight in trace.refreshes["refresh"].to_numpy():
        row = int(np.flatnonzero(trace.refreshes["refresh"].to_numpy() == highlight)[0])
        box = {"x0": -0.5, "x1": slots - 0.5, "y0": row - 0.5, "y1": row + 0.5}
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
HOVER_POOLED = "position %{z}, near slot %{x}<extra></extra>"


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


# When tokens were lost


def survival(trace: Trace, last: int | None = None, row_height: int | None = None) -> go.Figure:
    """What had become of each token at each refresh: a column a position, a row a refresh.

    Parameters
    ----------
    last
        The position at which the axis ends; by default the run's last token. Give several figures one value.
    row_height
        Pixels a row; by default the figure chooses its height.
    """
    grid = metrics.survival_grid(trace)
    rows, width = grid.shape
    step = -(-max(width, 1) // MOST_COLUMNS)
    colours = list(SURVIVAL.values())
    steps = [[(at + end) / 3, colour] for at, colour in enumerate(colours) for end in (0, 1)]
    figure = go.Figure(
        go.Heatmap(
            z=grid[:, step // 2 :: step],
            zmin=-0.5,
            zmax=2.5,
            x0=step // 2,
            dx=step,
            y=np.arange(rows),
            colorscale=steps,
            showscale=False,
            customdata=_survival_hover(trace, grid) if grid.size <= TEXT_ON_HOVER_CELLS else None,
            hovertemplate=SURVIVAL_TEXT if grid.size <= TEXT_ON_HOVER_CELLS else SURVIVAL_PLAIN,
        )
    )
    for words, colour in SURVIVAL.items():  # a legend: heatmaps have none of their own
        marker = {"color": colour, "symbol": "square", "size": 11}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=words)
    seen = trace.refreshes["tokens_seen"].tolist()
    ticks = list(range(0, rows, max(1, -(-rows // 16))))
    figure.update_yaxes(
        title="tokens seen at the refresh",
        range=[rows - 0.5, -0.5],
        tickvals=ticks,
        ticktext=[f"{seen[at]:,}" for at in ticks],
        showgrid=False,
        zeroline=False,
    )
    end = (width - 1 if last is None else last) + 0.5
    figure.update_xaxes(title="position in the text", range=[-0.5, end], showgrid=False, zeroline=False)
    height = heatmap_height(rows) if row_height is None else 104 + row_height * rows
    return _finish(figure, metrics.survival_sentence(trace), height)


SURVIVAL_TEXT = "position %{x}%{customdata}<extra></extra>"
SURVIVAL_PLAIN = "position %{x}, refresh %{y}: %{z}<br>0 not read yet, 1 kept, 2 lost<extra></extra>"


def _survival_hover(trace: Trace, grid: npt.NDArray[np.uint8]) -> npt.NDArray[np.object_]:
    """For each cell the token's text, its state and the tokens seen, as one line."""
    texts = [html.escape(repr(text)[1:-1], quote=False) for text in trace.tokens["text"]]
    states = list(SURVIVAL)
    seen = trace.refreshes["tokens_seen"].tolist()
    cells = np.empty(grid.shape, dtype=object)
    for (row, position), state in np.ndenumerate(grid):
        cells[row, position] = f" “{texts[position]}”<br>{states[state]} when {seen[row]:,} had been seen"
    return cells


def retention(traces: Mapping[str, Trace], by: str = "region") -> go.Figure:
    """The share of tokens still cached over the tokens seen, a line a lane, a panel a group.

    Parameters
    ----------
    by
        ``"region"`` or ``"age"``; see `metrics.retention`.
    """
    tables = {name: metrics.retention(trace, by) for name, trace in traces.items() if len(trace.refreshes)}
    groups = list(dict.fromkeys(group for table in tables.values() for group in table["group"]))
    if by == "region":
        groups = [group for group in metrics.REGIONS if group in groups]
    else:
        groups.sort(key=lambda group: int(group.split("-")[0]))
    titles = {"frozen": "frozen prefix", "prompt": "prompt", "generated": "answer"}
    words = [titles.get(group, f"{group} tokens ago") for group in groups]
    columns = min(3, max(len(groups), 1))
    rows = max(1, -(-len(groups) // columns))
    figure = make_subplots(
        rows, columns, subplot_titles=words, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.3 / rows
    )
    most = max((int(table["tokens_seen"].max()) for table in tables.values()), default=1)
    for name, (colour, dash) in lane_styles(strategies_of({name: traces[name] for name in tables})).items():
        first = True  # of its lines, which stands for all in the legend
        for at, group in enumerate(groups):
            part = tables[name][tables[name]["group"] == group]
            if not len(part):
                continue
            figure.add_scatter(
                x=part["tokens_seen"],
                y=part["share"],
                name=html.escape(name),
                legendgroup=html.escape(name),
                showlegend=first,
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 4},
                hovertemplate=f"{html.escape(name)}<br>%{{x}} tokens seen, %{{y:.0%}} kept<extra></extra>",
                row=at // columns + 1,
                col=at % columns + 1,
            )
            first = False
    figure.update_yaxes(range=[-0.03, 1.03], tickformat=".0%", **_GRID)
    figure.update_xaxes(title="tokens seen", range=[0, 1.03 * most], **_GRID)
    figure.update_yaxes(title="share still kept", col=1)
    return _finish(figure, metrics.retention_sentence(traces, by), 110 + 240 * rows, True)


# Scores


def scores(trace: Trace, refresh: int | None = None) -> go.Figure:
    """Each entry's score at one refresh (by default the last) over its position, kept and evicted told apart."""
    return _score_figure(trace, refresh, "score", "score, higher is kept")


def surprise(trace: Trace, refresh: int | None = None) -> go.Figure:
    """Each entry's counter-causal surprise at one refresh, whatever the strategy: which surprising tokens it evicted.

    Raises
    ------
    UserError
        If the run did not record it.
    """
    if "surprise" not in trace.entries:
        raise UserError(f"The run of {trace.strategy} did not record surprise: run it with observe.")
    return _score_figure(trace, refresh, "surprise", "surprise, minus the logit")


def _score_figure(trace: Trace, refresh: int | None, column: str, title: str) -> go.Figure:
    shown = _chosen(trace, refresh)
    table = metrics.score_table(trace, shown)
    figure = go.Figure()
    groups = {
        "kept": (table["kept"] & (table["protected"] == ""), "circle", SURVIVAL["kept"]),
        "kept, protected": (table["kept"] & (table["protected"] != ""), "diamond-open", "#7b8496"),
        "evicted": (~table["kept"], "x", SURVIVAL["lost"]),
    }
    for words, (mask, symbol, colour) in groups.items():
        part = table[mask & table[column].notna()]
        if len(part):
            figure.add_scatter(
                x=part["position"],
                y=part[column],
                mode="markers",
                name=f"{words} ({len(part)})",
                marker={"symbol": symbol, "color": colour, "size": 7},
                customdata=[html.escape(repr(text)[1:-1]) for text in part["text"]],
                hovertemplate="position %{x} “%{customdata}”, %{y:.4g}<extra></extra>",
            )
    ranked = table.loc[table["kept"] & (table["protected"] == ""), column].dropna()
    if column == "score" and len(ranked) and not table["kept"].all():
        line = {"color": HIGHLIGHT, "dash": "dash", "width": 1.5}
        figure.add_hline(y=float(ranked.min()), line=line, annotation_text="lowest that was kept")
    figure.update_xaxes(title="position in the text", **_GRID)
    figure.update_yaxes(title=title, **_GRID)
    return _finish(figure, metrics.scores_sentence(trace, shown, column), 400)


def _chosen(trace: Trace, refresh: int | None) -> int:
    if refresh is not None:
        return refresh
    if not len(trace.refreshes):
        raise UserError(metrics.NO_REFRESH)
    return int(trace.refreshes["refresh"].iloc[-1])


# Several runs


def overlap_matrix(traces: Mapping[str, Trace], tokens_seen: int | None = None, region: str = "all") -> go.Figure:
    """How much every two caches share at a moment (by default the end): the Jaccard index, 0 to 1."""
    moment = _last_moment(traces) if tokens_seen is None else tokens_seen
    matrix = metrics.overlap_matrix(traces, moment, region)
    values = matrix.to_numpy()
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=[html.escape(name) for name in matrix.columns],
            y=[html.escape(name) for name in matrix.index],
            zmin=0,
            zmax=1,
            colorscale=SHARED_COLOURS,
            text=[[f"{value:.2f}" for value in row] for row in values],
            texttemplate="%{text}",
            hovertemplate="%{y} and %{x}: %{z:.3f}<extra></extra>",
            colorbar={"title": "shared", "thickness": 10, "outlinewidth": 0},
            xgap=2,
            ygap=2,
        )
    )
    figure.update_yaxes(title="strategy", autorange="reversed", showgrid=False, automargin=True)
    figure.update_xaxes(title="strategy", tickangle=-35, showgrid=False, automargin=True)
    return _finish(figure, metrics.overlap_sentence(matrix, moment), 180 + 40 * len(matrix))


SHARED_COLOURS = ["#f3f5fa", "#b9cdea", "#6f9bd3", "#2f6db5", "#173f77"]


def overlap_curve(traces: Mapping[str, Trace], reference: str | None = None, region: str = "all") -> go.Figure:
    """How much each cache shares with one of them over time: the Jaccard index over the tokens seen.

    Parameters
    ----------
    reference
        A lane's name; by default the first that is bounded. What a bounded cache shares with the full one says no
        more than its size, so the full one is drawn only where it is the reference or all there is.

    Raises
    ------
    UserError
        If there is no such lane.
    """
    chosen, others = overlap_lanes(traces, reference)
    figure = go.Figure()
    for name, (colour, dash) in lane_styles(strategies_of(traces)).items():
        if name not in others:
            continue
        table = metrics.overlap(traces[chosen], traces[name], region)
        figure.add_scatter(
            x=table["tokens_seen"],
            y=table["jaccard"],
            name=html.escape(name),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 5},
            hovertemplate=f"{html.escape(name)}<br>%{{x}} tokens seen, shared %{{y:.2f}}<extra></extra>",
        )
    figure.update_yaxes(title=f"shared with {html.escape(chosen)}", range=[-0.03, 1.03], **_GRID)
    figure.update_xaxes(title="tokens seen", **_GRID)
    moment = _last_moment(traces)
    row = metrics.overlap_matrix(traces, moment, region).loc[chosen, others]
    ends = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
    return _finish(figure, f"Shared with {chosen} at the end: {ends or 'nothing to compare with'}.", 420)


def overlap_lanes(traces: Mapping[str, Trace], reference: str | None = None) -> tuple[str, list[str]]:
    """The lane that `overlap_curve` compares with, and those that it compares.

    Raises
    ------
    UserError
        If there is no lane, or none of that name.
    """
    if not traces or (reference is not None and reference not in traces):
        raise UserError(f"the reference must be one of {', '.join(traces) or 'the lanes'}, not {reference!r}.")
    bounded = [name for name, trace in traces.items() if trace.strategy != "full"]
    chosen = reference or (bounded or list(traces))[0]
    return chosen, [name for name in bounded if name != chosen] or [name for name in traces if name != chosen]


def _last_moment(traces: Mapping[str, Trace]) -> int:
    return max(
        (int(trace.refreshes["tokens_seen"].max()) for trace in traces.values() if len(trace.refreshes)), default=0
    )


def fidelity(traces: Mapping[str, Trace]) -> go.Figure:
    """The harm to each prediction of a followed answer: divergence a token, and agreement so far, a line a lane.

    Raises
    ------
    UserError
        If a run did not follow another's answer.
    """
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.62, 0.38])
    for name, (colour, dash) in lane_styles(strategies_of(traces)).items():
        table = metrics.fidelity(traces[name])
        line = {"color": colour, "dash": dash, "width": 1.8}
        words = [html.escape(repr(text)[1:-1]) for text in table["text"]]
        hover = f"{html.escape(name)}<br>token %{{x}} “%{{customdata}}”: "
        shared = {
            "x": table["step"] + 1,
            "name": html.escape(name),
            "legendgroup": html.escape(name),
            "mode": "lines",
            "line": line,
        }
        figure.add_scatter(
            **shared,
            y=np.maximum(table["kl"], LEAST_KL),
            customdata=words,
            hovertemplate=hover + "%{y:.3g} nats<extra></extra>",
            row=1,
            col=1,
        )
        figure.add_scatter(
            **shared,
            y=table["agrees"].expanding().mean(),
            customdata=words,
            hovertemplate=hover + "%{y:.0%} agree so far<extra></extra>",
            showlegend=False,
            row=2,
            col=1,
        )
    figure.update_yaxes(title=f"divergence (KL), nats<br>{LEAST_KL:g} and below", type="log", row=1, col=1, **_GRID)
    figure.update_yaxes(title="agreement so far", range=[-0.03, 1.05], tickformat=".0%", row=2, col=1, **_GRID)
    figure.update_xaxes(**_GRID)
    figure.update_xaxes(title="token of the answer", row=2, col=1)
    return _finish(figure, metrics.fidelity_sentence(traces), 520)


LEAST_KL = 1e-4  # nats; smaller divergences are drawn here, since a logarithm has no place for none


def lengths(table: pd.DataFrame, unit: str = "tokens", layout: str = "multiples") -> go.Figure:
    """How long answers are, a histogram a lane with shared bins, stop reasons kept apart (the paper's Figure 3).

    Parameters
    ----------
    table
        A row an answer: lane, tokens, characters, stop_reason; from `metrics.lengths` or a prompt set's results.
    unit
        ``"tokens"`` or ``"characters"``.
    layout
        ``"multiples"``: one below the other. ``"overlaid"``: outlines in one picture.

    Raises
    ------
    UserError
        If unit or layout is unknown, or there is no answer.
    """
    edges, table = length_edges(table, unit, layout), with_known_reasons(table)
    names = list(dict.fromkeys(table["lane"]))
    styles = lane_styles(strategies_in(table))
    if layout == "overlaid":
        figure = go.Figure()
        for name in names:
            counts, _ = np.histogram(table.loc[table["lane"] == name, unit], edges)
            colour, dash = styles[name]
            figure.add_scatter(
                x=edges,
                y=[*counts, counts[-1]],
                name=html.escape(name),
                line={"shape": "hv", "color": colour, "dash": dash, "width": 2},
                hovertemplate=f"{html.escape(name)}<br>from %{{x}} {unit}: %{{y}} answers<extra></extra>",
            )
        figure.update_yaxes(title="answers", rangemode="tozero", **_GRID)
        figure.update_xaxes(title=f"length of the answer, {unit}", **_GRID)
        return _finish(figure, metrics.lengths_sentence(table, unit), 420)
    rows = len(names)
    figure = make_subplots(
        rows,
        1,
        shared_xaxes=True,
        shared_yaxes="all",
        vertical_spacing=0.25 / rows,
        subplot_titles=[html.escape(name) for name in names],
    )
    centres, widths = (edges[:-1] + edges[1:]) / 2, np.diff(edges)
    drawn: set[str] = set()
    for row, name in enumerate(names, 1):
        of_lane = table[table["lane"] == name]
        for reason, (words, pattern) in STOP_REASONS.items():
            counts, _ = np.histogram(of_lane.loc[of_lane["stop_reason"] == reason, unit], edges)
            if not counts.any():
                continue
            figure.add_bar(
                x=centres,
                y=counts,
                width=widths,
                name=words,
                legendgroup=reason,
                showlegend=reason not in drawn,
                marker={
                    "color": styles[name][0],
                    "pattern": {"shape": pattern, "solidity": 0.35},
                    "line": {"width": 0.5, "color": "#ffffff"},
                },
                hovertemplate=f"{html.escape(name)}, {words}<br>about %{{x:.0f}} {unit}: %{{y}} answers<extra></extra>",
                row=row,
                col=1,
            )
            drawn.add(reason)
    figure.update_layout(barmode="stack", bargap=0)
    tallest = max(np.histogram(part[unit], edges)[0].max() for _, part in table.groupby("lane"))
    figure.update_yaxes(title="answers", dtick=max(1, -(-int(tallest) // 3)), **_GRID)  # whole answers only
    figure.update_xaxes(**_GRID)
    figure.update_xaxes(title=f"length of the answer, {unit}", row=rows, col=1)
    return _finish(figure, metrics.lengths_sentence(table, unit), 130 + 130 * rows, True)


STOP_REASONS = {
    "eos": ("ended by itself", ""),
    "length": ("stopped at the length limit", "/"),
    "cancelled": ("cancelled", "x"),
    "stop": ("stopped", "."),
    "unknown": ("end unknown", "-"),
}
LENGTH_BINS = 24


def with_known_reasons(table: pd.DataFrame) -> pd.DataFrame:
    """A table of lengths in which a stop reason that other programs use is "unknown", so that no answer is left out."""
    return table.assign(stop_reason=table["stop_reason"].where(table["stop_reason"].isin(STOP_REASONS), "unknown"))


def length_edges(table: pd.DataFrame, unit: str, layout: str = "multiples") -> npt.NDArray[np.float64]:
    """The borders of the bins that all lanes share, whole numbers apart, (bins + 1,).

    Raises
    ------
    UserError
        As `lengths`.
    """
    if unit not in ("tokens", "characters"):
        raise UserError(f"unit must be 'tokens' or 'characters', not {unit!r}.")
    if layout not in ("multiples", "overlaid"):
        raise UserError(f"layout must be 'multiples' or 'overlaid', not {layout!r}.")
    if not len(table):
        raise UserError("There are no answers yet, so there are no lengths to draw.")
    most = int(table[unit].max())
    width = max(1, -(-(most + 1) // LENGTH_BINS))
    return np.arange(0, most + width + 1, width, dtype=float)


# A film


def animation(trace: Trace, order: str = "position", last_position: int | None = None, name: str = "") -> go.Figure:
    """The heatmap filling up row by row, as Plotly frames with Play, Pause and a slider.

    Parameters
    ----------
    order, last_position
        As in `heatmap`.
    name
        What its title begins with.

    Raises
    ------
    UserError
        If the run has no refresh, or the order is unknown.
    """
    if not len(trace.refreshes):
        raise UserError(metrics.NO_REFRESH)
    figure = heatmap(trace, order, last_position=last_position)
    count, head = len(trace.refreshes), f"{html.escape(name)}: " if name else ""
    figure.update_traces(customdata=None, hovertemplate=HOVER_PLAIN, y=np.arange(count + 1) - 0.5, ygap=0)
    seen = trace.refreshes["tokens_seen"].tolist()
    frames, steps = [], []
    for row in range(count):
        # The cells are sent once. A frame says where rows begin and end, and those to come have no height yet.
        edges = np.minimum(np.arange(count + 1), row + 1) - 0.5
        title = f"{head}refresh {row + 1} of {count}, {seen[row]:,} tokens seen"
        frames.append(go.Frame(data=[go.Heatmap(y=edges)], name=str(row), layout={"title": {"text": title}}))
        steps.append({"label": str(row + 1), "method": "animate", "args": [[str(row)], _JUMP]})
    figure.frames = frames
    figure.update_layout(
        title={"text": f"{head}refresh {count} of {count}, {seen[-1]:,} tokens seen", "font": {"size": 14}},
        height=figure.layout.height + 130,
        margin={"t": 90, "b": 120},
        updatemenus=[
            {
                "type": "buttons",
                "direction": "left",
                "x": 0,
                "y": -0.28,
                "yanchor": "top",
                "buttons": [
                    {"label": "Play", "method": "animate", "args": [None, _PLAY]},
                    {"label": "Pause", "method": "animate", "args": [[None], _JUMP]},
                ],
            }
        ],
        sliders=[{"active": count - 1, "x": 0.2, "len": 0.8, "y": -0.2, "steps": steps}],
    )
    return figure


_PLAY = {"frame": {"duration": 400, "redraw": True}, "fromcurrent": True, "transition": {"duration": 0}}
_JUMP = {"frame": {"duration": 0, "redraw": True}, "mode": "immediate", "transition": {"duration": 0}}
_GRID = {"gridcolor": "rgba(128,136,150,0.25)", "zeroline": False}


def _finish(figure: go.Figure, summary: str, height: int, titles_above: bool = False) -> go.Figure:
    """Give a figure its height, its sentence, and a legend: above it, or below where its panels have titles above."""
    above = {"y": 1.0, "yanchor": "bottom"}
    below = {"y": -64 / (height - 96), "yanchor": "top"}
    return figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 48, "b": 48},
        legend={"orientation": "h", "x": 0, **(below if titles_above else above)},
        meta={"summary": summary},
    )
