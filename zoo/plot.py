"""Pictures of comparisons; the only file that knows of matplotlib."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Okabe and Ito's colours and a marker each: told apart without colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# Where a logarithmic axis may have ticks within a power of ten: the first of these that gives it three.
DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))

UNITS = {"bpb": "bits/byte", "loss": "nats/label"}
# Stands for the page's own text colour in an SVG; no drawn colour is this one.
_INK = "#010203"


@dataclass(frozen=True)
class Line:
    """One arm of a chart.

    Attributes:
        name: in the legend.
        points: (x, y) pairs, at least one.
        band: (low, high) for every point, drawn as an area around a line and as a bar at a single point; or nothing.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Grid:
    """Figures by two things at once.

    Attributes:
        columns, rows: their names, along x and y; the first row is drawn on top.
        cells: one figure for each row and column, in [0, 1]; None: there is none.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A picture, before it is drawn.

    Attributes:
        name: of its file, unique in a report.
        title, xlabel, ylabel: words.
        lines: one an arm; none where there is a grid.
        levels: dashed lines across, by name.
        log: the x axis is logarithmic.
        ticks: it has a tick at every point, and no others; for few points, the same of every line.
        grid: cells in colour, with their figures, instead of lines.
    """

    name: str
    title: str
    xlabel: str
    ylabel: str
    lines: tuple[Line, ...]
    levels: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    ticks: bool = False
    grid: Grid | None = None


def draw_chart(chart: Chart, path: str | Path) -> None:
    """A chart as a PNG."""
    _figure(chart).savefig(path, dpi=150)


def chart_svg(chart: Chart) -> str:
    """A chart as an SVG element for a page: text as text, in the page's own colour, on no background of its own."""
    from matplotlib import rc_context

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    out = io.StringIO()
    with rc_context({**dict.fromkeys(inks, _INK), "svg.fonttype": "none", "svg.hashsalt": chart.name}):
        names = ("Creator", "Date", "Format", "Type")
        _figure(chart, ink=_INK).savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(names))
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Several of them stand on one page, where a name may be there once.
    svg = re.sub(r'id="', f'id="{chart.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{chart.name}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', _opening(chart), svg, count=1, flags=re.DOTALL)
    return svg.replace(_INK, "currentColor")


def _opening(chart: Chart) -> str:
    label = html.escape(f"{chart.title}: {chart.ylabel} against {chart.xlabel}", quote=True).replace("\\", "")
    return (
        rf'<svg role="img" aria-label="{label}" viewBox="\g<1>" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )


def style_of(index: int) -> tuple[str, str]:
    """The colour and the marker of a chart's line, counted from 0; no two of 49 are alike."""
    return COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def log_places(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis from ``low`` to ``high``, both above 0; none where nothing round lies between."""
    found: list[float] = []
    for digits in DIGITS:
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(found) >= 3:
            break
    return found


def _figure(chart: Chart, ink: str = "black") -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if chart.grid is not None:
        _draw_grid(axes, chart, chart.grid)
        return figure
    for index, line in enumerate(chart.lines):
        colour, marker = style_of(index)
        colour = ink if colour == "#000000" else colour  # black is lost on a dark page
        style = {"color": colour, "marker": marker, "markersize": 4.5}
        x, y = zip(*line.points)
        axes.plot(x, y, **style, linewidth=1.6, label=line.name)
        if line.band and len(x) > 1:
            low, high = zip(*line.band)
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        elif line.band:
            axes.vlines(x, *zip(*line.band), color=colour, linewidth=1.2)
    for name, value in chart.levels.items():
        axes.axhline(value, color="#777777", linestyle="--", linewidth=0.9)
        axes.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    if chart.log:
        axes.set_xscale("log")
        places = log_places(*axes.get_xlim()) or sorted({x for line in chart.lines for x, _ in line.points})
        axes.set_xticks(places, [short(place) for place in places])
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    if max(y for line in chart.lines for _, y in line.points) >= 1e4:  # else a lone 1e6 would stand over the axis
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    if chart.ticks:
        places = sorted({x for line in chart.lines for x, _ in line.points})
        axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # Above the axes, where it hides nothing.
    columns = 2 if max(len(line.name) for line in chart.lines) <= 26 else 1
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, fontsize=9)
    return figure


def _draw_grid(axes: Any, chart: Chart, grid: Grid) -> None:
    values = [[math.nan if value is None else value for value in row] for row in grid.cells]
    axes.pcolormesh(values, cmap="Blues", vmin=0, vmax=1, edgecolors="#999999", linewidth=0.4)
    for row, cells in enumerate(grid.cells):
        for column, value in enumerate(cells):
            words = "none" if value is None else f"{value:.2f}"
            # Paper of its own under each cell, so its ink does not follow the page's.
            ink = "#777777" if value is None else "white" if value > 0.6 else "#111111"
            axes.text(column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks([column + 0.5 for column in range(len(grid.columns))], grid.columns)
    axes.set_yticks([row + 0.5 for row in range(len(grid.rows))], grid.rows)
    axes.invert_yaxis()
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    axes.set_title(chart.title, fontsize=10, loc="left")


def _first_digit(value: float) -> int:
    return round(value / 10 ** math.floor(math.log10(value)))


def short(value: float) -> str:
    """``1.5M`` for 1,500,000."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def draw_by_length(
    lines: Sequence[tuple[str, Sequence[tuple[int, float]]]], path: str | Path, *, ylabel: str, title: str, note: str
) -> None:
    """A figure against the number of tokens in a row, both on logarithmic scales, one line a name, as a PNG.

    Args:
        lines: (name, (tokens, value) pairs), values above 0.
        path: where to write.
        ylabel: what the values are.
        title: what the picture shows.
        note: what it was measured with.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(lines):
        colour, marker = style_of(index)
        axes.plot(*zip(*points), color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({tokens for _, points in lines for tokens, _ in points})
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if _first_digit(value) in (2, 5) else "")
    axes.axhline(1.0, color="#666666", linestyle="--", linewidth=0.9)
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(note, fontsize=7, color="#444444", wrap=True)
    figure.savefig(path)
