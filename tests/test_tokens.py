"""The text of tokens, exactly, on a byte-level tokenizer and on ones that join pieces another way; and prompts."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ccviz.embedded import embedded_model_folder
from ccviz.errors import UserError
from ccviz.tokens import EncodedPrompt, TokenTexts, decode, encode_prompt, token_texts

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
TEXTS = {
    "plain": "The quick brown fox, 12 eggs.",
    "family": f"before {FAMILY} after",
    "skin tones": "\U0001f44d\U0001f3fd\U0001f44d\U0001f3ff \U0001f9d1\U0001f3fb\u200d\U0001f680",
    "flags": "\U0001f1ef\U0001f1f5\U0001f1e9\U0001f1ea \U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e007f",
    "cjk": "日本語のテキスト、漢字𠀀と한국어",
    "right to left": "שלום עולם مرحبا\u200f بالعالم",
    "combining": "e\u0301a\u0308\u0323 Z\u0351\u036b\u0343a\u0334l\u0358 \u0e01\u0e33 नमस्ते",
    "newlines": "a\nb\r\nc\n\n\nd\u2028e",
    "tabs": "\tx\t\ty",
    "spaces": "  a   b    ",
    "only spaces": "     ",
    "markup": "<b>bold</b> &amp; $x^2$ :red[no] *a* [l](http://x)",
    "special tokens": "a<|im_end|>b<|endoftext|><|im_start|> <s></s><unk> c",
    "empty": "",
    "controls": "\x00\x1b[31m\x7f",
}
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "A token completes a character, or none.", "  two spaces"]
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
VALID_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: spaces as "▁", unknown characters as single bytes, one space stripped in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the trainer counts bytes as special; Llama's are not
    tokenizer = Tokenizer.from_str(json.dumps(state))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def unigram_tokenizer() -> PreTrainedTokenizerFast:
    """As T5's: a unigram model over "▁" pieces; what it does not know is one <unk>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def smollm2_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_folder())


MAKERS = {"built_in": smollm2_tokenizer, "byte_fallback": byte_fallback_tokenizer, "unigram": unigram_tokenizer}
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param("built_in", marks=pytest.mark.model), "byte_fallback", "unigram"]
)


@functools.cache
def tokenizer_of(kind: str) -> Any:
    return MAKERS[kind]()


@pytest.fixture
def smollm2() -> Any:
    return tokenizer_of("built_in")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stock_decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def assert_exact(tokenizer: Any, ids: list[int]) -> None:
    """At every prefix the texts joined are its decoded text, and pushing in one go gives the same."""
    growing = TokenTexts(tokenizer)
    assert growing.texts == []
    for size, token in enumerate(ids, start=1):
        growing.push([token])
        texts = growing.texts
        assert len(texts) == size
        assert "".join(texts) == stock_decode(tokenizer, ids[:size])
    assert token_texts(tokenizer, ids) == growing.texts
    assert decode(tokenizer, ids) == stock_decode(tokenizer, ids)


def byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte, as GPT-2 introduced it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token stands for, read from its name in the vocabulary."""
    name = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.all_special_ids:
        return name.encode()
    if match := re.fullmatch("<0x([0-9A-F]{2})>", name):
        return bytes([int(match[1], 16)])
    if "▁" in tokenizer.get_vocab():
        return name.replace("▁", " ").encode()
    letters = byte_letters()
    return bytes(letters[letter] for letter in name)


def assert_whole_characters(tokenizer: Any, ids: list[int]) -> None:
    """A token has "" while a character is open, and whoever closes it has all of it."""
    texts, data, joined = token_texts(tokenizer, ids), b"", ""
    for token, text in zip(ids, texts, strict=True):
        data += token_bytes(tokenizer, token)
        joined += text
        try:
            complete = data.decode()
        except UnicodeDecodeError:
            assert text == ""
            continue
        assert joined in (complete, complete.removeprefix(" "))


@every_kind
@pytest.mark.parametrize("name", TEXTS)
def test_texts_joined_are_the_decoded_text_at_every_prefix(kind: str, name: str) -> None:
    assert_exact(tokenizer_of(kind), ids_of(tokenizer_of(kind), TEXTS[name]))


@every_kind
@pytest.mark.parametrize("name", TEXTS)
def test_whoever_completes_a_character_has_all_of_it(kind: str, name: str) -> None:
    ids = ids_of(tokenizer_of(kind), TEXTS[name])
    assert_whole_characters(tokenizer_of(kind), ids)
    assert not any("\ufffd" in text for text in token_texts(tokenizer_of(kind), ids))


@pytest.mark.model
@pytest.mark.parametrize("name", TEXTS)
def test_the_built_in_tokenizer_loses_nothing(smollm2: Any, name: str) -> None:
    assert "".join(token_texts(smollm2, ids_of(smollm2, TEXTS[name]))) == TEXTS[name]


@pytest.mark.model
def test_a_family_emoji_is_many_tokens_and_six_characters_and_joiners(smollm2: Any) -> None:
    texts = token_texts(smollm2, ids_of(smollm2, FAMILY))
    assert len(texts) > len(FAMILY)
    assert [text for text in texts if text] == list(FAMILY)


@every_kind
@pytest.mark.parametrize("text", ["\ufffd", "a\ufffdb", "\ufffd\ufffd c", "日\ufffd本", "x \ufffd"])
def test_a_literal_replacement_character_is_text(kind: str, text: str) -> None:
    ids = ids_of(tokenizer_of(kind), text)
    assert "".join(token_texts(tokenizer_of(kind), ids)) == stock_decode(tokenizer_of(kind), ids)
    growing = TokenTexts(tokenizer_of(kind))
    growing.push(ids)
    growing.push(ids_of(tokenizer_of(kind), "the end"))
    assert "".join(growing.texts) == stock_decode(tokenizer_of(kind), ids + ids_of(tokenizer_of(kind), "the end"))


@every_kind
@settings(max_examples=60, deadline=None)
@given(text=VALID_TEXT)
def test_texts_of_any_text_joined_are_the_decoded_text(kind: str, text: str) -> None:
    assert_exact(tokenizer_of(kind), ids_of(tokenizer_of(kind), text))


@every_kind
@settings(max_examples=60, deadline=None)
@given(text=VALID_TEXT)
def test_no_text_of_a_valid_text_is_a_broken_character(kind: str, text: str) -> None:
    ids = ids_of(tokenizer_of(kind), text)
    assume("\ufffd" not in stock_decode(tokenizer_of(kind), ids))  # the built-in vocabulary lacks some bytes
    assert_whole_characters(tokenizer_of(kind), ids)
    assert not any("\ufffd" in piece for piece in token_texts(tokenizer_of(kind), ids))


@every_kind
@settings(max_examples=150, deadline=None)
@given(places=st.lists(st.integers(0, 2**31 - 1), max_size=14))
def test_texts_of_any_tokens_joined_are_the_decoded_text(kind: str, places: list[int]) -> None:
    assert_exact(tokenizer_of(kind), [place % len(tokenizer_of(kind)) for place in places])


@pytest.mark.model
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_texts_of_invalid_utf8_joined_are_the_decoded_text(data: st.DataObject) -> None:
    smollm2 = tokenizer_of("built_in")
    broken = [token for token in range(600) if "\ufffd" in stock_decode(smollm2, [token])]
    assert len(broken) > 100
    pool = st.sampled_from(broken) | st.integers(0, len(smollm2) - 1)
    assert_exact(smollm2, data.draw(st.lists(pool, max_size=12)))


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=10), words=st.lists(st.integers(0, 9), min_size=11, max_size=11))
def test_bytes_that_are_no_text_joined_are_the_decoded_text(data: bytes, words: list[int]) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    the, ids = ids_of(tokenizer, "The")[0], []
    for byte, word in zip(data, words, strict=False):
        ids += [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>")] + ([the] if word == 0 else [])
    assert_exact(tokenizer, ids)


def test_a_text_cut_inside_a_character_is_its_decoded_text() -> None:
    """A generation can end anywhere: here after 日本 and two of the three bytes of 語."""
    tokenizer = tokenizer_of("byte_fallback")
    ids = ids_of(tokenizer, "日本語")[:-1]
    assert "".join(token_texts(tokenizer, ids)) == stock_decode(tokenizer, ids)


@every_kind
def test_texts_asked_for_again_and_in_between_do_not_change_what_follows(kind: str) -> None:
    ids = ids_of(tokenizer_of(kind), f"The fox {FAMILY} 日本 end")
    asked, silent = TokenTexts(tokenizer_of(kind)), TokenTexts(tokenizer_of(kind))
    for token in ids:
        asked.push([token])
        assert asked.texts == asked.texts
        silent.push([token])
    assert asked.texts == silent.texts


# Prompts


def assert_head(tokenizer: Any, encoded: EncodedPrompt, head: str) -> None:
    """`system_size` counts the tokens that lie wholly before the user's words, all of them."""
    ids, size = encoded.token_ids, encoded.system_size
    assert head.startswith(stock_decode(tokenizer, ids[:size]))
    assert not head.startswith(stock_decode(tokenizer, ids[: size + 1]))


