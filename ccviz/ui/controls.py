"""The settings of a run as widgets, and the request they make.

What is set here is in the page's address (`bind="query-params"`), so a link reopens it. Every value is checked again
by the engine; the sentences are its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import streamlit as st

from ccviz import embedded
from ccviz.errors import UserError
from ccviz.models import DEVICES, DTYPES, ModelSpec
from ccviz.prompts import Sample, load_sample, sample_names
from ccviz.settings import REFRESH_MODES, Settings
from ccviz.strategies import CounterCausal, strategy_class, strategy_names
from ccviz.ui.page import show_problem

FIRST_SAMPLE = "1-recall-a-fact"
COMPARED = ["full", "sliding_window", "importance", "heavy_hitter", "counter_causal", "counter_causal_fast"]
DEFAULTS: dict[str, int] = {"J": 64, "h": 16, "new": 64}
MODES = {
    "chunked": "every h tokens",
    "prefill_end": "once, after the prompt",
    "both": "every h tokens and after the prompt",
}


def choose_prompt() -> Sample | None:
    """Draw the samples and the text field; returns the chosen sample while its text is unchanged."""
    state = st.session_state
    if "sample" not in state and "sample" not in st.query_params and "prompt" not in state:
        state["sample"] = FIRST_SAMPLE
    titles = {name: load_sample(name).title for name in sample_names()}
    st.pills(
        "Start from a sample, or type your own text",
        list(titles),
        format_func=lambda name: titles.get(name, name),
        key="sample",
        bind="query-params",
        persist_state="session",
        wrap=True,
    )
    prepare_settings()
    st.text_area("Prompt", key="prompt", height=180, persist_state="session", placeholder="Type or paste a prompt.")
    sample = load_sample(state["sample"]) if state.get("sample") in titles else None
    return sample if sample is not None and sample.text == state.get("prompt") else None


def prepare_settings() -> None:
    """Give the settings their first values: the chosen sample's, or the defaults; call it before they are drawn."""
    _fill_in(st.session_state.get("sample"))
    _restore("J", "sizes", "h", "frozen", "new", "system")


def _fill_in(name: str | None) -> None:
    """Take over a newly chosen sample's text and budgets; on a page's first run the address has the last word."""
    state = st.session_state
    first = "sample_shown" not in state
    if state.get("sample_shown") == name and not first:
        return
    state["sample_shown"] = name
    if name not in sample_names():
        for key, value in {**DEFAULTS, "sizes": str(DEFAULTS["J"]), "frozen": "system"}.items():
            if key not in st.query_params:
                state.setdefault(key, value)
        return
    sample = load_sample(str(name))
    state["prompt"], state["system"] = sample.text, sample.system
    budgets: dict[str, int | str] = {
        "J": sample.cache_size,
        "sizes": str(sample.cache_size),
        "h": sample.chunk_size,
        "new": sample.max_new_tokens,
        "frozen": "system",
    }
    for key, value in budgets.items():
        if not (first and key in st.query_params):
            state[key] = value


def upload_prompt() -> None:
    """Draw the upload of a text file; its text becomes the prompt."""
    with st.popover("Upload a .txt", icon=":material/upload_file:"):
        st.file_uploader("A text file, UTF-8", type=["txt", "md"], key="prompt_upload", on_change=_read_upload)
    if st.session_state.get("upload_problem"):
        show_problem(st.session_state.pop("upload_problem"))


def _read_upload() -> None:
    file = st.session_state["prompt_upload"]
    if file is None:
        return
    try:
        st.session_state["prompt"] = file.getvalue().decode("utf-8-sig")
        st.session_state["sample"] = st.session_state["sample_shown"] = None
    except UnicodeDecodeError:
        st.session_state["upload_problem"] = f"{file.name} is not UTF-8 text; save it as UTF-8 and upload it again."


def choose_model() -> ModelSpec:
    """Draw the model field, with device and type folded away."""
    titles = {embedded.NAME: embedded.TITLE}
    state = st.session_state
    state.setdefault("model", embedded.NAME)
    asked = [embedded.NAME, st.query_params.get("model", embedded.NAME), state["model"] or embedded.NAME]
    name = st.selectbox(
        "Model",
        list(dict.fromkeys(asked)),
        format_func=lambda option: titles.get(option, option),
        accept_new_options=True,
        key="model",
        bind="query-params",
        help="The built-in model runs on any laptop. Or type a Hugging Face id (org/name) or a folder on this machine.",
    )
    with st.expander("Device and precision"):
        device = st.selectbox(
            "Device",
            DEVICES,
            key="device",
            bind="query-params",
            help="auto takes CUDA, then MPS, then the CPU.",
        )
        dtype = st.selectbox(
            "Precision",
            ["auto", *DTYPES],
            key="dtype",
            bind="query-params",
            help="auto takes bfloat16 where the machine computes it natively, else float32.",
        )
    return ModelSpec(str(name or embedded.NAME), device, dtype)


