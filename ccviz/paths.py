"""Where ccviz keeps things: the user's cache and data folders, and the samples that come with the project."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

PACKAGE = Path(__file__).resolve().parent


def cache_folder() -> Path:
    """The folder for what can be made again (converted models); ``CCVIZ_CACHE`` overrides the platform's own."""
    override = os.environ.get("CCVIZ_CACHE")
    return Path(override).expanduser() if override else user_cache_path("ccviz", appauthor=False)


def data_folder() -> Path:
    """The folder for what cannot be made again, such as results; ``CCVIZ_DATA`` overrides the platform's own."""
    override = os.environ.get("CCVIZ_DATA")
    return Path(override).expanduser() if override else user_data_path("ccviz", appauthor=False)


def samples_folder() -> Path:
    """Sample prompts: beside the package in a checkout, inside it where it was installed."""
    installed = PACKAGE / "sample_prompts"
    return installed if installed.is_dir() else PACKAGE.parent / "sample_prompts"