@pytest.mark.model
def test_a_plain_prompt_gets_the_templates_own_system_message(smollm2: Any) -> None:
    encoded = encode_prompt(smollm2, "What is the capital of Portugal?")
    head = f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    rest = "What is the capital of Portugal?<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.system_size == 24
    assert stock_decode(smollm2, encoded.token_ids[:24]) == head
    assert stock_decode(smollm2, encoded.token_ids[24:]) == rest
    messages = [{"role": "user", "content": "What is the capital of Portugal?"}]
    stock = smollm2.apply_chat_template(messages, add_generation_prompt=True)
    assert encoded.token_ids == list(stock["input_ids"] if hasattr(stock, "keys") else stock)


PROMPTS = ["Hi", "\u2301", "You are terse.", "a", "user", "assistant", "<|im_start|>assistant\n", "Hi. Hi. Hi"]


@pytest.mark.model
@pytest.mark.parametrize("system", ["You are terse.", "\u2301", "a\nb 日本 $x$ <|im_end|>", "", "x" * 500])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_comes_before_the_users_words_is_the_system_part(smollm2: Any, system: str, prompt: str) -> None:
    encoded = encode_prompt(smollm2, prompt, system=system)
    head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    rendered = f"{head}{prompt}<|im_end|>\n<|im_start|>assistant\n"
    assert stock_decode(smollm2, encoded.token_ids) == rendered
    assert stock_decode(smollm2, encoded.token_ids[: encoded.system_size]) == head


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["\n\nHi", " Hi", "\tHi", "\nHi\n", "Hi  "])
def test_a_prompt_with_spaces_around_has_its_system_part_too(smollm2: Any, prompt: str) -> None:
    """Its first line breaks may share a token with the template's last one."""
    assert_head(
        smollm2,
        encode_prompt(smollm2, prompt),
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n",
    )


@pytest.mark.model
def test_without_chat_the_text_alone_is_read(smollm2: Any) -> None:
    encoded = encode_prompt(smollm2, " Hi there\n", chat=False, system="not read")
    assert stock_decode(smollm2, encoded.token_ids) == " Hi there\n"
    assert encoded.system_size == 0


@pytest.mark.model
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_token_ids_are_taken_as_they_are(smollm2: Any, kind: Any) -> None:
    ids = [2, 0, 1, 49151, 9690, 9690]
    encoded = encode_prompt(smollm2, kind(ids), system="not read")
    assert encoded.token_ids == ids
    assert all(type(token) is int for token in encoded.token_ids)
    assert encoded.system_size == 0


