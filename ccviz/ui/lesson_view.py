"""What a step of a lesson shows: text, a recorded run in the player, a question, or a piece of arithmetic.

Does without torch and without a model: everything comes from recorded runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd
import streamlit as st

from ccviz.errors import UserError
from ccviz.lessons import (
    Lesson,
    Solved,
    Step,
    before,
    counter_causal_row,
    entry_bytes,
    find_text,
    read_config,
    recorded_run,
    solve,
    tiny_model,
)
from ccviz.trace import Trace
from ccviz.ui.page import asset, plain, show_problem
from ccviz.ui.player import View, player

PRECISIONS = {"16 bits": 2, "32 bits": 4, "8 bits": 1}
LENGTHS = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 1_000_000]

_picker = st.components.v2.component(
    "ccviz_picker", html="<div class='picker'>\n</div>", css=asset("picker.css"), js=asset("picker.js")
)
_row = st.components.v2.component(
    "ccviz_row", html="<div class='row'>\n</div>", css=asset("row.css"), js=asset("row.js")
)


def show_step(lesson: Lesson, at: int, notes: bool) -> None:
    """Draw a step: its text, its question if it has one, then what it shows."""
    step = lesson.steps[at]
    with st.container(key="lesson_text"):
        st.markdown(step.text)
    key = f"{lesson.name}-{at}"
    revealed = True
    if step.question is not None:
        with st.container(border=True, key="lesson_question"):
            revealed = _ask(step, key)
    if step.show == "growth":
        _growth(lesson.data["models"])
    elif step.show == "row":
        _one_row(lesson.data["tiny"])
    elif step.runs:
        _runs(step, key, revealed)
    if notes and step.notes:
        with st.container(border=True):
            st.markdown("**For the teacher**")
            st.markdown(step.notes)


# Recorded runs


def _runs(step: Step, key: str, revealed: bool) -> None:
    traces = [recorded_run(name) for name in step.runs]
    last = max(len(trace.tokens) for trace in traces) - 1
    places = st.columns(len(traces)) if len(traces) > 1 else [st.container()]
    for at, (trace, place) in enumerate(zip(traces, places, strict=True)):
        with place:
            shown = trace if revealed or at else before(trace, step.refresh or len(trace.refreshes))
            player(
                shown,
                f"lesson-player-{at}",
                _view(step, trace, revealed),
                f"{key}-{at}-{revealed}",
                title=_title(step, trace) if len(traces) > 1 else "",
                parts="lesson",
                group=key if len(traces) > 1 else "",
                shared=int((~trace.tokens["generated"]).sum()),
                last_position=last,
            )


def _view(step: Step, trace: Trace, revealed: bool) -> View:
    refresh = step.refresh if revealed else None
    if revealed and step.question is not None and step.question.kind == "lost":
        refresh = next(iter(solve(step).right)) or None
    return View(
        refresh=refresh,
        order=step.order,
        pin=find_text(trace, step.pin)[0] if step.pin else -1,
        highlight=find_text(trace, step.highlight) if step.highlight else None,
    )


def _title(step: Step, trace: Trace) -> str:
    if trace.strategy == "full":
        return "Full cache"
    parts = [f"{trace.strategy.replace('_', ' ').capitalize()}, {trace.number('cache_size'):.0f} entries"]
    parts.append(f"refreshed every {trace.number('chunk_size'):.0f} tokens")
    frozen = trace.number("frozen_size")
    parts.append(f"{frozen:.0f} frozen" if frozen else "nothing frozen")
    return ", ".join(parts)


# Questions


def _ask(step: Step, key: str) -> bool:
    """Draw the question; returns whether it has been revealed."""
    state = st.session_state
    solved = solve(step)
    revealed = bool(state.get(f"revealed-{key}"))
    st.markdown(f"**Predict.** {plain(solved.text)}")
    chosen = _choose_tokens(step, solved, key, revealed) if _of_tokens(solved) else _choose_one(solved, key, revealed)
    state[f"chosen-{key}"] = chosen
    if revealed:
        _reveal(step, solved, chosen)
        st.button("Try again", key="again", on_click=_again, args=(key,), icon=":material/replay:")
        return True
    ready = len(chosen) == (len(solved.right) if _of_tokens(solved) else 1)
    st.button(
        "Reveal",
        key="reveal",
        type="primary",
        disabled=not ready,
        on_click=reveal,
        args=(key,),
        help=None if ready else "Make your prediction first.",
    )
    return False


def reveal(key: str) -> None:
    """Show the answer of the question of this key."""
    st.session_state[f"revealed-{key}"] = True


def can_reveal(lesson: Lesson, at: int) -> bool:
    """Whether the step asks something that has been answered and not revealed."""
    key, step = f"{lesson.name}-{at}", lesson.steps[at]
    if step.question is None or st.session_state.get(f"revealed-{key}"):
        return False
    solved = solve(step)
    return len(st.session_state.get(f"chosen-{key}", [])) == (len(solved.right) if _of_tokens(solved) else 1)


def _again(key: str) -> None:
    for name in (f"revealed-{key}", f"chosen-{key}"):
        st.session_state.pop(name, None)
    st.session_state[f"tries-{key}"] = st.session_state.get(f"tries-{key}", 0) + 1


def _of_tokens(solved: Solved) -> bool:
    return solved.question.kind == "survivors"


def _choose_tokens(step: Step, solved: Solved, key: str, revealed: bool) -> list[int]:
    texts = recorded_run(step.runs[0]).tokens["text"]
    of = f"{key}-{st.session_state.get(f'tries-{key}', 0)}"
    chosen: list[int] = st.session_state.get(f"chosen-{key}", [])
    result = _picker(
        key="picker",
        data={
            "of": of,
            "tokens": [
                {"position": position, "text": texts[position], "kept": position in solved.right}
                if revealed
                else {"position": position, "text": texts[position]}
                for position in solved.options
            ],
            "most": len(solved.right),
            "chosen": chosen,
            "revealed": revealed,
        },
        on_chosen_change=lambda: None,
    )
    told = result.get("chosen")
    if not isinstance(told, Mapping) or told.get("of") != of:
        return chosen
    return [position for position in told["positions"] if position in solved.options]


def _choose_one(solved: Solved, key: str, revealed: bool) -> list[int]:
    tries = st.session_state.get(f"tries-{key}", 0)
    said = st.radio(
        "Your prediction",
        solved.options,
        index=None,
        format_func=lambda option: _word(solved, option),
        key=f"choice-{key}-{tries}",
        horizontal=True,
        disabled=revealed,
        persist_state="session",
    )
    return [] if said is None else [said]


def _word(solved: Solved, option: int) -> str:
    if solved.question.kind == "answers":
        return "yes" if option else "no"
    return f"refresh {option}" if option else "never"


def _reveal(step: Step, solved: Solved, chosen: list[int]) -> None:
    if _of_tokens(solved):
        got, of = solved.score(chosen), len(solved.right)
        words = f"{got} of {of} right. A blind choice gets {solved.by_chance:.1f} on average."
        icon = ":material/check_circle:" if got == of else ":material/scoreboard:"
        (st.success if got > solved.by_chance else st.info)(words, icon=icon)
    else:
        right = _word(solved, next(iter(solved.right)))
        if solved.score(chosen):
            st.success(f"Right: {right}.", icon=":material/check_circle:")
        else:
            st.error(f"Not so: {right}.", icon=":material/cancel:")
        if solved.question.kind == "answers":
            st.text(f"The run answered: {recorded_run(step.runs[0]).text.strip()}")
    st.markdown(plain(solved.question.why))


# Arithmetic


def _growth(models: list[Mapping[str, Any]]) -> None:
    with st.container(border=True):
        length = st.select_slider(
            "Length of the text, in tokens", LENGTHS, 8_000, format_func=lambda value: f"{value:,}", key="growth_length"
        )
        precision = st.segmented_control(
            "A number takes", list(PRECISIONS), default="16 bits", required=True, key="growth_bits"
        )
        own = _own_model()
        rows = [
            {
                **model,
                "bytes": entry_bytes(model["layers"], model["kv_heads"], model["head_size"], PRECISIONS[precision]),
            }
            for model in [*models, *own]
        ]
        table = pd.DataFrame(rows)
        table["kb"], table["gb"] = table["bytes"] / 1e3, table["bytes"] * length / 1e9
        number = st.column_config.NumberColumn
        st.dataframe(
            table[["name", "layers", "kv_heads", "head_size", "kb", "gb"]],
            hide_index=True,
            column_config={
                "name": st.column_config.TextColumn("model", pinned=True),
                "layers": number("layers"),
                "kv_heads": number("KV heads"),
                "head_size": number("numbers a head"),
                "kb": number("KB a token", format="%.1f"),
                "gb": st.column_config.ProgressColumn(
                    f"GB for {length:,} tokens", format="%.2f", min_value=0, max_value=float(table["gb"].max())
                ),
            },
            alt="Models with their layers, KV heads, numbers a head, and what their cache takes.",
        )
        first = table.iloc[-1] if own else table.iloc[4]
        st.caption(
            f"{plain(str(first['name']))}: 2 × {first['layers']} × {first['kv_heads']} × {first['head_size']} × "
            f"{PRECISIONS[precision]} = {first['bytes']:,} bytes a token; × {length:,} = {first['gb']:.2f} GB. "
            "Layers that see only a window can do with less."
        )


def _own_model() -> list[dict[str, Any]]:
    with st.expander("Another model: paste its config.json"):
        text = st.text_area("config.json", key="growth_config", height=120, label_visibility="collapsed")
    if not (text or "").strip():
        return []
    try:
        layers, kv_heads, head_size = read_config(text)
    except UserError as error:
        show_problem(str(error))
        return []
    return [{"name": "yours", "layers": layers, "kv_heads": kv_heads, "head_size": head_size}]


def _one_row(data: Mapping[str, Any]) -> None:
    model = tiny_model(data)
    rows = [asdict(counter_causal_row(model, row)) for row in range(len(model.tokens))]
    with st.container(border=True):
        _row(
            key="one_row",
            data={
                "tokens": list(model.tokens),
                "words": list(model.words),
                "vectors": model.vectors.tolist(),
                "size": model.vectors.shape[1],
                "rows": rows,
            },
        )
