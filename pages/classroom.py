"""The Classroom page: lessons from recorded runs, for a projector, without a model and without a network."""

from __future__ import annotations

import streamlit as st

from ccviz.errors import UserError
from ccviz.lessons import Lesson, lesson_names, load_lesson, recorded_run
from ccviz.ui import page
from ccviz.ui.kept import take_dropped
from ccviz.ui.lesson_view import can_reveal, reveal, show_step
from ccviz.ui.page import asset, plain
from ccviz.ui.player import View, player

_keys = st.components.v2.component("ccviz_keys", html="<div class='keys'>\n</div>", js=asset("keys.js"))


def main() -> None:
    """Draw the page."""
    page.begin("Classroom")
    lesson = _asked()
    with st.sidebar:
        take_dropped()
        page.end()
    if lesson is None:
        _all_lessons()
    else:
        _one_lesson(lesson)


def _asked() -> Lesson | None:
    name = st.query_params.get("lesson")
    if not name:
        return None
    try:
        return load_lesson(name)
    except UserError as error:
        page.show_problem(str(error))
        return None


def _all_lessons() -> None:
    st.markdown("## Classroom")
    st.markdown(
        "What does a language model remember, and what does it lose? Five lessons with real, recorded runs to step "
        "through and predict. They need no graphics card, no model and no network."
    )
    lessons = [load_lesson(name) for name in lesson_names()]
    for at, lesson in enumerate(lessons, 1):
        with st.container(border=True):
            row = st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center")
            with row:
                with st.container(width="stretch"):
                    st.markdown(f"##### {at}. {plain(lesson.title)}")
                    st.caption(f"{plain(lesson.goal)} · {len(lesson.steps)} steps, about {lesson.minutes} minutes")
                st.button(
                    "Start",
                    key=f"start-{lesson.name}",
                    icon=":material/play_arrow:",
                    on_click=_go,
                    args=(lesson, 0),
                    type="primary" if at == 1 else "secondary",
                )
    st.markdown("##### What you will be looking at")
    st.caption(
        "A cache that may keep 64 entries reads seven notes and a question. One row is one moment; one cell one token "
        "that was kept. Press play."
    )
    player(recorded_run("counter_causal"), "hero", View(), "hero", parts="lesson")


def _one_lesson(lesson: Lesson) -> None:
    at = _step_asked(lesson)
    presenting = st.query_params.get("present") == "1"
    if presenting:
        st.html("<style>" + asset("presenting.css") + "</style>")
    pressed = _keys(key="lesson_keys", on_pressed_change=lambda: None).get("pressed")
    if pressed and _act(str(pressed), lesson, at):
        st.rerun()
    step = lesson.steps[at]
    _head(lesson, at, presenting)
    notes = False if presenting else bool(st.session_state.get("notes"))
    st.markdown(f"### {plain(step.title)}")
    show_step(lesson, at, notes)
    _foot(lesson, at)


def _step_asked(lesson: Lesson) -> int:
    try:
        at = int(st.query_params.get("step", "1")) - 1
    except ValueError:
        at = 0
    return min(max(at, 0), len(lesson.steps) - 1)


def _go(lesson: Lesson | None, at: int) -> None:
    if lesson is None:
        for name in ("lesson", "step", "present"):
            st.query_params.pop(name, None)
        return
    st.query_params["lesson"], st.query_params["step"] = lesson.name, str(at + 1)


def _present(on: bool) -> None:
    if on:
        st.query_params["present"] = "1"
    else:
        st.query_params.pop("present", None)


def _act(pressed: str, lesson: Lesson, at: int) -> bool:
    """Do what a key means; returns whether anything changed."""
    if pressed == "next" and at + 1 < len(lesson.steps):
        _go(lesson, at + 1)
    elif pressed == "back" and at > 0:
        _go(lesson, at - 1)
    elif pressed == "reveal" and can_reveal(lesson, at):
        reveal(f"{lesson.name}-{at}")
    elif pressed == "present":
        _present(st.query_params.get("present") != "1")
    elif pressed == "leave" and st.query_params.get("present") == "1":
        _present(False)
    else:
        return False
    return True


def _head(lesson: Lesson, at: int, presenting: bool) -> None:
    number = lesson_names().index(lesson.name) + 1
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.caption(f"Lesson {number}: {plain(lesson.title)} · step {at + 1} of {len(lesson.steps)}")
        with st.container(horizontal=True, width="content", vertical_alignment="center"):
            if presenting:
                st.button("Leave", on_click=_present, args=(False,), key="leave", type="tertiary", help="Esc")
                return
            st.toggle("Teacher's notes", key="notes", persist_state="session")
            st.button("Present", on_click=_present, args=(True,), key="present", icon=":material/present_to_all:")
            with st.popover("Handout", icon=":material/print:"):
                st.caption("A page to print, or to save as a PDF from the browser's print dialog.")
                _handout(lesson, False)
                _handout(lesson, True)
            st.button("All lessons", on_click=_go, args=(None, 0), key="all_lessons", type="tertiary")


def _handout(lesson: Lesson, teacher: bool) -> None:
    def make() -> str:
        from ccviz.handout import handout  # brings Matplotlib, which opening the page need not wait for

        return handout(lesson, teacher)

    who = "teacher" if teacher else "class"
    st.download_button(
        "For the teacher, with notes and answers" if teacher else "For the class",
        make,
        f"ccviz-{lesson.name}-{who}.html",
        "text/html",
        key=f"handout-{who}",
        on_click="ignore",
        icon=":material/download:",
        width="stretch",
    )


def _foot(lesson: Lesson, at: int) -> None:
    last = at + 1 == len(lesson.steps)
    names = lesson_names()
    number = names.index(lesson.name)
    following = load_lesson(names[number + 1]) if last and number + 1 < len(names) else None
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.button(
            "Back", on_click=_go, args=(lesson, at - 1), key="step_back", disabled=at == 0, icon=":material/arrow_back:"
        )
        if not last:
            st.button(
                "Next",
                on_click=_go,
                args=(lesson, at + 1),
                key="step_next",
                type="primary",
                icon=":material/arrow_forward:",
                icon_position="right",
            )
        elif following is not None:
            st.button("Next lesson", on_click=_go, args=(following, 0), key="next_lesson", type="primary")
        else:
            st.button("All lessons", on_click=_go, args=(None, 0), key="lessons_end", type="primary")
    st.caption("Keys: → or PageDown on, ← or PageUp back, Enter reveals, p presents.")


main()