NOT_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty"),
    "spaces": (" \t", "empty"),
    "newlines": ("\n\n", "empty"),
    "wide space": ("\u3000\u2003", "empty"),
    "no ids": ([], "empty"),
    "id over": ([1, 1_000_000], "1000000"),
    "id below": ([-1], "-1"),
    "none": (None, "NoneType"),
    "number": (5, "int"),
    "words": (["Hello", "there"], "list"),
    "nothing in it": ([None], "list"),
    "not a number": ([float("nan")], "list"),
    "infinite": ([float("inf")], "list"),
    "fraction": ([1.5], "list"),
    "batch": (torch.tensor([[1, 2]]), "Tensor"),
    "bytes": (b"Hello", "bytes"),
    "half a pair": ("Hi \ud83d", "text"),
}


@pytest.mark.model
@pytest.mark.parametrize("case", NOT_PROMPTS)
@pytest.mark.parametrize("chat", [True, False])
def test_what_is_no_prompt_gets_one_sentence(smollm2: Any, case: str, chat: bool) -> None:
    prompt, says = NOT_PROMPTS[case]
    with pytest.raises(UserError) as raised:
        encode_prompt(smollm2, prompt, chat=chat)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_text_of_which_the_tokenizer_keeps_nothing_is_refused() -> None:
    letters = Tokenizer(models.BPE({"a": 0, "b": 1}, []))  # no <unk>: other letters are dropped
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    assert encode_prompt(tokenizer, "ab").token_ids == [0, 1]
    with pytest.raises(UserError) as raised:
        encode_prompt(tokenizer, "日本")
    assert "\n" not in str(raised.value)


@pytest.fixture
def templated() -> PreTrainedTokenizerFast:
    return byte_fallback_tokenizer()


def test_a_tokenizer_without_a_template_reads_the_text(templated: PreTrainedTokenizerFast) -> None:
    encoded = encode_prompt(templated, "The fox", chat=True, system="not read")
    assert encoded.token_ids == ids_of(templated, "The fox")
    assert encoded.system_size == 0


def test_a_template_that_refuses_system_messages_reads_a_plain_prompt(templated: PreTrainedTokenizerFast) -> None:
    templated.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[model] {% endif %}"
    )
    encoded = encode_prompt(templated, "The fox")
    assert stock_decode(templated, encoded.token_ids) == "<s>[user] The fox[model] "
    assert_head(templated, encoded, "<s>[user] ")


def test_a_system_message_to_a_template_that_refuses_it_gets_one_sentence(templated: PreTrainedTokenizerFast) -> None:
    templated.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(UserError) as raised:
        encode_prompt(templated, "The fox", system="You are terse.")
    assert "\n" not in str(raised.value)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def test_a_template_without_a_system_message_of_its_own(templated: PreTrainedTokenizerFast) -> None:
    templated.chat_template = TURNS + "{% if add_generation_prompt %}<model>{% endif %}"
    assert_head(templated, encode_prompt(templated, "The fox"), "<user>")
    encoded = encode_prompt(templated, "The fox", system="lazy dog")
    assert_head(templated, encoded, "<system>lazy dog</><user>")


def test_a_template_that_ignores_system_messages(templated: PreTrainedTokenizerFast) -> None:
    templated.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    encoded = encode_prompt(templated, "The fox", system="lazy dog")
    assert stock_decode(templated, encoded.token_ids) == "<user>The fox"
    assert_head(templated, encoded, "<user>")


def test_a_template_that_puts_the_system_message_inside_the_users_turn(templated: PreTrainedTokenizerFast) -> None:
    """As Llama 2's and Mistral's do; the space before the user's first word is part of that word's token."""
    templated.chat_template = (
        "{% set s = messages[0].content + ' | ' if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}[I] {{ s }}{{ m.content }} [/I]{% endif %}{% endfor %}"
    )
    encoded = encode_prompt(templated, "The fox", system="lazy dog")
    assert stock_decode(templated, encoded.token_ids) == "[I] lazy dog | The fox [/I]"
    assert_head(templated, encoded, "[I] lazy dog | ")


def test_a_template_that_trims_what_the_user_says(templated: PreTrainedTokenizerFast) -> None:
    templated.chat_template = TURNS.replace("m.content", "m.content | trim")
    encoded = encode_prompt(templated, "  The fox\n")
    assert stock_decode(templated, encoded.token_ids) == "<user>The fox</>"
    assert_head(templated, encoded, "<user>")
