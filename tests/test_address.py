"""Channels: what one person shows to others, and that the word in a link does not let its reader show."""

from __future__ import annotations

from ccviz.ui.address import MOST_CHANNELS, Channels, watch_key
from ccviz.ui.player import View


def test_a_channel_counts_its_changes_only() -> None:
    channels = Channels()
    assert channels.get("a") is None
    channels.show("a", "run1", View())
    first = channels.get("a")
    channels.show("a", "run1", View())
    assert channels.get("a") == first
    channels.show("a", "run1", View(refresh=3))
    channels.show("a", "run2", View(refresh=3))
    last = channels.get("a")
    assert first is not None
    assert last is not None
    assert (last.job, last.view.refresh, last.version) == ("run2", 3, first.version + 2)
    channels.close("a")
    assert channels.get("a") is None


def test_the_longest_unused_channels_go() -> None:
    channels = Channels()
    for number in range(MOST_CHANNELS):
        channels.show(str(number), "run", View())
    channels.show("0", "run", View())  # used again
    channels.show("new", "run", View())
    assert channels.get("1") is None
    assert channels.get("0") is not None
    assert channels.get("new") is not None


def test_the_watch_word_does_not_tell_the_secret() -> None:
    assert watch_key("secret") == watch_key("secret") != watch_key("other")
    assert "secret" not in watch_key("secret")
