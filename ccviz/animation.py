"""The evolution of a cache as a film: GIF, APNG, MP4, or a page with Plotly's own animation.

Knows file types and frames; the picture is `drawing`'s heatmap, row by row.
"""

from __future__ import annotations

import bisect
import functools
import io
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from ccviz import figures, metrics
from ccviz.drawing import draw_heatmap, style_named
from ccviz.errors import UserError
from ccviz.export import Look, Traces, drawing_in, page_of
from ccviz.trace import Trace

ANIMATION_SUFFIXES = (".gif", ".apng", ".mp4", ".html")
DOTS_PER_INCH = 110
MOST_PIXELS = 150e6  # of all frames together, which are in memory at one time: longer films are smaller
MOST_SECONDS = 60.0  # a frame

Picture = npt.NDArray[np.uint8]


def animation_bytes(
    traces: Traces,
    suffix: str,
    order: str = "position",
    seconds_per_frame: float = 0.4,
    style: str = "screen",
) -> bytes:
    """One or several runs' caches filling up, one frame a refresh.

    Parameters
    ----------
    traces
        A run, or several by their lanes' names. They run by the tokens seen, so that lanes of several chunk sizes
        keep step: a frame at each moment at which any was refreshed. A shorter run stands still at its end.
    suffix
        ".gif", ".apng", ".mp4" (needs the package ``av``), or ".html", where several runs stand below
        one another.
    order, style
        As in `export.Look`.
    seconds_per_frame
        How long a refresh is shown.

    Raises
    ------
    UserError
        If the suffix, the order, the style or the time is not one there is, or a run has no refresh.
    """
    if suffix.lower() not in ANIMATION_SUFFIXES:
        raise UserError(
            f"an animation is written as {', '.join(ANIMATION_SUFFIXES)}, not as {suffix or 'a file without suffix'!r}."
        )
    if not 0.02 <= seconds_per_frame <= MOST_SECONDS:
        raise UserError(f"a frame lasts from 0.02 to {MOST_SECONDS:.0f} seconds, not {seconds_per_frame}.")
    named = {traces.strategy: traces} if isinstance(traces, Trace) else dict(traces)
    look = Look(order=order, style=style)
    if not named or not all(len(trace.refreshes) for trace in named.values()):
        raise UserError(metrics.NO_REFRESH)
    if suffix.lower() == ".html":
        last = max(max(len(trace.tokens) for trace in named.values()) - 1, 1)
        titles = dict.fromkeys(named, "") if len(named) == 1 else {name: name for name in named}
        films = [figures.animation(trace, order, last, titles[name]) for name, trace in named.items()]
        return page_of(f"{', '.join(named)}: filling up", films).encode()
    writers = {".gif": _gif, ".apng": _apng, ".mp4": _mp4}
    with drawing_in(look):
        return writers[suffix.lower()](list(frames(named, look)), seconds_per_frame)


def frames(traces: Mapping[str, Trace], look: Look) -> Iterator[Picture]:
    """One picture a moment, (height, width, 3) bytes: the heatmaps up to it, the rest empty, and its number."""
    figure = draw_heatmap(traces, look.order, replace(style_named(look.style), sentence=False))
    canvas: Any = FigureCanvasAgg(figure)  # its methods carry no annotations
    wide, high = figure.get_size_inches()
    figure.set_dpi(min(DOTS_PER_INCH, (MOST_PIXELS / (len(moments(traces)) * wide * high)) ** 0.5))
    words = figure.suptitle(" ", x=0.99, ha="right", fontsize="medium", weight="bold")  # has a line to itself
    canvas.draw()
    figure.set_layout_engine("none")  # what was laid out once stays where it is
    rows = _rows_by_frame(figure, traces)
    seen = moments(traces)
    what = "refresh" if any(len(trace.refreshes) == len(seen) for trace in traces.values()) else "moment"
    for artist in (words, *(mesh for part in rows.values() for mesh in part)):
        artist.set_animated(True)  # left out when the whole is drawn, and added below: only what is new is drawn
    canvas.draw()
    so_far = canvas.copy_from_bbox(figure.bbox)
    for at, tokens in enumerate(seen):
        canvas.restore_region(so_far)
        for mesh in rows.get(at, []):
            mesh.axes.draw_artist(mesh)
        so_far = canvas.copy_from_bbox(figure.bbox)
        words.set_text(f"{what} {at + 1} of {len(seen)}, {tokens:,} tokens seen")
        figure.draw_artist(words)
        yield np.asarray(canvas.buffer_rgba())[..., :3].copy()


def moments(traces: Mapping[str, Trace]) -> list[int]:
    """The tokens seen at each frame: at every refresh of a single run, and where any of several was refreshed."""
    counted = [Counter(trace.refreshes["tokens_seen"].tolist()) for trace in traces.values()]
    return sorted(functools.reduce(operator.or_, counted).elements())


def _rows_by_frame(figure: Any, traces: Mapping[str, Trace]) -> dict[int, list[Any]]:
    """The drawn rows (see `drawing.draw_heatmap`) that each frame adds."""
    seen = moments(traces)
    frame_of = []  # for each panel, of each row
    for trace in traces.values():
        own = trace.refreshes["tokens_seen"].tolist()
        frame_of.append([bisect.bisect_left(seen, tokens) + own[:row].count(tokens) for row, tokens in enumerate(own)])
    rows: dict[int, list[Any]] = {}
    for mesh in (mesh for axes in figure.axes for mesh in axes.collections):
        panel, _, row = str(mesh.get_gid() or "").removeprefix("panel-").partition("-row-")
        if panel and row:
            rows.setdefault(frame_of[int(panel)][int(row)], []).append(mesh)
    return rows


def _gif(pictures: list[Picture], seconds: float) -> bytes:
    # One palette for all: a palette a frame makes colours flicker.
    palette = Image.fromarray(pictures[-1]).quantize(255, method=Image.Quantize.MEDIANCUT)
    colours = np.array(palette.getpalette(), np.uint8).reshape(-1, 3)
    colours[colours.min(axis=1) > 240] = 255  # Pillow takes one of several whites, and not always the white one
    palette.putpalette(colours.tobytes())
    images = [Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    return _together(images, "GIF", duration=round(1000 * seconds), loop=0, optimize=False, disposal=1)


def _apng(pictures: list[Picture], seconds: float) -> bytes:
    return _together([Image.fromarray(picture) for picture in pictures], "PNG", duration=round(1000 * seconds), loop=0)


def _together(images: list[Image.Image], kind: str, **given: Any) -> bytes:
    buffer = io.BytesIO()
    images[0].save(buffer, kind, save_all=True, append_images=images[1:], **given)
    return buffer.getvalue()


def _mp4(pictures: list[Picture], seconds: float) -> bytes:
    try:
        import av
    except ImportError:
        raise UserError("MP4 needs the package av: pip install av. Or choose .gif or .apng.") from None
    height, width = (2 * (side // 2) for side in pictures[0].shape[:2])  # the codec takes even sides only
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as film:
        stream: Any = film.add_stream("libx264", rate=Fraction(seconds).limit_denominator(1000) ** -1)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "18"}
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture[:height, :width]), format="rgb24")
            for packet in stream.encode(frame):
                film.mux(packet)
        for packet in stream.encode():
            film.mux(packet)
    return buffer.getvalue()
