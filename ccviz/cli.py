"""The command line: run, compare, figure, animate, export.

Knows arguments and exit statuses; everything else is called, and imported only by the command that needs it, so that
``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ccviz.errors import UserError, sentence_for
from ccviz.version import __version__

if TYPE_CHECKING:
    from ccviz.network import LanguageModel
    from ccviz.prompts import Sample
    from ccviz.runs import Request, Run
    from ccviz.trace import Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 with one line on standard error for what the user can mend."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        status: int = given.command(given)
    except KeyboardInterrupt:
        print("ccviz: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        print(f"ccviz: {sentence}", file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ccviz", description="See what a bounded key-value cache remembers and what it loses.")
    parser.add_argument("--version", action="version", version=f"ccviz {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="run a prompt under a bounded cache and save the trace"))
    _add_compare(commands.add_parser("compare", help="run one prompt, or many, under several strategies side by side"))
    _add_figure(commands.add_parser("figure", help="draw a trace: .html, .svg, .png or .pdf, no browser needed"))
    _add_animate(commands.add_parser("animate", help="the caches filling up: .gif, .apng, .mp4 or .html"))
    _add_export(commands.add_parser("export", help="write a trace's tables: .csv, .parquet or .json"))
    return parser


# run


def _add_run(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    _add_prompt(prompt)
    parser.add_argument(
        "--strategy", default="counter_causal", metavar="S", help="a name, or file.py:Class (default: counter_causal)"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the strategy")
    parser.add_argument("--cache-size", type=int, metavar="J", help="entries that survive a refresh (default: 128)")
    _add_settings(parser)
    parser.add_argument("--follow", metavar="RUN.ccviz", help="feed this run's answer, and record the harm")
    parser.add_argument("--output", metavar="FILE.ccviz", help="where to save the trace")
    parser.set_defaults(command=_run)


def _add_prompt(prompt: argparse._MutuallyExclusiveGroup) -> None:
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a text file with the prompt; - reads standard input")
    prompt.add_argument("--sample", metavar="NAME", help="a sample prompt, with its own budgets unless given here")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """What one run and several have in common."""
    parser.add_argument("--chunk-size", type=int, metavar="H", help="tokens between two refreshes (default: 32)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 256")
    parser.add_argument(
        "--frozen-size",
        metavar="F",
        help="first positions that are never evicted, or 'system' for the template's system part (default: 0; for a "
        "sample: system)",
    )
    parser.add_argument("--refresh-mode", default="chunked", metavar="MODE", help="chunked, prefill_end or both")
    parser.add_argument("--system", metavar="TEXT", help="the system message of the chat template")
    parser.add_argument("--no-chat", action="store_true", help="do not use the tokenizer's chat template")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--logprobs", action="store_true", help="record the log-probability of every token")
    parser.add_argument("--observe", action="store_true", help="record counter-causal surprise under any strategy")
    parser.add_argument("--explain", action="store_true", help="record what the future expected instead of each token")
    parser.add_argument("--model", default="smollm2-135m", metavar="M", help="built-in name, hub id or folder")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda, mps or cpu")
    parser.add_argument("--dtype", default="auto", metavar="D", help="auto, float32, bfloat16 or float16")


def _run(given: argparse.Namespace) -> int:
    if given.output:
        _check_output(Path(given.output))
    from ccviz.runs import Run
    from ccviz.strategies import make_strategy
    from ccviz.tokens import check_text

    options = _options(given.option)
    strategy = _strategy(given.strategy)
    make_strategy(strategy, options)  # wrong names are said before a model is loaded
    sample, text = _prompt(given)
    check_text(text)
    size = given.cache_size if given.cache_size is not None else getattr(sample, "cache_size", 128)
    request = replace(_request(given, sample, text, size), strategy=strategy, options=options)
    follow = _opened(given.follow) if given.follow else None
    run = Run(_model(given), {strategy: request}, follow)
    _watch(run)
    (trace,) = run.traces().values()
    if given.output:
        trace.save(given.output)
    _print(trace.text)
    if given.output:
        print(f"saved {given.output}", file=sys.stderr)
    return 0


def _strategy(name: str) -> str:
    """A strategy's registered name; one given as file.py:Class is loaded and registered first."""
    from ccviz import strategies

    return strategies.load_strategy(name) if ".py:" in name else strategies.strategy_class(name).name


