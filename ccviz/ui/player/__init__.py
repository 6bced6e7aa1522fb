"""The linked player: heatmap, text and scrubber of one run, joined in the browser; an inline component.

What it shows is decoded once from compact arrays and drawn only where it is visible, so a trace may be long. Token
texts reach the page as text nodes only, so text that looks like markup stays text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import streamlit as st

from ccviz.colours import BLUE_RED, BLUE_YELLOW
from ccviz.metrics import ORDERS, heatmap_sentence
from ccviz.trace import EXPECTED_PLACES, Trace
from ccviz.ui.page import asset

RAMPS = {"blue-red": BLUE_RED, "blue-yellow": BLUE_YELLOW}
MOST_ENTRIES = 4_000_000  # sent to a browser; a full cache's are derived there instead


_component = st.components.v2.component(
    "ccviz_player",
    html=asset("player/player.html"),
    css=asset("player/player.css"),
    js="\n".join(asset(f"player/{name}") for name in ("model.js", "map.js", "text.js", "life.js", "player.js")),
)


@dataclass(frozen=True)
class View:
    """What a player shows of a run.

    Attributes
    ----------
    refresh
        Counted from 1; None for the last.
    order, ramp
        Of `ORDERS` and `RAMPS`.
    pin
        The pinned token's position, -1 for none.
    highlight
        The first and last position of some tokens to mark besides, or None.
    """

    refresh: int | None = None
    order: str = "position"
    pin: int = -1
    ramp: str = "blue-red"
    highlight: tuple[int, int] | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> View:
        """A view from an address or a message: what cannot be used is left at its default."""

        def number(name: str, least: int) -> int | None:
            try:
                value = int(str(given.get(name)))
            except ValueError:
                return None
            return value if least <= value < 1 << 31 else None

        order, ramp = str(given.get("order", "")).replace("-", " "), str(given.get("ramp", ""))
        pin = number("pin", 0)
        return cls(
            refresh=number("refresh", 1),
            order=order if order in ORDERS else cls.order,
            pin=-1 if pin is None else pin,
            ramp=ramp if ramp in RAMPS else cls.ramp,
        )

    def parameters(self) -> dict[str, str]:
        """As an address says it, without what is at its default."""
        said = {
            "refresh": str(self.refresh or ""),
            "order": "" if self.order == View.order else self.order.replace(" ", "-"),
            "pin": str(self.pin) if self.pin >= 0 else "",
            "ramp": "" if self.ramp == View.ramp else self.ramp,
        }
        return {name: value for name, value in said.items() if value}


def player(
    trace: Trace,
    key: str,
    view: View,
    run: str = "",
    *,
    version: int = 0,
    title: str = "",
    parts: str = "all",
    group: str = "",
    shared: int = 0,
    last_position: int | None = None,
    rows: int = 0,
) -> View:
    """Draw a player; returns what its user has made it show.

    Parameters
    ----------
    trace
        A finished or partial run.
    key
        The component's key on the page.
    view
        What to show at first, and again whenever ``version`` changes.
    run
        Names the run: a player that is given another one begins anew.
    title
        A line above it.
    parts
        ``"all"``; ``"map"``: the heatmap and its scrubber only; ``"lesson"``: without the choices.
    group, shared
        Players of one group can be locked in step; they share what is pinned and pointed at among the first
        ``shared`` positions.
    last_position
        The end of the colour scale, where several players share one; the trace's own last position otherwise.
    rows
        Refreshes of the longest of several players, so that rows are of one height in all.
    """
    run = run or key
    result = _component(
        key=key,
        data={
            **_contents(trace),
            "run": run,
            "view": {
                "refresh": view.refresh,
                "order": view.order,
                "pin": view.pin,
                "ramp": view.ramp,
                "highlight": view.highlight,
                "version": version,
            },
            "title": title,
            "parts": parts,
            "group": group,
            "shared": shared,
            "last": max(len(trace.tokens) - 1, 1) if last_position is None else last_position,
            "rows": rows,
            "ramps": RAMPS,
        },
        default={"view": None},
        on_view_change=_nothing,
    )
    told = result.get("view")
    return View.read(told) if isinstance(told, Mapping) and told.get("run") == run else view


def _nothing() -> None:
    """What the user does needs no answer beyond the next pass of the page."""


def _contents(trace: Trace) -> dict[str, Any]:
    """The trace as the browser decodes it; made once a trace, since a page is drawn again at every pause."""
    known: dict[str, Any] | None = vars(trace).get("_player")
    if known is None:
        known = vars(trace)["_player"] = player_data(trace)  # with the trace, so that it goes when that goes
    return known


def player_data(trace: Trace) -> dict[str, Any]:
    """Texts, refreshes and entries of a trace, for ``model.js``: JSON types, arrays as base64 of little-endian bytes.

    ``entries`` is None for a full cache, whose entries are all positions seen. In ``marks`` bit 0 says kept, and the
    bits above name the protection; positions are of 4 bytes where they are ``wide``, else of 2. ``expected``, where it
    was recorded, holds five words an entry by their number.
    """
    refreshes = trace.refreshes
    data: dict[str, Any] = {
        "content": f"{len(trace.tokens)}-{len(refreshes)}-{trace.stop_reason}",
        "texts": trace.tokens["text"].tolist(),
        "answer": int((~trace.tokens["generated"]).sum()),
        "seen": refreshes["tokens_seen"].tolist(),
        "before": refreshes["size_before"].tolist(),
        "after": refreshes["size_after"].tolist(),
        "phases": refreshes["phase"].tolist(),
        "summary": heatmap_sentence(trace),
        "protections": [""],
        "entries": None,
        "expected": None,
    }
    derived = trace.strategy == "full" and len(trace.entries) > MOST_ENTRIES
    if not len(trace.entries) or derived:
        return data
    entries = trace.entries.sort_values(["refresh", "position"], kind="stable", ignore_index=True)
    codes, names = pd.factorize(pd.concat([pd.Series([""]), entries["protected"]], ignore_index=True))
    starts = np.searchsorted(entries["refresh"], [*refreshes["refresh"], np.iinfo(np.int32).max])
    wide = len(trace.tokens) > 1 << 16
    data["protections"] = names.tolist()
    data["entries"] = {
        "starts": _packed(starts, "<u4"),
        "wide": wide,
        "positions": _packed(entries["position"], "<u4" if wide else "<u2"),
        "marks": _packed(entries["kept"].to_numpy() | (codes[1:] << 1), "u1"),
        "scores": _packed(entries["score"], "<f4"),
    }
    if "probability" in entries:
        words = [entries[f"expected_{place}"] for place in EXPECTED_PLACES]
        chances = [entries[f"chance_{place}"] for place in EXPECTED_PLACES]
        ids, texts = pd.factorize(pd.concat(words, ignore_index=True))
        data["expected"] = {
            "words": texts.tolist(),
            "ids": _packed(ids.reshape(len(words), -1).T, "<u4"),
            "chances": _packed(np.column_stack(chances), "<f4"),
            "probability": _packed(entries["probability"], "<f4"),
        }
    return data


def _packed(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode("ascii")