def choose_strategy() -> tuple[str, dict[str, Any]]:
    """Draw the strategy and its options; returns its name and the options that differ from the defaults."""
    names = strategy_names()
    name = st.selectbox(
        "Strategy",
        names,
        index=names.index("counter_causal"),
        format_func=lambda option: strategy_class(option).title,
        key="strategy",
        bind="query-params",
    )
    strategy = strategy_class(name)
    st.caption(strategy.summary)
    options = {}
    if fields(strategy):
        with st.expander("Options of this strategy"):
            options = _options(name)
    return name, options


def choose_strategies() -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Draw a choice of several strategies and their options; returns names, and for each its options that differ."""
    names: list[str] = st.multiselect(
        "Strategies",
        strategy_names(),
        default=COMPARED,
        format_func=lambda option: strategy_class(option).title,
        key="strategies",
        bind="query-params",
        help="They run side by side on the same prompt. The full cache is the yardstick.",
    )
    options = {}
    having_options = [name for name in names if fields(strategy_class(name))]
    if having_options:
        with st.expander("Options of the strategies"):
            for name in having_options:
                st.markdown(f"**{strategy_class(name).title}**")
                options[name] = _options(name)
    return names, {name: given for name, given in options.items() if given}


def _options(strategy: str) -> dict[str, Any]:
    """Draw a strategy's options; returns those that differ from the defaults."""
    values = {option: _option(strategy, option) for option in fields(strategy_class(strategy))}
    return {option.name: value for option, value in values.items() if value != option.default}


def _option(strategy: str, option: Any) -> Any:
    label = option.name.replace("_", " ")
    shared = {"key": f"{strategy}.{option.name}", "help": option.metadata.get("help"), "bind": "query-params"}
    choices = option.metadata.get("choices")
    if choices is not None:
        return st.selectbox(label, choices, **shared)
    if isinstance(option.default, bool):
        return st.toggle(label, value=option.default, **shared)
    if isinstance(option.default, str):
        return st.text_input(label, value=option.default, **shared)
    least, most = option.metadata.get("minimum"), option.metadata.get("maximum")
    if isinstance(option.default, float):
        return st.number_input(label, value=option.default, min_value=least, max_value=most, **shared)
    least = 0 if least is None else least
    return st.number_input(
        label, value=option.default, min_value=least, max_value=most, step=1, placeholder="automatic", **shared
    )


def _restore(*keys: str) -> None:
    """Bring back settings that Streamlit forgot because a pass ended before it had drawn their widgets.

    A field that its user emptied is there, as None; a forgotten one is not there at all. What is in the address comes
    back by itself.
    """
    state = st.session_state
    kept: dict[str, Any] = state.setdefault("kept_settings", {})
    for key in keys:
        if key in state:
            kept[key] = state[key]
        elif key in kept and key not in st.query_params:
            state[key] = kept[key]


def choose_budgets(full: bool, several_sizes: bool = False) -> dict[str, Any]:
    """Draw J, h, frozen and length; returns them as `Settings` takes them, "frozen" still as the user wrote it.

    With ``several_sizes``, J is a text field, and "cache_size" what its user wrote; see `read_sizes`.
    """
    size: int | str | None
    if several_sizes:
        size = st.text_input(
            "Cache size J, one or several",
            key="sizes",
            bind="query-params",
            help="How many tokens survive a refresh; for several sizes write 48, 64. The full cache ignores it.",
        )
    else:
        size = st.number_input(
            "Cache size J",
            value=None,
            step=1,
            key="J",
            bind="query-params",
            help="How many tokens survive a refresh. The full cache ignores it.",
            disabled=full,
        )
    chunk = st.number_input(
        "Chunk size h",
        value=None,
        step=1,
        key="h",
        bind="query-params",
        help="How many tokens are read or written between two refreshes.",
    )
    frozen = st.text_input(
        "Frozen prefix",
        key="frozen",
        bind="query-params",
        help="How many of the first tokens are never evicted; they count towards J. 'system' freezes what the chat "
        "template writes before your text.",
        disabled=full,
    )
    length = st.number_input(
        "New tokens, at most", value=None, step=1, key="new", bind="query-params", help="The answer may end earlier."
    )
    return {"cache_size": size, "chunk_size": chunk, "max_new_tokens": length, "frozen": frozen}