def _opened(path: str) -> Trace:
    from ccviz.trace import Trace

    return Trace.open(path)


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # a terminal that lacks a character gets its escape instead
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _check_output(target: Path) -> None:
    """Say before a long run, not after it, that its trace could not be saved."""
    if target.suffix != ".ccviz":
        raise UserError(f"a trace is saved as .ccviz, not as {target.name!r}: rename the output.")
    if not target.parent.is_dir():
        raise UserError(f"{target} cannot be written: there is no folder {target.parent}.")


def _prompt(given: argparse.Namespace) -> tuple[Sample | None, str]:
    if given.sample is not None:
        from ccviz.prompts import load_sample

        sample = load_sample(given.sample)
        return sample, sample.text
    if given.prompt is not None:
        return None, str(given.prompt)
    return None, _read_text(given.prompt_file)


def _read_text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"the prompt file {name} cannot be read: {reason}.") from None


def _options(pairs: list[str]) -> dict[str, Any]:
    """``["recent=3", "score=logit"]`` as options; values are read as JSON where they are JSON, else as text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"an option is given as NAME=VALUE, not as {pair!r}.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def _request(given: argparse.Namespace, sample: Sample | None, text: str, cache_size: int) -> Request:
    """The request that all lanes of a command have in common."""
    from ccviz.runs import Request
    from ccviz.settings import Settings

    wanted = given.frozen_size if given.frozen_size is not None else ("system" if sample else "0")
    if wanted != "system" and not wanted.isdecimal():
        raise UserError(f"--frozen-size takes a whole number or 'system', not {wanted!r}.")

    def chosen(name: str, default: int) -> int:
        stated: int | None = getattr(given, name)
        return stated if stated is not None else getattr(sample, name, default)

    settings = Settings(
        cache_size=cache_size,
        chunk_size=chosen("chunk_size", 32),
        max_new_tokens=chosen("max_new_tokens", 256),
        frozen_size=0 if wanted == "system" else int(wanted),
        refresh_mode=given.refresh_mode,
        temperature=given.temperature,
        seed=given.seed,
        logprobs=given.logprobs,
        observe=given.observe,
        explain=given.explain,
    )
    return Request(
        prompt=text,
        settings=settings,
        chat=not given.no_chat,
        system=given.system if given.system is not None or sample is None else sample.system,
        label=sample.title if sample else "",
        freeze_system=wanted == "system",
    )


def _model(given: argparse.Namespace) -> LanguageModel:
    from ccviz.models import load_model

    tell = (lambda message: print(message, file=sys.stderr)) if sys.stderr.isatty() else (lambda _message: None)
    return load_model(given.model, given.device, given.dtype, progress=tell)


def _watch(run: Run) -> None:
    """Make a run happen, with a bar on standard error where that is a terminal."""
    from tqdm import tqdm

    from ccviz.events import PromptFed, TokenGenerated

    lanes = run.recorders.values()
    size = sum(lane.prompt_size for lane in lanes)
    most = sum(settings.max_new_tokens for settings in run.settings.values())
    with tqdm(total=size, unit="tok", desc="prompt", disable=not sys.stderr.isatty()) as bar:
        for event in run.events():
            generated = sum(lane.generated for lane in lanes)
            if isinstance(event, PromptFed):
                bar.update(sum(lane.tokens_seen for lane in lanes) - bar.n)
            elif isinstance(event, TokenGenerated):
                if bar.total != most:
                    bar.reset(total=most)
                    bar.set_description("answers" if len(lanes) > 1 else "answer")
                bar.update(generated - bar.n)


# compare


def _add_compare(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    _add_prompt(prompt)
    prompt.add_argument(
        "--prompts",
        metavar="PATH",
        help="many prompts: a folder of .txt, a .jsonl, a .csv, or a .txt with one a line; run again to resume",
    )
    parser.add_argument(
        "--strategies", required=True, metavar="A,B,...", help="names, or file.py:Class, separated by commas"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="STRATEGY.NAME=VALUE", help="an option of one of them"
    )
    parser.add_argument("--cache-size", metavar="J[,J...]", help="one or several sizes (default: 128)")
    _add_settings(parser)
    parser.add_argument(
        "--follow", metavar="LANE|RUN.ccviz", help="feed all the answer of one lane (full) or run, and record the harm"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="where to save the traces, or a set's results")
    parser.set_defaults(command=_compare)


def _compare(given: argparse.Namespace) -> int:
    from ccviz.runs import Run, lane_requests
    from ccviz.tokens import check_text

    names = [_strategy(name) for name in given.strategies.split(",") if name]
    options = _options_by_strategy(given.option, names)
    sample, text = (None, "") if given.prompts else _prompt(given)
    sizes = _sizes(given.cache_size, getattr(sample, "cache_size", 128))
    request = _request(given, sample, text, sizes[0])
    lanes = lane_requests(request, names, sizes, options)
    if given.prompts:
        return _compare_set(given, lanes)
    check_text(text)
    folder = _made_folder(given.output_dir) if given.output_dir else None
    follow = _opened(given.follow) if given.follow and given.follow.endswith(".ccviz") else given.follow
    run = Run(_model(given), lanes, follow)
    _watch(run)
    traces = run.traces()
    for name, trace in traces.items():
        if folder is not None:
            trace.save(folder / f"{name.replace(' ', '-')}.ccviz")
    _print(_compared(traces))
    if folder is not None:
        print(f"saved {len(traces)} runs in {folder}", file=sys.stderr)
    return 0


def _options_by_strategy(pairs: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """``["snapkv.window=8"]`` as options for each strategy."""
    options: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        strategy, dot, rest = pair.partition(".")
        if not dot or strategy not in names:
            raise UserError(
                f"an option is given as STRATEGY.NAME=VALUE for one of {', '.join(names)}, not as {pair!r}."
            )
        options.setdefault(strategy, {}).update(_options([rest]))
    return options


def _sizes(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--cache-size takes whole numbers separated by commas, not {text!r}.")
    return [int(word) for word in words]


def _made_folder(name: str) -> Path:
    """A folder for results, made before the long run and not after it."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made: {error.strerror or error}.") from None
    return folder


