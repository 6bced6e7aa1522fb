"""Tables from traces: where entries stand in a picture, what became of each token, and sentences that say it.

Tables in, tables out; knows nothing of plotting, models or pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ccviz.errors import UserError
from ccviz.trace import Trace

ORDERS = ("rank", "position", "in place")


def survivors(trace: Trace) -> pd.DataFrame:
    """The entries that each refresh kept, refresh by refresh in position order (columns as `Trace.entries`)."""
    entries = trace.all_entries()
    return entries[entries["kept"]].sort_values(["refresh", "position"], kind="stable").reset_index(drop=True)


def slot_columns(trace: Trace, order: str = "position") -> pd.DataFrame:
    """`survivors` with a ``column``: the place of each entry in a heatmap's row.

    Parameters
    ----------
    trace
        A finished or partial run.
    order
        ``"rank"``: protected entries first, then by score, best first (as in the paper's Figure 4). ``"position"``:
        oldest first. ``"in place"``: an entry keeps its column while it lives; a new one takes the first free column.

    Raises
    ------
    UserError
        If the order is not one of these.
    """
    if order not in ORDERS:
        raise UserError(f"order must be one of {', '.join(map(repr, ORDERS))}, not {order!r}.")
    kept = survivors(trace)
    if order == "in place":
        return kept.assign(column=_columns_in_place(kept))
    if order == "rank":
        free = (kept["protected"] == "").to_numpy()
        kept = kept.assign(_free=free, _worse=np.where(free, -kept["score"].to_numpy(), 0.0))
        kept = kept.sort_values(["refresh", "_free", "_worse", "position"], kind="stable").drop(
            columns=["_free", "_worse"]
        )
    return kept.assign(column=kept.groupby("refresh").cumcount().astype("int32")).reset_index(drop=True)


def _columns_in_place(kept: pd.DataFrame) -> npt.NDArray[np.int32]:
    columns = np.empty(len(kept), np.int32)
    held: dict[int, int] = {}
    for rows in kept.groupby("refresh", sort=True).indices.values():
        positions = kept["position"].to_numpy()[rows]
        held = {position: held[position] for position in positions.tolist() if position in held}
        taken = set(held.values())
        free = (column for column in range(len(taken) + len(rows)) if column not in taken)
        for position in positions.tolist():
            if position not in held:
                held[position] = next(free)
        columns[rows] = [held[position] for position in positions.tolist()]
    return columns


def slot_grid(trace: Trace, order: str = "position") -> npt.NDArray[np.float32]:
    """The positions cached after each refresh, (refreshes, columns), NaN where a column is empty."""
    placed = slot_columns(trace, order)
    rows = len(trace.refreshes)
    grid = np.full((rows, int(placed["column"].max()) + 1 if len(placed) else 1), np.nan, np.float32)
    row_of = pd.Series(np.arange(rows), index=trace.refreshes["refresh"].to_numpy())
    grid[row_of[placed["refresh"]].to_numpy(), placed["column"].to_numpy()] = placed["position"].to_numpy()
    return grid


def token_states(trace: Trace, refresh: int) -> pd.DataFrame:
    """What has become of every token after one refresh.

    Returns
    -------
    DataFrame
        One row a position: position, text, generated, state ("kept", "evicted", "unseen"), score at this refresh,
        rank (1 is best, of those scored at this refresh; 0 where not), protected, and evicted_at (the refresh that
        evicted it, -1 where none has).

    Raises
    ------
    UserError
        If the trace has no such refresh.
    """
    known = trace.refreshes["refresh"].tolist()
    if refresh not in known:
        least, most = (min(known), max(known)) if known else (0, -1)
        raise UserError(
            f"This run has refreshes {least} to {most}, and none numbered {refresh}." if known else NO_REFRESH
        )
    entries = trace.all_entries()
    here = entries[entries["refresh"] == refresh].set_index("position")
    lost = entries[~entries["kept"] & (entries["refresh"] <= refresh)].set_index("position")["refresh"]
    table = trace.tokens[["position", "text", "generated"]].copy()
    position = table["position"]
    seen = int(trace.refreshes.loc[trace.refreshes["refresh"] == refresh, "tokens_seen"].iloc[0])
    kept = position.map(here["kept"]).fillna(False).astype(bool)
    table["state"] = np.where(kept, "kept", np.where(position < seen, "evicted", "unseen"))
    table["score"] = position.map(here["score"]).astype("float32")
    table["rank"] = position.map(here["score"][::-1].rank(ascending=False, method="first")).fillna(0).astype("int32")
    table["protected"] = position.map(here["protected"]).fillna("").astype("str")
    table["evicted_at"] = position.map(lost).fillna(-1).astype("int32")
    return table


def run_summary(trace: Trace) -> dict[str, Any]:
    """The numbers of a run that a reader asks for first."""
    refreshes, generated = trace.refreshes, int(trace.tokens["generated"].sum())
    seconds = trace.number("seconds")
    decoding = seconds - trace.number("prompt_seconds")
    return {
        "prompt_tokens": len(trace.tokens) - generated,
        "new_tokens": generated,
        "seconds": seconds,
        "prompt_seconds": seconds - decoding,
        "tokens_per_second": (generated - 1) / decoding if generated > 1 and decoding > 0 else 0.0,
        "refreshes": len(refreshes),
        "refresh_share": float(refreshes["seconds"].sum()) / seconds if seconds else 0.0,
        "peak_entries": _peak_entries(trace),
        "peak_bytes": int(refreshes["cache_bytes"].max()) if len(refreshes) else 0,
    }


def _peak_entries(trace: Trace) -> int:
    """The most entries the cache held: before a refresh, or at the end, after what was read since the last one."""
    generated = bool(trace.tokens["generated"].any())
    processed = len(trace.tokens) - generated  # the newest token of an answer is never processed
    if not len(trace.refreshes):
        return processed
    last = trace.refreshes.iloc[-1]
    at_end = int(last["size_after"]) + processed - int(last["tokens_seen"])
    return max(int(trace.refreshes["size_before"].max()), at_end)


# Sentences. Each says in words what a picture shows, for those who cannot see it and those who want to be sure.

NO_REFRESH = "No refresh yet: the run has not read as many tokens as one chunk holds."


def heatmap_sentence(trace: Trace) -> str:
    """What the heatmap shows, in one sentence."""
    if not len(trace.refreshes):
        return NO_REFRESH
    last = trace.refreshes.iloc[-1]
    seen, size = int(last["tokens_seen"]), int(last["size_after"])
    times = "1 refresh" if len(trace.refreshes) == 1 else f"{len(trace.refreshes)} refreshes"
    if seen == size:
        return f"After {times} the cache still holds all {seen} tokens seen: nothing was evicted."
    kept = survivors(trace)
    final = kept[kept["refresh"] == last["refresh"]]
    frozen = int((final["protected"] == "frozen").sum())
    free = final.loc[final["protected"] != "frozen", "position"]
    late = int((free >= seen / 2).sum())
    return (
        f"After {times} the cache holds {size} of {seen} tokens seen"
        f"{f', {frozen} of them frozen' if frozen else ''}; "
        f"{late} {'of the others ' if frozen else ''}come from the later half of the text."
    )


def states_sentence(trace: Trace, refresh: int) -> str:
    """What the coloured text shows, in one sentence."""
    states = token_states(trace, refresh)
    count = states["state"].value_counts()
    seen = int(count.get("kept", 0) + count.get("evicted", 0))
    now = int((states["evicted_at"] == refresh).sum())
    text = (
        f"After {seen} tokens the cache holds {int(count.get('kept', 0))} and has lost {int(count.get('evicted', 0))}"
    )
    if now:
        text += f", {now} of them at this refresh"
    unseen = int(count.get("unseen", 0))
    return text + (f"; {unseen} had not been read yet." if unseen else ".")
