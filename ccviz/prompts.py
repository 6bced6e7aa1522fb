"""Sample prompts: Markdown files with a front matter that says how to run them and what was seen.

Knows the files in ``sample_prompts/``; knows nothing of models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ccviz.errors import UserError
from ccviz.paths import samples_folder

FENCE = "---\n"


@dataclass(frozen=True)
class Sample:
    """One sample prompt.

    Attributes
    ----------
    name, title
        The file's name without suffix, and what people read.
    text
        What the user says.
    system
        The system message; its part of the template is what to freeze.
    cache_size, chunk_size, max_new_tokens
        Budgets at which strategies differ.
    look_at
        What to watch, in a sentence or two.
    answer
        The right answer, or "" where there is none.
    observed
        What the built-in model did when the sample was chosen.
    """

    name: str
    title: str
    text: str
    system: str
    cache_size: int
    chunk_size: int
    max_new_tokens: int
    look_at: str
    observed: str
    answer: str = ""

    def is_right(self, text: str) -> bool | None:
        """Whether a generated text holds the right answer as whole words; None where the sample has none."""
        return holds_answer(text, self.answer)


def holds_answer(text: str, answer: str) -> bool | None:
    """Whether a text holds an answer as whole words, in any case; None where the answer is empty."""
    if not answer:
        return None
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def sample_names() -> list[str]:
    """The samples there are, in the order of their files."""
    return [path.stem for path in sorted(samples_folder().glob("*.md"))]


def load_sample(name: str) -> Sample:
    """The sample of this name.

    Raises
    ------
    UserError
        If there is none (the message lists those there are), or its file does not follow the format.
    """
    if name not in sample_names():
        raise UserError(f"There is no sample {name!r}; choose one of {', '.join(sample_names())}.")
    return read_sample(samples_folder() / f"{name}.md")


def read_sample(path: Path) -> Sample:
    """A sample from its file: YAML between two lines of dashes, then the prompt."""
    try:
        return parse_sample(path.name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"The sample {path.name} does not follow the format: {error}.") from None


def parse_sample(name: str, whole: str) -> Sample:
    """A sample from the text of a file of this name; see `read_sample`."""
    path = Path(name)
    try:
        _, head, text = whole.split(FENCE, 2)
        stated: dict[str, Any] = yaml.safe_load(head)
        sample = Sample(name=path.stem, text=text.strip("\n"), **stated)
        _check(sample)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"The sample {path.name} does not follow the format: {str(error).splitlines()[0]}.") from None
    return replace(sample, look_at=sample.look_at.strip(), observed=sample.observed.strip())


def _check(sample: Sample) -> None:
    for field in fields(sample):
        value, wanted = getattr(sample, field.name), int if field.type == "int" else str
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(f"{field.name} must be {'a whole number' if wanted is int else 'text'}, not {value!r}")
    if not sample.text.strip():
        raise ValueError("it has no prompt")
