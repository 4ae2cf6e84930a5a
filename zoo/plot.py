"""Pictures of comparisons; the only file that knows of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# Okabe and Ito's colours and a marker each: told apart without colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw_curves(
    curves: Sequence[tuple[str, Sequence[tuple[int, float]]]],
    path: str | Path,
    *,
    entropies: Mapping[str, float],
    title: str,
) -> None:
    """Validation bits per byte against training tokens, one line an arm, as a PNG.

    Args:
        curves: (arm, (tokens, bits) pairs) of every arm to draw; none of them empty.
        path: where to write.
        entropies: dashed lines of what counting alone reaches, by name.
        title: the sentence that says what was held equal.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (arm, points) in enumerate(curves):
        tokens, bits = zip(*points)
        axes.plot(
            tokens,
            bits,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=1.6,
            label=f"{arm}: {bits[-1]:.3f}",
        )
    names = {"unigram": "unigram entropy", "bigram": "entropy given the token before"}
    for name, bits in entropies.items():
        axes.axhline(bits, color="#666666", linestyle="--", linewidth=0.9)
        axes.annotate(
            f"{names[name]} {bits:.2f}",
            (1, bits),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#444444",
        )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("validation bits per byte")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Validation bits per byte under one budget", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(title, fontsize=7, color="#444444", wrap=True)
    if curves:
        # Above the axes, where it hides nothing.
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    figure.savefig(path)


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
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        axes.plot(*zip(*points), **style, linewidth=1.6, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({tokens for _, points in lines for tokens, _ in points})
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axhline(1.0, color="#666666", linestyle="--", linewidth=0.9)
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(note, fontsize=7, color="#444444", wrap=True)
    figure.savefig(path)
