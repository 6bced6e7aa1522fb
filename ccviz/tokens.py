"""From text to tokens and back, exactly: prompts, chat templates, and the text that each token adds.

Knows tokenizers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ccviz.errors import UserError

UNFINISHED = "\ufffd"  # what decoding gives for bytes that are not (yet) a character


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes
    ----------
    token_ids
        All of it, template included.
    system_size
        How many of the first tokens the template writes before the user's own words, its system message among them;
        0 without a template.
    """

    token_ids: list[int]
    system_size: int


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[int], chat: bool = True, system: str | None = None
) -> EncodedPrompt:
    """Tokenize a prompt, through the tokenizer's chat template where it has one and ``chat`` is true.

    Parameters
    ----------
    prompt
        Text, or token ids that are taken as they are.
    system
        The system message; None leaves it to the template. Ignored without a template.

    Raises
    ------
    UserError
        If the prompt is empty, not text, or holds ids outside the vocabulary.
    """
    if not isinstance(prompt, str):
        return EncodedPrompt(_checked_ids(tokenizer, prompt), 0)
    if not prompt.strip():
        raise UserError("The prompt is empty: type some text, or choose a sample.")
    if not (chat and getattr(tokenizer, "chat_template", None)):
        return EncodedPrompt(list(tokenizer(prompt)["input_ids"]), 0)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # Templates may trim what the user says; what they write before it is the same.
    head = list(tokenizer(text[: max(text.rfind(prompt.strip()), 0)], add_special_tokens=False)["input_ids"])
    return EncodedPrompt(ids, len(head) if ids[: len(head)] == head else 0)


def _checked_ids(tokenizer: Any, prompt: Iterable[Any]) -> list[int]:
    try:
        ids = [int(token) for token in prompt]
    except (TypeError, ValueError):
        raise UserError(f"The prompt must be text or a list of token ids, not {type(prompt).__name__}.") from None
    if not ids:
        raise UserError("The prompt is empty: give at least one token id.")
    outside = [token for token in ids if not 0 <= token < len(tokenizer)]
    if outside:
        raise UserError(f"Token id {outside[0]} is not in the vocabulary of {len(tokenizer)} tokens.")
    return ids


class TokenTexts:
    """The text each token adds, found as tokens arrive; joined, it is exactly what decoding them all gives.

    A character may take several tokens (an emoji up to eleven): those that complete none have ``""``, and the one
    that does has the whole of it. Decoding is done from a short window back, since some tokenizers join pieces
    differently at the start of a text.

    >>> texts = TokenTexts(tokenizer); texts.push(ids); texts.texts            # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # the first token that is decoded again
        self._done = 0  # tokens whose text is settled
        self._prefix = ""  # text of the tokens from `_window` to `_done`
        self._texts: list[str] = []

    def push(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self._ids.append(token)
            piece = self._decode(self._window)[len(self._prefix) :]
            finished = piece and not piece.endswith(UNFINISHED)
            self._texts.append(piece if finished else "")
            if finished:
                self._window, self._done = self._done, len(self._ids)
                self._prefix = self._decode(self._window)

    @property
    def texts(self) -> list[str]:
        """One string a token. Bytes that never became a character are shown, as U+FFFD, by the last token."""
        rest = self._decode(self._window)[len(self._prefix) :] if self._done < len(self._ids) else ""
        return [*self._texts[:-1], rest] if rest else list(self._texts)

    def _decode(self, start: int) -> str:
        return decode(self._tokenizer, self._ids[start:])


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """All the text of these tokens, special tokens included, nothing tidied."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text each of these tokens adds; see `TokenTexts`."""
    texts = TokenTexts(tokenizer)
    texts.push(token_ids)
    return texts.texts
