"""The sample prompts: that they load, force evictions, are judged rightly, and what is said of broken ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ccviz.embedded import embedded_model_folder
from ccviz.errors import UserError
from ccviz.prompts import Sample, load_sample, read_sample, sample_names
from ccviz.settings import Settings
from ccviz.tokens import encode_prompt

NAMES = [
    "1-recall-a-fact",
    "2-steps-of-arithmetic",
    "3-patient-letters",
    "4-dated-conversation",
    "5-short-paper",
    "6-code-with-repeated-names",
]
WELL_FORMED = """---
title: A title
system: Be brief.
cache_size: 8
chunk_size: 4
max_new_tokens: 3
look_at: >
  This and
  that.
observed: nothing
---

First line

---
last line: after a rule

"""


def refusal(path: Path) -> str:
    """What reading says; it must be one sentence, on one line, that names the file."""
    with pytest.raises(UserError) as raised:
        read_sample(path)
    said = str(raised.value)
    assert len(said.splitlines()) == 1
    assert path.name in said
    return said


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a-sample.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_there_are_six_samples_in_the_order_of_their_files() -> None:
    assert sample_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_has_all_that_is_needed_to_run_it(name: str) -> None:
    sample = load_sample(name)
    assert sample.name == name
    for words in (sample.title, sample.text, sample.system, sample.look_at, sample.observed, sample.answer):
        assert isinstance(words, str)
        assert words.strip() == words != ""
    Settings(sample.cache_size, sample.chunk_size, sample.max_new_tokens)
    assert "---" not in sample.text


def test_samples_have_titles_of_their_own() -> None:
    assert len({load_sample(name).title for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_judged_by_whole_words_whatever_their_case(name: str) -> None:
    sample = load_sample(name)
    for right in (
        sample.answer,
        f"It is {sample.answer.upper()}.",
        f"({sample.answer.lower()})\n",
        f"“{sample.answer}”",
    ):
        assert sample.is_right(right) is True
    for wrong in ("", "I do not know.", f"x{sample.answer}", f"{sample.answer}s", f"1{sample.answer}2"):
        assert sample.is_right(wrong) is False


@pytest.mark.parametrize("answer", ["$5", "C++", "a.b", "two words", "日本", "(x)"])
def test_an_answer_may_begin_or_end_with_a_sign(answer: str) -> None:
    sample = replace(load_sample(NAMES[0]), answer=answer)
    assert sample.is_right(f"The answer is {answer}, I think.") is True
    assert sample.is_right(f"The answer is x{answer}x, I think.") is False
    assert replace(sample, answer="a.b").is_right("acb") is False


def test_a_sample_without_an_answer_is_neither_right_nor_wrong() -> None:
    assert replace(load_sample(NAMES[0]), answer="").is_right("Lisbon") is None


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_longer_than_its_cache_on_the_built_in_model(name: str) -> None:
    sample = load_sample(name)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder())
    encoded = encode_prompt(tokenizer, sample.text, system=sample.system)
    size = len(encoded.token_ids)
    settings = Settings(sample.cache_size, sample.chunk_size, sample.max_new_tokens, encoded.system_size)
    assert 0 < encoded.system_size < sample.cache_size  # the default: freeze the system part
    assert any(seen > sample.cache_size for seen in range(size + 1) if settings.refresh_due(seen, size))


def test_a_well_formed_sample_is_read_whole(tmp_path: Path) -> None:
    assert read_sample(written(tmp_path, WELL_FORMED)) == Sample(
        name="a-sample",
        title="A title",
        text="First line\n\n---\nlast line: after a rule",
        system="Be brief.",
        cache_size=8,
        chunk_size=4,
        max_new_tokens=3,
        look_at="This and that.",
        observed="nothing",
        answer="",
    )


def test_line_ends_of_windows_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a-sample.md"
    path.write_bytes(WELL_FORMED.replace("\n", "\r\n").encode())
    assert read_sample(path) == read_sample(written(tmp_path, WELL_FORMED))


BROKEN = {
    "empty": "",
    "no front matter": "Just a prompt.",
    "no end": WELL_FORMED.split("---\n\n")[0],
    "not a mapping": WELL_FORMED.replace("title: A title\n", "- a list\n").replace(": ", " "),
    "no YAML": WELL_FORMED.replace("title: A title", "title: [A title"),
    "a field is missing": WELL_FORMED.replace("chunk_size: 4\n", ""),
    "an unknown field": WELL_FORMED.replace("chunk_size", "chunksize"),
    "a field twice over": WELL_FORMED.replace("title:", "text: again\ntitle:"),
    "a word for a number": WELL_FORMED.replace("cache_size: 8", "cache_size: eight"),
    "a number for words": WELL_FORMED.replace("system: Be brief.", "system: 5"),
    "an answer that is no text": WELL_FORMED.replace("chunk_size", "answer: 17\nchunk_size"),
    "no prompt": WELL_FORMED.split("\nFirst")[0],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_sample_gets_one_sentence(kind: str, tmp_path: Path) -> None:
    refusal(written(tmp_path, BROKEN[kind]))


def test_a_sample_that_is_no_text_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a-sample.md"
    path.write_bytes(WELL_FORMED.replace("brief", "bréf").encode("latin-1"))
    refusal(path)


@pytest.mark.parametrize("name", ["nothing", "", "../README", "1-recall-a-fact.md"])
def test_an_unknown_sample_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError) as raised:
        load_sample(name)
    said = str(raised.value)
    assert len(said.splitlines()) == 1
    assert repr(name) in said
    assert all(known in said for known in NAMES)
