"""The charts of a comparison, from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from zoo.comparison.intervals import interval
from zoo.plot import UNITS, Chart, Line

LEVELS = {"unigram": "unigram entropy", "bigram": "given the token before", "answers": "answers by frequency"}


def curve_charts(content: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The validation score against tokens, training FLOPs and training seconds."""
    score = f"validation {UNITS[content['metric']]}"
    levels = {LEVELS[name]: bits for name, bits in content["entropies"].items()}
    arms = [arm for arm in content["arms"] if arm["n"]]
    scales: dict[tuple[str, str], Callable[[Mapping[str, Any]], float]] = {
        ("curves", "training tokens"): lambda arm: 1.0,
        ("flops", "training FLOPs"): lambda arm: 3 * arm["flops"]["per_token_forward"],
    }
    if all(arm["tokens_per_second"] for arm in arms):
        scales["seconds", "training seconds"] = lambda arm: 1 / arm["tokens_per_second"]
    if not arms:
        return ()
    return tuple(
        Chart(name, f"Score against {xlabel}", xlabel, score, tuple(_curve(arm, scale(arm)) for arm in arms), levels)
        for (name, xlabel), scale in scales.items()
    )


def _curve(arm: Mapping[str, Any], scale: float) -> Line:
    """The mean over seeds, and the range between the lowest and the highest."""
    finished = [run["curve"] for run in arm["runs"] if run["status"] == "finished"]
    curves = [{tokens: value for tokens, value in curve if value is not None} for curve in finished]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[tokens] for curve in curves] for tokens in shared]
    points = tuple((tokens * scale, math.fsum(at) / len(at)) for tokens, at in zip(shared, values))
    return Line(arm["name"], points, tuple((min(at), max(at)) for at in values) if len(curves) > 1 else ())


def cost_charts(content: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The final score against state bytes and parameters."""
    context = content["contexts"][0]
    score = f"validation {UNITS[content['metric']]}"

    def chart(name: str, xlabel: str, cost: Any, log: bool) -> Chart:
        lines = []
        for arm in (arm for arm in content["arms"] if arm["n"]):
            half = arm["half_interval"]
            band = () if half is None else ((arm["mean"] - half, arm["mean"] + half),)
            lines.append(Line(arm["name"], ((cost(arm), arm["mean"]),), band))
        return Chart(name, f"Score against {xlabel}", xlabel, score, tuple(lines), log=log)

    return (
        chart("state", f"state bytes at {context:,} tokens", lambda arm: arm["state_bytes"][str(context)], True),
        chart("parameters", "parameters without embedding and head", lambda arm: arm["params"]["non_embedding"], False),
    )


def grid_charts(content: Mapping[str, Any]) -> tuple[Chart, ...]:
    """Validation loss against the learning rate."""
    lines = []
    for arm in content["arms"]:
        points = tuple(
            (t["learning_rate"], t["loss"])
            for t in sorted(arm["learning_rate_grid"], key=lambda trial: trial["factor"])
            if t["status"] == "finished"
        )
        lines += [Line(arm["name"], points)] if points else []
    if not lines:
        return ()
    label = "validation nats/label"
    return (Chart("rates", "Loss against learning rate", "learning rate", label, tuple(lines), log=True),)


def over_seeds(arm: Mapping[str, Any], figure: str) -> tuple[float | None, float | None]:
    """Mean and half interval of a figure of the readings, over the runs that finished with it."""
    done = [run["scores"].get(figure) for run in arm["runs"] if run["status"] == "finished"]
    return interval([value for value in done if value is not None])


def length_charts(content: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The score against the length of the rows, and the loss against the position in the longest."""
    lengths = content["lengths"]
    if not lengths:
        return ()
    score = f"validation {UNITS[content['metric']]}"
    by_length = {reading["tokens"]: f"{reading['name']}/{content['metric']}" for reading in lengths}
    last = lengths[-1]
    by_position = {edge: f"{last['name']}/loss_to_{edge}" for edge in last["edges"]}
    charts = (
        ("lengths", "Score against the length of rows", "tokens in a row", score, by_length),
        ("positions", "Loss against position", "tokens of the document so far, up to", "nats/token", by_position),
    )
    found = []
    for name, title, xlabel, ylabel, figures in charts:
        lines = [line for arm in content["arms"] if (line := _figure_line(arm, figures)) is not None]
        found += [Chart(name, title, xlabel, ylabel, tuple(lines), log=True, ticks=True)] if lines else []
    return tuple(found)


def _figure_line(arm: Mapping[str, Any], figures: Mapping[int, str]) -> Line | None:
    points, band = [], []
    for x, figure in figures.items():
        mean, half = over_seeds(arm, figure)
        if mean is not None:
            points.append((x, mean))
            band += [(mean - half, mean + half)] if half is not None else []
    return Line(arm["name"], tuple(points), tuple(band) if len(band) == len(points) else ()) if points else None


def measured_charts(content: Mapping[str, Any]) -> tuple[Chart, ...]:
    """Throughput and peak memory of training steps against the context."""
    kinds = (
        ("throughput", "Throughput against context", "tokens/s in training", "tokens_per_second", 1.0),
        ("memory", "Peak memory against context", "GiB allocated at the peak of a step", "peak_bytes", 2.0**30),
    )
    found = []
    for name, title, ylabel, key, unit in kinds:
        lines = []
        for arm in content["arms"]:
            points = tuple((row["context"], row[key] / unit) for row in arm["measured"] if row[key] is not None)
            lines += [Line(arm["name"], points)] if points else []
        found += [Chart(name, title, "tokens in a row", ylabel, tuple(lines), log=True, ticks=True)] if lines else []
    return tuple(found)