def _compared(traces: dict[str, Trace]) -> str:
    """A table of the lanes, and their answers."""
    from ccviz.metrics import comparison

    reference = next((trace for trace in traces.values() if trace.strategy == "full"), None)
    table = comparison(traces, reference)
    table["departs_at"] += 1  # people count from 1
    columns = ["lane", "new_tokens", "stop_reason", "refreshes", "seconds", "peak_bytes", "departs_at"]
    columns += ["mean_kl", "agreement"] if table["mean_kl"].notna().any() else []
    shown = table[columns].rename(columns={"new_tokens": "tokens", "departs_at": "departs"}).to_string(index=False)
    answers = "\n".join(f"[{name}] {' '.join(trace.text.split())}" for name, trace in traces.items())
    return f"{shown}\n\n{answers}"


def _compare_set(given: argparse.Namespace, lanes: dict[str, Request]) -> int:
    from tqdm import tqdm

    from ccviz.models import ModelSpec
    from ccviz.runs import Run
    from ccviz.sets import Item, PromptSet, read_items, work_through

    if not given.output_dir:
        raise UserError(
            "a set of prompts needs --output-dir: its results are kept there, and it is resumed from there."
        )
    if given.follow and given.follow not in lanes:
        raise UserError(f"with --prompts, --follow names one of the lanes {', '.join(lanes)}, not {given.follow!r}.")
    items = read_items(given.prompts)
    spec = ModelSpec(given.model, given.device, given.dtype)
    title = Path(given.prompts).stem or "prompts"
    prompts = PromptSet.create(_made_folder(given.output_dir), title, spec, items, lanes, given.follow)
    pending = prompts.pending()
    if pending:
        model = _model(given)

        def run(item: Item) -> dict[str, Trace]:
            going = Run(model, prompts.requests(item), prompts.follow)
            for _event in going.events():
                pass
            return going.traces()

        total, done = len(items), len(items) - len(pending)
        with tqdm(total=total, initial=done, unit="prompt", disable=not sys.stderr.isatty()) as bar:
            work_through(prompts, run, tell=lambda _item: bar.update(1))
    results = prompts.results()
    failed = results[results["problem"].fillna("") != ""].drop_duplicates("item")
    for row in failed.to_dict("records"):
        print(f"ccviz: {row['item']} could not be run: {row['problem']}", file=sys.stderr)
    done_rows = results[results["problem"].fillna("") == ""]
    numbers = {
        "prompts": ("item", "nunique"),
        "tokens": ("tokens", "mean"),
        "characters": ("characters", "mean"),
        "right": ("right", "sum"),
        "seconds": ("seconds", "mean"),
    }
    if prompts.follow:
        numbers |= {"kl": ("mean_kl", "mean"), "agreement": ("agreement", "mean")}
    summary = done_rows.groupby("lane", sort=False).agg(**numbers)
    _print(summary.reset_index().to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    return 0


# figure, animate and export


def _add_figure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="run.ccviz", help="one run, or several for panels and lines")
    parser.add_argument(
        "--kind",
        default="heatmap",
        metavar="K",
        help="heatmap (default), overlay, survival, scores, surprise, retention, overlap, fidelity, or lengths (which "
        "also takes the results.jsonl of a set)",
    )
    parser.add_argument(
        "--order", default="position", metavar="O", help="heatmap slots by rank, position or 'in place'"
    )
    parser.add_argument(
        "--refresh",
        type=int,
        metavar="N",
        help="the refresh that overlay, scores and surprise show (default: the last)",
    )
    parser.add_argument("--style", default="screen", metavar="S", help="screen (default), paper or slides")
    parser.add_argument("--width", default="page", metavar="W", help="on paper: column, or page (default)")
    parser.add_argument("--unit", default="tokens", metavar="U", help="lengths in tokens (default) or characters")
    parser.add_argument("--layout", default="multiples", metavar="L", help="lengths as multiples (default) or overlaid")
    parser.add_argument("--region", default="all", metavar="R", help="overlap of all (default) or prompt")
    parser.add_argument("--by", default="region", metavar="B", help="retention by region (default) or age")
    parser.add_argument("--output", required=True, metavar="FILE", help=".html, .svg, .png, .pdf, or .csv for numbers")
    parser.set_defaults(command=_figure)


