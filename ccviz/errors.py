"""The one exception for everything a user can mend, and the sentences for what other libraries raise.

Knows nothing of models, pages or files. ``UserError`` is a ``ValueError``: callers of the Python API catch what they
expect, and the command line and the app show its text, alone, on one line.
"""

from __future__ import annotations

import sys


class UserError(ValueError):
    """Something the caller gave cannot be used; the message says what was given and what to do instead."""


def check_whole_number(name: str, value: object, minimum: int) -> int:
    """``value`` as an int of at least ``minimum``.

    Raises
    ------
    UserError
        If it is not a whole number (booleans are not) or below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UserError(f"{name} must be a whole number of at least {minimum}, not {value!r}.")
    return value


def sentence_for(error: BaseException) -> str | None:
    """One sentence for an error the user can mend, or None for a defect of ours.

    Running out of memory is the one failure that reaches us as somebody else's exception: torch raises
    ``OutOfMemoryError`` on accelerators and a plain ``RuntimeError`` from its CPU allocator.
    """
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    torch = sys.modules.get("torch")  # not imported here: pages that need no model stay light
    out_of_memory = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    cpu_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if isinstance(error, out_of_memory) or cpu_allocator:
        return (
            "The machine ran out of memory: choose a smaller cache size or chunk size, a shorter prompt, "
            "a smaller model, or dtype bfloat16."
        )
    return None
