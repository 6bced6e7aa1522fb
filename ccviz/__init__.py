"""ccviz: run a language model under a bounded key-value cache and see what it remembered and what it lost.

Names are imported when they are first used, so that reading a trace does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ccviz.errors import UserError
from ccviz.version import __version__

if TYPE_CHECKING:
    from ccviz import figures
    from ccviz.models import load_model
    from ccviz.network import LanguageModel
    from ccviz.runs import compare, generate
    from ccviz.strategies import Entries, Strategy, load_strategy, make_strategy, register, strategy_names
    from ccviz.trace import Trace

_HOME = {
    "Entries": "strategies",
    "LanguageModel": "network",
    "Strategy": "strategies",
    "Trace": "trace",
    "compare": "runs",
    "figures": "figures",
    "generate": "runs",
    "load_model": "models",
    "load_strategy": "strategies",
    "make_strategy": "strategies",
    "register": "strategies",
    "strategy_names": "strategies",
}

__all__ = [
    "Entries",
    "LanguageModel",
    "Strategy",
    "Trace",
    "UserError",
    "__version__",
    "compare",
    "figures",
    "generate",
    "load_model",
    "load_strategy",
    "make_strategy",
    "register",
    "strategy_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ccviz' has no attribute {name!r}")
    module = importlib.import_module(f"ccviz.{_HOME[name]}")
    return module if name == "figures" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