def _figure(given: argparse.Namespace) -> int:
    from ccviz.export import lengths_bytes, save_figure
    from ccviz.trace import write_whole

    look = {name: getattr(given, name) for name in ("style", "width", "unit", "layout")}
    results = [name for name in given.traces if name.endswith(".jsonl")]
    if results:
        if given.kind != "lengths" or len(results) < len(given.traces):
            raise UserError("a results.jsonl is drawn alone, and as --kind lengths.")
        target = Path(given.output)
        write_whole(target, lengths_bytes(_lengths(results), target.suffix, **look))
        return 0
    look |= {"region": given.region, "by": given.by}
    save_figure(_lanes(given.traces), given.output, given.kind, given.order, given.refresh, **look)
    return 0


def _lanes(paths: Sequence[str]) -> dict[str, Trace]:
    """Saved runs, named apart."""
    from ccviz.metrics import lane_names

    traces = [_opened(path) for path in paths]
    return dict(zip(lane_names(traces), traces, strict=True))


def _lengths(paths: Sequence[str]) -> Any:
    """The lengths in the results of prompt sets, a row an answer."""
    import pandas as pd

    from ccviz.export import read_lengths

    return pd.concat([read_lengths(path) for path in paths], ignore_index=True)


def _add_animate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="run.ccviz", help="one run, or several side by side")
    parser.add_argument(
        "--order", default="position", metavar="O", help="slots by rank, position (default) or 'in place'"
    )
    parser.add_argument("--style", default="screen", metavar="S", help="screen (default), paper or slides")
    parser.add_argument("--seconds-per-frame", type=float, default=0.4, metavar="T", help="default: 0.4")
    parser.add_argument("--output", required=True, metavar="FILE", help=".gif, .apng, .mp4 or .html")
    parser.set_defaults(command=_animate)


def _animate(given: argparse.Namespace) -> int:
    from ccviz.animation import animation_bytes
    from ccviz.trace import write_whole

    target, traces = Path(given.output), _lanes(given.traces)
    film = animation_bytes(traces, target.suffix, given.order, given.seconds_per_frame, given.style)
    write_whole(target, film)
    return 0


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="run.ccviz")
    parser.add_argument("--table", default="entries", metavar="T", help="entries (default), tokens or refreshes")
    parser.add_argument("--output", required=True, metavar="FILE", help=".csv, .parquet, or .json for the whole trace")
    parser.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    from ccviz.export import save_table
    from ccviz.trace import Trace

    save_table(Trace.open(given.trace), given.output, given.table)
    return 0
