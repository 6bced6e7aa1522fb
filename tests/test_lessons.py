"""Lessons: their format, what they claim of the recorded runs, their arithmetic, and what the page waits for."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from markdown_it import MarkdownIt

from ccviz.errors import UserError
from ccviz.handout import handout
from ccviz.lessons import (
    Lesson,
    Step,
    before,
    counter_causal_row,
    entry_bytes,
    find_text,
    lesson_names,
    lessons_folder,
    load_lesson,
    parse_lesson,
    read_config,
    recorded_run,
    run_file,
    solve,
    tiny_model,
)
from ccviz.prompts import holds_answer

sys.path.insert(0, str(lessons_folder()))

STEPS = [(name, at) for name in lesson_names() for at in range(len(load_lesson(name).steps))]
ASKING = [(name, at) for name, at in STEPS if load_lesson(name).steps[at].question]
HEAD = "---\ntitle: T\ngoal: G\nminutes: 5\n---\n"


def step(name: str, at: int) -> Step:
    return load_lesson(name).steps[at]


def test_there_are_five_lessons_with_questions() -> None:
    assert [name[0] for name in lesson_names()] == list("12345")
    assert len(ASKING) >= 6
    assert {step(*one).question.kind for one in ASKING} == {"survivors", "lost", "answers"}  # type: ignore[union-attr]
    assert {step(*one).show for one in STEPS} == {"", "growth", "row"}
    assert all(step(*one).notes or one == ("2-a-sliding-window-forgets", 3) for one in STEPS)


@pytest.mark.parametrize(("name", "at"), STEPS)
def test_what_a_step_names_is_there(name: str, at: int) -> None:
    shown = step(name, at)
    assert shown.text
    for run in shown.runs:
        trace = recorded_run(run)
        assert (shown.refresh or 1) <= len(trace.refreshes)
        for text in filter(None, (shown.highlight, shown.pin)):
            first, last = find_text(trace, text)
            assert text in "".join(trace.tokens["text"].iloc[first : last + 1])


@pytest.mark.parametrize(("name", "at"), ASKING)
def test_a_question_can_be_right_and_wrong(name: str, at: int) -> None:
    solved = solve(step(name, at))
    assert 0 < len(solved.right) < len(solved.options)
    assert solved.score(sorted(solved.right)) == len(solved.right)
    assert solved.score([option for option in solved.options if option not in solved.right]) == 0
    assert "{" not in solved.text


def test_which_eight_will_survive() -> None:
    solved = solve(step("4-surprise", 2))
    assert len(solved.right) == 8
    trace = recorded_run("counter_causal")
    entries = trace.entries[trace.entries["refresh"] == 4].set_index("position")["kept"]
    assert {position for position in solved.options if entries[position]} == solved.right
    assert solved.by_chance == pytest.approx(64 / 13)


def test_what_the_lessons_say_of_the_runs() -> None:
    texts = {name: recorded_run(name).text for name in ("full", "sliding_window", "heavy_hitter-small_chunks")}
    assert holds_answer(texts["full"], "Lisbon")
    assert "Hamburg" in texts["sliding_window"]
    assert not holds_answer(texts["heavy_hitter-small_chunks"], "Lisbon")
    for name in ("counter_causal", "sliding_window-large"):
        assert holds_answer(recorded_run(name).text, "Lisbon"), name
    assert next(iter(solve(step("2-a-sliding-window-forgets", 1)).right)) == 6
    heavy = recorded_run("heavy_hitter-small_chunks")
    position, _ = find_text(heavy, "Here")
    totals = heavy.entries[heavy.entries["position"] == position]["score"].dropna().to_numpy()
    assert len(totals) > 8
    assert (np.diff(totals) > 0).all()  # "climbs at every one"
    first, last = find_text(heavy, " In which city does Bruno live?")
    entries = heavy.entries
    asked = entries[entries["position"].between(first, last)]
    assert set(asked[~asked["kept"]]["position"]) == set(range(first, last + 1))  # "the question itself is gone"
    unfrozen = recorded_run("counter_causal-unfrozen")
    gone = unfrozen.entries[~unfrozen.entries["kept"]]["position"]
    assert (gone < 24).any()
    assert recorded_run("counter_causal-small").number("cache_size") == 40


def test_before_a_refresh_nothing_later_is_known() -> None:
    trace = recorded_run("counter_causal")
    known = before(trace, 5)
    assert len(known.refreshes) == 4
    assert known.entries["refresh"].max() == 3
    assert not known.tokens["generated"].any()
    assert before(trace, 1).text == ""
    assert len(before(trace, 1).entries) == 0


def test_the_recorded_runs_are_small() -> None:
    assert sum(file.stat().st_size for file in (lessons_folder() / "runs").iterdir()) < 5_000_000


@pytest.mark.model
@pytest.mark.slow
def test_recording_again_gives_the_same_survivors() -> None:
    from record_runs import RECORDED, record

    assert {file.stem for file in (lessons_folder() / "runs").iterdir()} == set(RECORDED)
    for name, trace in record().items():
        recorded = recorded_run(name)
        assert trace.text == recorded.text, name
        assert trace.entries[["refresh", "position", "kept"]].equals(recorded.entries[["refresh", "position", "kept"]])


# The format


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no front matter", "does not follow the format"),
        ("---\ntitle: T\n---\n## A\n", "has no 'goal'"),
        (HEAD, "it has no steps"),
        (f"{HEAD}## A\n```step\nshow: magic\n```\n", "shows or asks something unknown"),
        (f"{HEAD}## A\n```step\nrun: [a, b, c]\n```\n", "shows or asks something unknown"),
        (f"{HEAD}## A\n```step\nspeed: 9\n```\n", "speed"),
        (f"{HEAD}## A\n```step\nask: {{kind: answers, text: x, why: y}}\n```\n", "asks about no run"),
        (f"{HEAD}## A\n```step\n: [\n```\n", "does not follow the format"),
    ],
)
def test_a_lesson_that_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_lesson("mine", text)


def test_a_lesson_is_read_in_parts() -> None:
    lesson = parse_lesson("mine", f"{HEAD}## One\n\nText.\n\n### Teacher\n\nA note.\n\n## Two\n\nMore.\n")
    assert [(one.title, one.text, one.notes) for one in lesson.steps] == [
        ("One", "Text.", "A note."),
        ("Two", "More.", ""),
    ]
    with pytest.raises(UserError, match="There is no lesson"):
        load_lesson("../1-what-a-kv-cache-is")


# Arithmetic


def test_the_bytes_of_a_token() -> None:
    assert entry_bytes(12, 12, 64, 2) == 36_864  # as the teacher's notes say
    recorded = recorded_run("full").config["entry_bytes"]
    models = {model["name"]: model for model in load_lesson(lesson_names()[0]).data["models"]}
    own = models["SmolLM2-135M (built in)"]
    assert entry_bytes(own["layers"], own["kv_heads"], own["head_size"], 4) == recorded  # the engine's own, float32


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            '{"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}',
            (30, 3, 64),
        ),
        ('{"n_layer": 12, "n_head": 12, "n_embd": 768}', (12, 12, 64)),
        ('{"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 256}}', (2, 4, 256)),
    ],
)
def test_a_pasted_config_is_understood(config: str, shape: tuple[int, int, int]) -> None:
    assert read_config(config) == shape


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"text_config": 3}', '{"num_hidden_layers": "many"}', "7"])
def test_a_config_that_says_nothing_is_said(text: str) -> None:
    with pytest.raises(UserError, match=r"config|JSON"):
        read_config(text)


def test_a_row_is_torchs_own_masked_attention() -> None:
    model = tiny_model(load_lesson("4-surprise").data["tiny"])
    places = [model.words.index(token) for token in model.tokens]
    vectors = torch.tensor(model.vectors[places])
    n = len(places)
    mask = torch.ones(n, n, dtype=torch.bool).triu(1)
    mask[-1, -1] = True
    mixed = torch.nn.functional.scaled_dot_product_attention(*(vectors[None],) * 3, attn_mask=mask)[0]
    chances = ((vectors + mixed) @ torch.tensor(model.vectors).T).softmax(-1)
    for row in range(n):
        ours = counter_causal_row(model, row)
        np.testing.assert_allclose(ours.chances, chances[row], atol=1e-12)
        assert ours.surprise == pytest.approx(1 - chances[row, places[row]].item())
        assert all(at > row for at in ours.seen) or row == n - 1


# Handouts


@pytest.mark.parametrize("name", lesson_names())
def test_a_handout_holds_the_lesson_and_needs_nothing_else(name: str) -> None:
    lesson = load_lesson(name)
    for_class, for_teacher = handout(lesson), handout(lesson, teacher=True)
    for one in (for_class, for_teacher):
        assert "http://" not in one.replace("http://www.w3.org/", "").replace("http://purl.org/", "").replace(
            "http://creativecommons.org/", ""
        )
        assert "<script" not in one
        assert one.count("<section>") == len(lesson.steps)
        assert one.count("<svg") == sum(len(shown.runs) for shown in lesson.steps)
    for shown in lesson.steps:
        if shown.question:
            assert shown.question.why[:40] not in for_class
        first = MarkdownIt("commonmark", {"html": False}).render(shown.notes)
        if shown.notes:
            assert first in for_teacher
            assert first not in for_class


def test_markup_in_a_lesson_stays_text_on_paper() -> None:
    lesson = parse_lesson("mine", f"{HEAD}## <b>One</b>\n\n<script>alert(1)</script>\n")
    page = handout(Lesson(**{**vars(lesson), "goal": "<img src=x>"}))
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>One" not in page


# What the page waits for


@pytest.mark.parametrize("what", ["ccviz.lessons", "ccviz.ui.lesson_view", "ccviz.ui.kept", "ccviz.library"])
def test_the_classrooms_parts_do_without_torch(what: str) -> None:
    code = f"import sys, {what}; print(sorted({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_opening_the_classroom_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from streamlit.testing.v1 import AppTest\n"
        "at = AppTest.from_file('app.py', default_timeout=60).switch_page('pages/classroom.py').run()\n"
        "assert not at.exception, at.exception\n"
        "at.query_params['lesson'] = '4-surprise'\n"
        "at.query_params['step'] = '3'\n"
        "at.run()\n"
        "assert not at.exception, at.exception\n"
        "assert any('Which 8 of these 13' in one.value for one in at.markdown)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_every_recorded_run_is_used() -> None:
    used = {run for one in STEPS for run in step(*one).runs}
    assert used == {file.stem for file in run_file("full").parent.iterdir()}
