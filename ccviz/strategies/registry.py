"""The registry: strategies found by name, and made with checked options.

Knows that a strategy is a dataclass; knows none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ccviz.errors import UserError
from ccviz.strategies.base import Strategy

S = TypeVar("S", bound=type[Strategy])

_registry: dict[str, type[Strategy]] = {}


def register(strategy: S) -> S:
    """Class decorator: make a strategy available under its ``name``.

    Raises
    ------
    UserError
        If it is not a `Strategy`, does not say its name, or the name is taken.
    """
    if not (inspect.isclass(strategy) and issubclass(strategy, Strategy)):
        raise UserError(f"{strategy!r} is not a class derived from ccviz.Strategy.")
    missing = [word for word in ("name", "title", "summary", "source") if not hasattr(strategy, word)]
    if missing:
        raise UserError(f"strategy class {strategy.__name__} must set {', '.join(missing)}.")
    taken = _registry.get(strategy.name)
    if taken is not None and taken.__qualname__ != strategy.__qualname__:
        raise UserError(f"a strategy named {strategy.name!r} is registered already; choose another name.")
    _registry[strategy.name] = strategy
    return strategy


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
