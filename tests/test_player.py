"""What the player is sent, and what it makes of an address."""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, tiny

import ccviz
from ccviz.trace import Trace
from ccviz.ui.player import View, player_data

sys.path.insert(0, str(ROOT / "benchmarks"))  # whose script makes traces of any size

PROMPT = "the sun is out and the sea is calm today, so they went out"
BUDGET: dict[str, Any] = {"cache_size": 20, "chunk_size": 8, "max_new_tokens": 10, "frozen_size": 3}


@pytest.fixture(scope="module")
def lanes() -> dict[str, Trace]:
    return ccviz.compare(tiny("llama"), PROMPT, ["full", "heavy_hitter", "counter_causal"], explain=True, **BUDGET)


def unpacked(text: str, kind: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), kind)


def test_every_entry_is_sent(lanes: dict[str, Trace]) -> None:
    trace = lanes["heavy_hitter"]
    sent = player_data(trace)
    entries = sent["entries"]
    marks = unpacked(entries["marks"], "u1")
    names = np.array(sent["protections"])
    assert sent["texts"] == trace.tokens["text"].tolist()
    assert sent["seen"] == trace.refreshes["tokens_seen"].tolist()
    assert not entries["wide"]
    np.testing.assert_array_equal(unpacked(entries["positions"], "<u2"), trace.entries["position"])
    np.testing.assert_array_equal(marks & 1, trace.entries["kept"])
    assert names[marks >> 1].tolist() == trace.entries["protected"].tolist()
    np.testing.assert_array_equal(unpacked(entries["scores"], "<f4"), trace.entries["score"])
    starts = unpacked(entries["starts"], "<u4")
    np.testing.assert_array_equal(np.diff(starts), trace.entries.groupby("refresh").size())
    assert sent["expected"] is None


def test_entries_in_any_order_are_sent_in_order(lanes: dict[str, Trace]) -> None:
    trace = lanes["counter_causal"]
    shuffled = Trace(trace.config, trace.tokens, trace.refreshes, trace.entries.sample(frac=1, random_state=1))
    assert player_data(shuffled)["entries"] == player_data(trace)["entries"]


def test_positions_beyond_two_bytes_are_sent_in_four() -> None:
    from drawing import made

    trace = made("sliding_window", 2, 70_000, 0)
    sent = player_data(trace)["entries"]
    assert sent["wide"]
    np.testing.assert_array_equal(unpacked(sent["positions"], "<u4"), trace.entries["position"])


def test_a_full_cache_sends_no_entries(lanes: dict[str, Trace]) -> None:
    sent = player_data(lanes["full"])
    assert sent["entries"] is None
    assert sent["after"] == sent["seen"]


def test_what_was_expected_is_sent(lanes: dict[str, Trace]) -> None:
    trace = lanes["counter_causal"]
    expected = player_data(trace)["expected"]
    ids = unpacked(expected["ids"], "<u4").reshape(-1, 5)
    words = np.array(expected["words"], dtype=object)
    for place in range(5):
        assert words[ids[:, place]].tolist() == trace.entries[f"expected_{place + 1}"].tolist()
    np.testing.assert_array_equal(unpacked(expected["probability"], "<f4"), trace.entries["probability"])
    chances = unpacked(expected["chances"], "<f4").reshape(-1, 5)
    np.testing.assert_array_equal(chances[:, 2], trace.entries["chance_3"])


@pytest.mark.parametrize(
    ("given", "view"),
    [
        ({}, View()),
        (
            {"refresh": "3", "pin": "0", "order": "in-place", "ramp": "blue-yellow"},
            View(3, "in place", 0, "blue-yellow"),
        ),
        ({"refresh": "0", "pin": "-4", "order": "up", "ramp": "<b>"}, View()),
        ({"refresh": "1e3", "pin": "9" * 40}, View()),
        ({"refresh": None, "pin": 7, "order": "rank"}, View(None, "rank", 7)),
    ],
)
def test_a_view_is_read_as_far_as_it_can_be(given: dict[str, Any], view: View) -> None:
    assert View.read(given) == view
    assert View.read(view.parameters()) == view
