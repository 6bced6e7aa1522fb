"""Lessons on paper: one self-contained HTML page a lesson, for a browser to print or to save as a PDF.

Knows lessons, recorded runs and pictures; knows nothing of pages.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt

from ccviz.export import figure_bytes
from ccviz.lessons import Lesson, Solved, Step, before, recorded_run, solve
from ccviz.metrics import heatmap_sentence
from ccviz.trace import Trace
from ccviz.version import __version__

STYLE: Final = Path(__file__).with_name("handout.css")


def handout(lesson: Lesson, teacher: bool = False) -> str:
    """A lesson as one HTML page without scripts or links to fetch.

    Parameters
    ----------
    teacher
        With the notes, and the answers beside the questions.
    """
    parts = [_step(number, step, lesson, teacher) for number, step in enumerate(lesson.steps, 1)]
    who = "For the teacher" if teacher else "Name: <span class='blank'></span> Date: <span class='blank'></span>"
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{html.escape(lesson.title)}</title>"
        f"<style>{STYLE.read_text(encoding='utf-8')}</style></head>\n<body>"
        f"<header><h1>{html.escape(lesson.title)}</h1><p>{html.escape(lesson.goal)}</p>"
        f"<p class='who'>{who}</p></header>"
        f"{''.join(parts)}"
        f"<footer>Made with ccviz {__version__}. The pictures are recorded runs of a real model.</footer>"
        "</body></html>\n"
    )


def _step(number: int, step: Step, lesson: Lesson, teacher: bool) -> str:
    pieces = [f"<section><h2>{number}. {html.escape(step.title)}</h2>", _markdown(step.text)]
    if step.show == "growth":
        pieces.append(_models(lesson))
    hidden = step.question is not None and not teacher
    for name in step.runs:
        trace = recorded_run(name)
        shown = before(trace, step.refresh or len(trace.refreshes)) if hidden and name == step.runs[0] else trace
        pieces.append(_picture(shown, hidden))
    if step.question is not None:
        pieces.append(_question(step, solve(step), teacher))
    if teacher and step.notes:
        pieces.append(f"<aside><h3>For the teacher</h3>{_markdown(step.notes)}</aside>")
    return "".join([*pieces, "</section>"])


def _markdown(text: str) -> str:
    return str(MarkdownIt("commonmark", {"html": False}).render(text))


def _picture(trace: Trace, hidden: bool) -> str:
    if not len(trace.refreshes):
        return ""
    picture = figure_bytes(trace, "heatmap", ".svg").decode()
    picture = picture[picture.index("<svg") :]
    name = trace.strategy.replace("_", " ").capitalize()
    caption = f"{name}, {trace.number('cache_size'):.0f} entries. " if trace.strategy != "full" else f"{name} cache. "
    answer = "" if hidden or not trace.text.strip() else f" It answers: “{trace.text.strip()}”"
    return (
        f"<figure>{picture}<figcaption>{html.escape(caption + heatmap_sentence(trace) + answer)}</figcaption></figure>"
    )


def _question(step: Step, solved: Solved, teacher: bool) -> str:
    pieces = [f"<div class='question'><p><b>Predict.</b> {html.escape(solved.text)}</p>"]
    if solved.question.kind == "survivors":
        texts = recorded_run(step.runs[0]).tokens["text"]
        boxes = [
            f"<span class='token{' kept' if teacher and position in solved.right else ''}'>"
            f"{html.escape(texts[position].replace(chr(10), '⏎').replace(' ', '·'))}</span>"
            for position in solved.options
        ]
        pieces.append(f"<p class='tokens'>{' '.join(boxes)}</p>")
        pieces.append("<p>Framed thickly: survived.</p>" if teacher else "<p>Circle them.</p>")
    else:
        words = {"answers": {1: "yes", 0: "no"}}.get(solved.question.kind, {})
        names = [words.get(option, f"refresh {option}" if option else "never") for option in solved.options]
        right = [option in solved.right for option in solved.options]
        marks = [
            f"<span class='choice{' kept' if teacher and holds else ''}'>□ {name}</span>"
            for name, holds in zip(names, right, strict=True)
        ]
        pieces.append(f"<p>{' '.join(marks)}</p>")
    if teacher:
        pieces.append(f"<p class='why'>{html.escape(solved.question.why)}</p>")
    else:
        pieces.append("<p class='lines'>Why?</p>")
    return "".join([*pieces, "</div>"])


def _models(lesson: Lesson) -> str:
    head = (
        "<tr><th>model</th><th>layers</th><th>KV heads</th><th>numbers a head</th><th>bytes a token, 16 bits</th></tr>"
    )
    rows = [
        f"<tr><td>{html.escape(model['name'])}</td><td>{model['layers']}</td><td>{model['kv_heads']}</td>"
        f"<td>{model['head_size']}</td><td></td></tr>"
        for model in lesson.data["models"]
    ]
    return f"<table>{head}{''.join(rows)}</table>"
