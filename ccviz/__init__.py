"""ccviz: run a language model under a bounded key-value cache and see what it remembered and what it lost."""

from ccviz import figures
from ccviz.errors import UserError
from ccviz.models import load_model
from ccviz.network import LanguageModel
from ccviz.runs import generate
from ccviz.strategies import Entries, Strategy, make_strategy, register, strategy_names
from ccviz.trace import Trace
from ccviz.version import __version__

__all__ = [
    "Entries",
    "LanguageModel",
    "Strategy",
    "Trace",
    "UserError",
    "__version__",
    "figures",
    "generate",
    "load_model",
    "make_strategy",
    "register",
    "strategy_names",
]
