"""The command line: run, figure, export.

Knows arguments and exit statuses; everything else is called, and imported only by the command that needs it, so that
``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ccviz.errors import UserError, sentence_for
from ccviz.version import __version__

if TYPE_CHECKING:
    from ccviz.prompts import Sample
    from ccviz.runs import Request, Run


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
    _add_figure(commands.add_parser("figure", help="draw a trace: .html, .svg, .png or .pdf, no browser needed"))
    _add_export(commands.add_parser("export", help="write a trace's tables: .csv, .parquet or .json"))
    return parser


# run


def _add_run(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a text file with the prompt; - reads standard input")
    prompt.add_argument("--sample", metavar="NAME", help="a sample prompt, with its own budgets unless given here")
    parser.add_argument("--strategy", default="counter_causal", metavar="S", help="default: counter_causal")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the strategy")
    parser.add_argument("--cache-size", type=int, metavar="J", help="entries that survive a refresh (default: 128)")
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
    parser.add_argument("--model", default="smollm2-135m", metavar="M", help="built-in name, hub id or folder")
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cuda, mps or cpu")
    parser.add_argument("--dtype", default="auto", metavar="D", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--output", metavar="FILE.ccviz", help="where to save the trace")
    parser.set_defaults(command=_run)


def _run(given: argparse.Namespace) -> int:
    if given.output:
        _check_output(Path(given.output))
    from ccviz.strategies import make_strategy
    from ccviz.tokens import check_text

    make_strategy(given.strategy, _options(given.option))  # wrong names are said before a model is loaded
    sample, text = _prompt(given)
    check_text(text)
    _settings(given, sample, frozen_size=0)
    run = _prepared(given, sample, text)
    _watch(run)
    (trace,) = run.traces().values()
    if given.output:
        trace.save(given.output)
    encoding = sys.stdout.encoding or "utf-8"  # a terminal that lacks a character gets its escape instead
    print(trace.text.encode(encoding, "backslashreplace").decode(encoding))
    if given.output:
        print(f"saved {given.output}", file=sys.stderr)
    return 0


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


def _settings(given: argparse.Namespace, sample: Sample | None, frozen_size: int) -> Any:
    from ccviz.settings import Settings

    def chosen(name: str, default: int) -> int:
        stated: int | None = getattr(given, name)
        return stated if stated is not None else getattr(sample, name, default)

    return Settings(
        cache_size=chosen("cache_size", 128),
        chunk_size=chosen("chunk_size", 32),
        max_new_tokens=chosen("max_new_tokens", 256),
        frozen_size=frozen_size,
        refresh_mode=given.refresh_mode,
        temperature=given.temperature,
        seed=given.seed,
        logprobs=given.logprobs,
    )


def _prepared(given: argparse.Namespace, sample: Sample | None, text: str) -> Run:
    from ccviz.models import load_model
    from ccviz.runs import Request, Run

    wanted = given.frozen_size if given.frozen_size is not None else ("system" if sample else "0")
    if wanted != "system" and not wanted.isdecimal():
        raise UserError(f"--frozen-size takes a whole number or 'system', not {wanted!r}.")
    if wanted != "system":
        _settings(given, sample, int(wanted))
    tell = (lambda message: print(message, file=sys.stderr)) if sys.stderr.isatty() else (lambda _message: None)
    model = load_model(given.model, given.device, given.dtype, progress=tell)
    system = given.system if given.system is not None or sample is None else sample.system
    request = Request(
        prompt=text,
        settings=_settings(given, sample, 0 if wanted == "system" else int(wanted)),
        strategy=given.strategy,
        options=_options(given.option),
        chat=not given.no_chat,
        system=system,
        label=sample.title if sample else "",
        freeze_system=wanted == "system",
    )
    return Run(model, {request.strategy: request})


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


# figure and export


def _add_figure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="run.ccviz")
    parser.add_argument("--kind", default="heatmap", metavar="K", help="heatmap (default) or overlay")
    parser.add_argument(
        "--order", default="position", metavar="O", help="heatmap slots by rank, position or 'in place'"
    )
    parser.add_argument("--refresh", type=int, metavar="N", help="the refresh an overlay shows (default: the last)")
    parser.add_argument("--output", required=True, metavar="FILE", help=".html, .svg, .png or .pdf")
    parser.set_defaults(command=_figure)


def _figure(given: argparse.Namespace) -> int:
    from ccviz.export import save_figure
    from ccviz.trace import Trace

    trace = Trace.open(given.trace)
    save_figure(trace, given.output, given.kind, given.order, given.refresh)
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
