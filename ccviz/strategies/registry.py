"""The registry: strategies found by name, made with checked options, and loaded from a user's own file.

Knows that a strategy is a dataclass; knows none of them.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ccviz.errors import UserError
from ccviz.strategies.base import Strategy

S = TypeVar("S", bound=type[Strategy])

_registry: dict[str, type[Strategy]] = {}


def register(strategy: S) -> S:
    """Class decorator: make a strategy available under its ``name``.

    What the class does not say is filled in: its name by that of the class, its title by the name, its summary by the
    first line of its docstring.

    Raises
    ------
    UserError
        If it is not a `Strategy`, its name is taken or no name, or an option has no default.
    """
    if not (inspect.isclass(strategy) and issubclass(strategy, Strategy)):
        raise UserError(f"{strategy!r} is not a class derived from ccviz.Strategy.")
    _fill_in(strategy)
    if not (isinstance(strategy.name, str) and re.fullmatch(r"[\w-]+", strategy.name)):
        raise UserError(f"a strategy's name is made of letters, digits, _ and -, not {strategy.name!r}.")
    for option in fields(strategy):
        if option.default is MISSING:
            raise UserError(f"the option {option.name} of {strategy.name} needs a default value.")
    taken = _registry.get(strategy.name)
    if taken is not None and (taken.__qualname__, taken.loaded_from) != (strategy.__qualname__, strategy.loaded_from):
        raise UserError(f"a strategy named {strategy.name!r} is registered already; choose another name.")
    _registry[strategy.name] = strategy
    return strategy


def _fill_in(strategy: type[Strategy]) -> None:
    own = vars(strategy)
    if "name" not in own:
        strategy.name = strategy.__name__
    if "title" not in own:
        strategy.title = str(strategy.name).replace("_", " ")
    if "summary" not in own:
        words = (own.get("__doc__") or "").strip().splitlines()
        # A dataclass without a docstring is given its signature as one.
        described = bool(words) and not words[0].startswith(f"{strategy.__name__}(")
        strategy.summary = words[0] if described else "A strategy of your own."
    if "source" not in own:
        strategy.source = Path(strategy.loaded_from).name


def load_strategy(spec: str) -> str:
    """Register a strategy from a Python file, given as ``path/to/file.py:Name``, and return its registered name.

    Loading a file again replaces what came from it. The file is run: load only what you trust.

    Raises
    ------
    UserError
        If there is no such file, it cannot be run, or it has no such strategy; the message says which.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not (path.suffix == ".py" and name.isidentifier()):
        raise UserError(f"a strategy of your own is given as path/to/file.py:Name, not as {spec!r}.")
    if not path.is_file():
        raise UserError(f"there is no file {path} to load the strategy {name} from.")
    place = str(path.resolve())
    before = dict(_registry)
    for key in [key for key, known in before.items() if known.loaded_from == place]:
        del _registry[key]
    try:
        found = _class_in(_module_from(path), name, path)
        found.loaded_from = place
        if _registry.get(vars(found).get("name", name)) is found:  # the file has registered it by itself
            del _registry[found.name]
        return register(found).name
    except BaseException:
        _registry.clear()
        _registry.update(before)
        raise


def _module_from(path: Path) -> ModuleType:
    """Run a file from its source, so that an edit counts at once and nothing is written beside it."""
    module = ModuleType(f"ccviz_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up there what annotations mean
    try:
        exec(compile(path.read_bytes(), str(path.resolve()), "exec"), vars(module))
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path} is not valid Python: {error.msg}{where}.") from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
        ]
        where = f" in line {lines[-1]}" if lines else ""
        raise UserError(f"{path} failed{where}: {type(error).__name__}: {error}.") from error
    return module


def _class_in(module: ModuleType, name: str, path: Path) -> type[Strategy]:
    found = getattr(module, name, None)
    if not inspect.isclass(found) or found.__module__ != module.__name__:
        there = [key for key, value in vars(module).items() if _is_own_strategy(value, module)]
        has = f"it has {', '.join(there)}" if there else "it has no strategies"
        raise UserError(f"{path} has no class {name} of its own; {has}.")
    if not issubclass(found, Strategy):
        raise UserError(f"{name} in {path} is not a class derived from ccviz.Strategy.")
    if inspect.isabstract(found):
        raise UserError(f"{name} in {path} needs a method scores(self, entries).")
    return found


def _is_own_strategy(value: object, module: ModuleType) -> bool:
    return inspect.isclass(value) and issubclass(value, Strategy) and value.__module__ == module.__name__


def strategy_names() -> list[str]:
    """The names of all registered strategies, in the order they were registered."""
    return list(_registry)


def strategy_class(name: str) -> type[Strategy]:
    """The class registered as ``name``.

    Raises
    ------
    UserError
        If there is none; the message lists those there are.
    """
    if name not in _registry:
        raise UserError(f"there is no strategy {name!r}; choose one of {', '.join(_registry)}.")
    return _registry[name]


def make_strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """A strategy with its options, checked.

    Raises
    ------
    UserError
        If the name, an option or an option's value is not known.
    """
    cls = strategy_class(name)
    known = [option.name for option in fields(cls)]
    for given in options or {}:
        if given not in known:
            allowed = f"its options are {', '.join(known)}" if known else "it has none"
            raise UserError(f"{name} has no option {given!r}; {allowed}.")
    return cls(**dict(options or {}))