def choose_details() -> dict[str, Any]:
    """Draw what most runs leave alone: refresh mode, sampling, template."""
    state = st.session_state
    with st.expander("More settings"):
        mode = st.selectbox(
            "Refresh",
            REFRESH_MODES,
            format_func=lambda option: MODES[option],
            key="mode",
            bind="query-params",
            help="When the cache is cut down to J.",
        )
        temperature = st.number_input(
            "Temperature",
            value=0.0,
            min_value=0.0,
            step=0.1,
            key="temperature",
            bind="query-params",
            help="0 is greedy.",
        )
        seed = st.number_input("Seed", value=0, min_value=0, step=1, key="seed", bind="query-params")
        chat = st.toggle("Use the chat template", value=True, key="chat", bind="query-params")
        state.setdefault("system", "")
        system = st.text_area(
            "System message",
            key="system",
            persist_state="session",
            disabled=not chat,
            help="Empty leaves it to the template.",
        )
    return {
        "refresh_mode": mode,
        "temperature": float(temperature or 0.0),
        "seed": int(seed or 0),
        "chat": bool(chat),
        "system": system.strip() or None,
    }


def choose_recordings(strategies: Sequence[str], with_harm: bool) -> dict[str, bool]:
    """Draw what may be recorded besides; returns "observe", "explain" (where these strategies can), and "follow"."""
    with st.expander("Record besides"):
        follow = with_harm and st.toggle(
            "Harm to predictions",
            key="follow",
            bind="query-params",
            help="All strategies are fed the full cache's answer, and at each of its tokens we record how far their "
            "predictions have moved from the full cache's. Needs the full cache among the strategies.",
        )
        observe = st.toggle(
            "Counter-causal surprise",
            key="observe",
            bind="query-params",
            help="At every refresh, whatever the strategy, record how surprising each token is to what came after it. "
            "Takes a pass of the model at each refresh.",
        )
        explain = st.toggle(
            "What the future expected",
            value=not with_harm,
            key="explain",
            bind="query-params",
            help="Under a counter-causal strategy, or together with the surprise above: for every token at every such "
            "refresh, how likely what came after makes it, and the five tokens it makes likeliest in its place.",
        )
    can_explain = observe or any(issubclass(strategy_class(name), CounterCausal) for name in strategies)
    return {"observe": bool(observe), "explain": bool(explain and can_explain), "follow": bool(follow)}


def read_sizes(text: object) -> list[int]:
    """The cache sizes in a text such as "48, 64".

    Raises
    ------
    UserError
        If it is empty or holds something else.
    """
    words = str(text or "").replace(",", " ").replace(";", " ").split()
    if not words:
        raise UserError("Cache size J is empty: give one or several whole numbers, such as 48, 64.")
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise UserError(f"Cache size J takes whole numbers, such as 48, 64, not {json.dumps(wrong)}.")
    return list(dict.fromkeys(int(word) for word in words))


def freezes_system(budgets: dict[str, Any]) -> bool:
    """Whether the frozen prefix is given as "system": the size of that part depends on the model."""
    return str(budgets["frozen"] or "").strip().lower() == "system"


def make_settings(
    budgets: dict[str, Any],
    details: dict[str, Any],
    system_size: int,
    full: bool,
    recordings: Mapping[str, bool] | None = None,
) -> Settings:
    """The checked settings; ``system_size`` is what "system" comes to, 0 while no model is there to say.

    Raises
    ------
    UserError
        With one sentence on the first field that cannot be used.
    """
    labels = {"cache_size": "Cache size J", "chunk_size": "Chunk size h", "max_new_tokens": "New tokens, at most"}
    for key, label in labels.items():
        if budgets[key] is None:
            raise UserError(f"{label} is empty: give a whole number.")
    wanted = str(budgets["frozen"] or "0").strip()
    if not freezes_system(budgets) and not wanted.isdecimal():
        raise UserError(f"Frozen prefix takes a whole number or the word system, not {json.dumps(wanted)}.")
    frozen = system_size if freezes_system(budgets) else int(wanted)
    return Settings(
        cache_size=budgets["cache_size"],
        chunk_size=budgets["chunk_size"],
        max_new_tokens=budgets["max_new_tokens"],
        frozen_size=0 if full else frozen,
        refresh_mode=details["refresh_mode"],
        temperature=details["temperature"],
        seed=details["seed"],
        observe=bool(recordings and recordings["observe"]),
        explain=bool(recordings and recordings["explain"]),
    )
