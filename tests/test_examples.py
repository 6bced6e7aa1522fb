"""A trace written by another program, to the documented format, opens and is drawn like one of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from ccviz import metrics
from ccviz.animation import animation_bytes
from ccviz.errors import UserError
from ccviz.export import FIGURE_KINDS, figure_bytes
from ccviz.trace import Trace

SCRIPT = ROOT / "examples" / "write_trace.py"


@pytest.fixture
def written(tmp_path: Path) -> Trace:
    subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, check=True)
    return Trace.open(tmp_path / "window.ccviz")


def test_the_script_is_short_and_does_without_ccviz() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert "import ccviz" not in text


def test_what_another_program_wrote_opens_and_says_what_it_says(written: Trace) -> None:
    assert written.prompt_text == "The cat sat on the mat and"
    assert written.text == " watched the rain"
    assert written.strategy == "my_window"
    assert written.refreshes["tokens_seen"].tolist() == [2, 4, 6, 8, 10]
    expected = [[0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert [np.flatnonzero(row).tolist() for row in metrics.presence(written)] == expected


@pytest.mark.parametrize("kind", FIGURE_KINDS)
def test_every_figure_of_it_is_drawn_or_says_what_it_lacks(kind: str, written: Trace) -> None:
    lacks = {"surprise": "did not record surprise", "fidelity": "did not record harm", "overlap": "at least two runs"}
    for suffix in (".svg", ".html", ".csv"):
        if kind in lacks:
            with pytest.raises(UserError, match=lacks[kind]):
                figure_bytes(written, kind, suffix)
        else:
            assert len(figure_bytes(written, kind, suffix)) > 40
    assert animation_bytes(written, ".gif").startswith(b"GIF")


def test_it_is_compared_with_another_of_its_kind(written: Trace) -> None:
    table = metrics.comparison({"one": written, "two": written}, None)
    assert table["cache_size"].tolist() == [4, 4]
    assert table["full_bytes"].isna().all()
    assert metrics.overlap(written, written)["jaccard"].eq(1).all()
