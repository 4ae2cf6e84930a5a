"""The sections that page and Markdown of a comparison show: sentences and tables, from its numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.comparison.charts import cost_charts, curve_charts, grid_charts, length_charts, measured_charts, over_seeds
from zoo.comparison.plan import CONDITIONS
from zoo.comparison.provenance import counted
from zoo.page import Section, Table
from zoo.plot import UNITS

Content = Mapping[str, Any]
NEITHER = "neither has learned the task"
IDLE = 0.02  # a task's loss no further below that of answers by frequency is no answer
HELD = {"params": "parameters", "flops": "training FLOPs", "state": "state"}


def sections(content: Content) -> list[Section]:
    """The report, part by part."""
    found = [
        Section(
            "What was held equal",
            (content["held"] + ".", _ledger_note(content), *verdicts(content)),
            ledger_table(content),
        ),
        Section("Results", caveats(content), results_table(content)),
    ]
    charts = curve_charts(content)
    if charts:
        found.append(Section("Curves", (_curve_note(content),), charts=charts))
        found.append(Section("Quality against what it costs", charts=cost_charts(content)))
    if content["rates"]:
        found.append(Section("Learning rates", (_grid_note(content),), grid_table(content), grid_charts(content)))
    if content["lengths"]:
        charts = length_charts(content)
        found.append(Section("Rows longer than in training", (_length_note(content),), length_table(content), charts))
        found.append(Section("Loss by position", (_position_note(content),), position_table(content)))
    found.append(Section("By context", (_context_note(content),), context_table(content)))
    if any(arm["measured"] for arm in content["arms"]):
        charts = measured_charts(content)
        found.append(Section("Measured by context", (_measured_note(content),), measured_table(content), charts))
    found.append(Section("Conditions", table=condition_table(content)))
    found += [Section(f"Layers of {arm['name']}", (_arm_line(arm),), layer_table(arm)) for arm in content["arms"]]
    found.append(Section("Runs", ("Each can be trained again:",), runs_table(content)))
    found.append(Section("Provenance", table=provenance_table(content)))
    return found


def verdicts(content: Content) -> list[str]:
    """One sentence a pair."""
    unit, lines = UNITS[content["metric"]], []
    for pair in content["pairs"]:
        if pair["diff"] is None:
            lines.append(f"{pair['b']} against {pair['a']}: {pair['verdict']}.")
            continue
        span = f", 95 % interval {pair['ci95'][0]:+.4f} to {pair['ci95'][1]:+.4f}" if pair["ci95"] else ""
        lines.append(
            f"{pair['b']} against {pair['a']}: {pair['verdict']} ({pair['diff']:+.4f} {unit}{span}, "
            f"{pair['n']} paired seed{'s' if pair['n'] > 1 else ''})."
        )
    return lines


def caveats(content: Content) -> list[str]:
    """What the columns mean, and what to mistrust; written from the data."""
    arms, n = content["arms"], len(content["seeds"])
    done = sorted({arm["n"] for arm in arms})
    some = any(done) and done != [n]
    lines = [
        "Parameters without embedding and head. FLOPs: forward, per token, at the training context. State: per "
        f"sequence at {content['contexts'][0]:,} tokens."
    ]
    if n == 1:
        lines.append("One seed: there is no interval, so small differences rank nothing.")
    else:
        lines.append(
            f"± is the 95 % t interval over {n} seeds of the first weights; the order of the data is the same in all "
            "runs, so it does not cover other orders."
            + (" Two seeds make it very wide." if n == 2 or 2 in done else "")
            + (f" Not all have finished: arms have {done[0]} to {done[-1]} of the {n}." if some else "")
        )
    lines += _levels(content)
    at_once = max(arm["at_once"] for arm in arms)
    if at_once > 1:
        lines.append(
            f"Up to {at_once} runs shared a device: their speeds are not the architectures', so none is shown. "
            "--measure times each arm alone."
        )
    if len(_trained_with(content)) > 1:
        lines.append("NOT all runs were trained with the same code, torch and device: the last table says with which.")
    if len({arm["architecture"]["tie"] for arm in arms}) > 1:
        lines.append("Some arms tie embedding and head and some do not: their total parameters do not compare.")
    for name, values in content["differing"].items():
        shown = "; ".join(f"{arm['name']}: {value}" for arm, value in zip(arms, values))
        lines.append(f"NOT equal, as allowed: {name.replace('_', ' ')} ({shown}).")
    lines += [
        f"{arm['name']}, seed {run['seed']}: {run['status']} ({run['error']}); it is in no mean."
        for arm in arms
        for run in arm["runs"]
        if run["status"] != "finished"
    ]
    lines += [f"{arm['name']} is left out: it {arm['reason']}." for arm in content["left_out"]]
    return lines + [f"{arm['name']}: its best learning rate is at the edge of the grid." for arm in arms if _edge(arm)]


def _levels(content: Content) -> list[str]:
    """What counting reaches, and which arms of a task have not got beyond it."""
    levels = content["entropies"]
    if "unigram" in levels:
        return [
            f"The validation tokens themselves, in bits per byte: unigram entropy {levels['unigram']:.4f}, entropy "
            f"given the token before {levels['bigram']:.4f}."
        ]
    if "answers" not in levels:
        return []
    lines = [f"To answer by frequency alone, whatever is asked, costs {levels['answers']:.4f} nats per label."]
    idle = idle_arms(content["arms"], levels)
    if idle:
        lines.append(
            f"Not {IDLE:.0%} better than that: {' · '.join(idle)}. They have not learned the task in this budget, and "
            "what parts them ranks nothing."
        )
    return lines


def idle_arms(arms: Sequence[Content], entropies: Mapping[str, float]) -> list[str]:
    """Arms that answer a task no better than by how often each answer occurs.

    A sure sign that they have not learned it, and the only one looked for: to know which answers a row holds is better
    than frequency, and still no recall.
    """
    level = entropies.get("answers", 0.0)
    return [arm["name"] for arm in arms if arm["n"] and arm["mean"] > (1 - IDLE) * level] if level > 0 else []


def _edge(arm: Content) -> bool:
    trials = arm["learning_rate_grid"]
    factors = [trial["learning_rate"] for trial in trials]
    if any(trial["status"] in ("not run", "failed") for trial in trials):
        return False
    return len(factors) > 1 and arm["learning_rate"] in (min(factors), max(factors))


def results_table(content: Content) -> Table:
    """One row an arm."""
    unit = "val bits/byte" if content["metric"] == "bpb" else "val loss"
    held = HELD[content["held_quantity"]]
    columns = [("arm", True), ("sized by", True), (f"{held} against reference", False), ("parameters", False)]
    columns += [("FLOPs/token", False), ("state bytes", False), ("tokens/s", False), (unit, False)]
    first = content["arms"][0]["name"]
    several = len(content["arms"]) > 1
    columns += [(f"minus {first}", False)] if several else []
    columns += [("status", True)]
    pairs = {pair["b"]: pair for pair in content["pairs"]}
    rows = []
    for arm in content["arms"]:
        row = [arm["name"], arm["turned"], f"{arm['deviation']:+.2%}", number(arm["params"]["non_embedding"])]
        row += [number(arm["flops"]["per_token_forward"])]
        row += [number(arm["state_bytes"][str(content["contexts"][0])]), number(arm["tokens_per_second"])]
        row.append(plus_minus(arm["mean"], arm["half_interval"]))
        if several:
            pair = pairs.get(arm["name"])
            row.append("" if pair is None else _difference(pair))
        rows.append([*row, _status(arm)])
    blank = ["n/a"] * (len(columns) - 2)
    rows += [[arm["name"], *blank, f"left out: {arm['reason']}"] for arm in content["left_out"]]
    return Table(tuple(columns), rows)


def _difference(pair: Content) -> str:
    if pair["diff"] is None:
        return "n/a"
    half = (pair["ci95"][1] - pair["ci95"][0]) / 2 if pair["ci95"] else None
    return f"{pair['diff']:+.4f}" + ("" if half is None else f" ± {half:.4f}, {pair['verdict']}")


def _status(arm: Content) -> str:
    runs = arm["runs"]
    bad = [f"seed {run['seed']} {run['status']}: {run['error']}" for run in runs if run["status"] != "finished"]
    if len(runs) == 1:
        return bad[0].partition(" ")[2].partition(" ")[2] if bad else "finished"
    return "; ".join([f"{len(runs) - len(bad)} of {len(runs)} seeds finished", *bad])


def ledger_table(content: Content) -> Table:
    """What is held, marked and against the reference; and how far everything else moved from the first arm."""
    arms, context, by = content["arms"], str(content["contexts"][0]), content["held_quantity"]
    first = arms[0]
    names = {**HELD, "state": f"state at {int(context):,}"}
    columns = [("arm", True)]
    columns += [(f"{name} ({'held' if what == by else 'moved'})", False) for what, name in names.items()]
    columns += [("tokens (held)", False), (f"within {content['tolerance']:.1%}", True), ("seconds (moved)", False)]
    rows = []
    for arm in arms:
        amounts = [(each["params"]["non_embedding"], each["flops"]["per_token_forward"]) for each in (arm, first)]
        (own, flops), (own_first, flops_first) = amounts
        moved = {"params": share(own, own_first), "flops": share(flops, flops_first)}
        moved["state"] = share(arm["state_bytes"][context], first["state_bytes"][context])
        within = abs(arm["deviation"]) <= content["tolerance"]
        moved[by] = f"{'=' if within else '≠'} {arm['deviation']:+.2%}"
        seconds = share(arm["training_seconds"], first["training_seconds"])
        tokens = f"= {number(arm['tokens'])}" if arm["n"] else "n/a"
        rows.append([arm["name"], *moved.values(), tokens, "yes" if within else "NO", seconds])
    rows += [[arm["name"], *["n/a"] * (len(columns) - 3), "NO", "n/a"] for arm in content["left_out"]]
    return Table(tuple(columns), rows)


def grid_table(content: Content) -> Table:
    """Validation losses by factor, one row an arm."""
    columns = (("arm", True), *((f"x {factor:g}", False) for factor in sorted(content["rates"])), ("chosen", False))
    rows = []
    for arm in content["arms"]:
        losses = {t["factor"]: f"{t['loss']:.4f}" if t["loss"] is not None else t["status"] for t in _grid(arm)}
        chosen = f"{arm['learning_rate']:.3g}" if arm["n"] and arm["learning_rate"] else "n/a"
        rows.append([arm["name"], *(losses[factor] for factor in sorted(content["rates"])), chosen])
    return Table(columns, rows)


def _grid(arm: Content) -> list[Any]:
    return sorted(arm["learning_rate_grid"], key=lambda trial: trial["factor"])


def context_table(content: Content) -> Table:
    """FLOPs and state against the context, counted."""
    columns = [("arm", True)]
    columns += [(f"{what} at {t:,}", False) for what in ("FLOPs/token", "state bytes") for t in content["contexts"]]
    rows = [
        [arm["name"]]
        + [number(arm[key][str(t)]) for key in ("flops_by_context", "state_bytes") for t in content["contexts"]]
        for arm in content["arms"]
    ]
    return Table(tuple(columns), rows)


def length_table(content: Content) -> Table:
    """The validation score on rows of each length."""
    columns = [("arm", True)]
    columns += [(f"rows of {reading['tokens']:,} ({reading['name']})", False) for reading in content["lengths"]]
    rows = [
        [arm["name"], *(plus_minus(*over_seeds(arm, f"{r['name']}/{content['metric']}")) for r in content["lengths"])]
        for arm in content["arms"]
    ]
    return Table(tuple(columns), rows)


def position_table(content: Content) -> Table:
    """The loss by position in the longest rows, and how many labels that is taken from."""
    last = content["lengths"][-1]
    columns = (("arm", True), *((f"to {edge:,}", False) for edge in last["edges"]))
    rows = [
        [arm["name"], *(plus_minus(*over_seeds(arm, f"{last['name']}/loss_to_{edge}")) for edge in last["edges"])]
        for arm in content["arms"]
    ]
    finished = (run for arm in content["arms"] for run in arm["runs"] if run["status"] == "finished")
    scores = next((run["scores"] for run in finished), {})
    counts = [number(scores.get(f"{last['name']}/labels_to_{edge}")) for edge in last["edges"]]
    return Table(columns, [*rows, ["labels", *counts]])


def measured_table(content: Content) -> Table:
    """Throughput and memory of training steps, or why there is none."""
    columns = [("arm", True)]
    columns += [(f"{what} at {t:,}", False) for what in ("tokens/s", "peak GiB") for t in content["contexts"]]
    rows = []
    for arm in content["arms"]:
        found = {row["context"]: row for row in arm["measured"]}
        speeds, peaks = [], []
        for context in content["contexts"]:
            row = found.get(context)
            speeds.append("n/a" if row is None else row["reason"] or number(row["tokens_per_second"]))
            peak = None if row is None else row["peak_bytes"]
            peaks.append("n/a" if peak is None else f"{peak / 2**30:.2f}")
        rows.append([arm["name"], *speeds, *peaks])
    return Table(tuple(columns), rows)


def condition_table(content: Content) -> Table:
    """What every arm was trained under, and what differs."""
    rows = []
    for name in CONDITIONS:
        values = [f"{arm['name']}: {arm['conditions'][name]}" for arm in content["arms"]]
        same = name not in content["differing"]
        shown = content["arms"][0]["conditions"][name] if same else "; ".join(values)
        rows.append([name.replace("_", " "), "equal" if same else "DIFFERS, as allowed", shown])
    hashes = {run["order_hash"] for arm in content["arms"] for run in arm["runs"] if run["status"] == "finished"}
    shown = ", ".join(sorted(digest[:16] for digest in hashes)) or "no run finished"
    rows.append(["hash of the tokens read", "equal" if len(hashes) == 1 else "n/a" if not hashes else "DIFFERS", shown])
    return Table((("condition", True), ("in all arms", True), ("what", True)), rows)


def layer_table(arm: Content) -> Table:
    """One row a layer."""
    columns = (("layer", False), ("mixer", True), ("options", True), ("MLP", True))
    columns += (("parameters", False), ("FLOPs/token", False), ("state bytes", False))
    rows = [
        [
            str(row["number"]),
            row["mixer"],
            ", ".join(f"{name} {value}" for name, value in row["options"].items()),
            row["mlp"],
            *(number(row[name]) for name in ("parameters", "flops", "state")),
        ]
        for row in arm["layers"]
    ]
    return Table(columns, rows)


def runs_table(content: Content) -> Table:
    """One row a run, with its command."""
    columns = (("arm", True), ("seed", False), ("score", False), ("seconds", False), ("peak memory", False))
    columns += (("command", True),)
    rows = [
        [
            arm["name"],
            str(run["seed"]),
            plus_minus(run[content["metric"]], None),
            number(run["seconds"]),
            number(run["peak_bytes"]),
            run["command"] or run["status"],
        ]
        for arm in content["arms"]
        for run in arm["runs"]
    ]
    return Table(columns, rows)


def _trained_with(content: Content) -> list[str]:
    return counted(run["trained_with"] for arm in content["arms"] for run in arm["runs"])


def provenance_table(content: Content) -> Table:
    """What repeats it."""
    rows = [["command", content["command"]], ["recipe", content["recipe"]]]
    rows += [["settings for all", " ".join(content["overrides"]) or "none"]]
    rows += [["seeds", ", ".join(map(str, content["seeds"]))], ["data hash", content["data_hash"] or "a task"]]
    rows += [["runs trained with", words] for words in _trained_with(content)]
    rows += [[name, value] for name, value in content["versions"].items()]
    return Table((("what", True), ("which", True)), rows)


# --------------------------------------------------------------------------------------------------------------- words
def _ledger_note(content: Content) -> str:
    return (
        f"= is held: the tokens exactly, {HELD[content['held_quantity']]} as a deviation from the recipe's own model, "
        f"{content['reference']['pattern']}. What moved is told as a deviation from {content['arms'][0]['name']}."
    )


def _curve_note(content: Content) -> str:
    band = (
        "Lines are means over seeds, areas reach from the lowest to the highest seed. " if content["seeds"][1:] else ""
    )
    return band + (
        "FLOPs are the model's, three times the forward."
        + (
            " Seconds are tokens over the mean rate: without warm-up, validation and saving, on the device that the "
            "provenance names."
            if all(arm["tokens_per_second"] for arm in content["arms"] if arm["n"])
            else ""
        )
    )


def _grid_note(content: Content) -> str:
    return (
        f"Every arm tried the same factors on its recipe's rate, on a tenth of the tokens with seed "
        f"{content['rate_seed']}, which is reported nowhere else, and kept the one with the lowest validation loss. "
        "The validation text is the one that is reported."
    )


def _context_note(content: Content) -> str:
    note = f"Counted, not measured. All arms were trained and validated on rows of {content['train_context']:,} tokens"
    return note + ("." if content["lengths"] else "; how well they read longer ones was not tried.")


def _length_note(content: Content) -> str:
    return (
        "The trained models validated once more, on rows of other lengths than the "
        f"{content['train_context']:,} tokens they were trained on. Longer rows cut fewer documents, so a model that "
        "makes nothing of the longer past can still gain from labels that have more of it."
        + (" Areas in these charts are the 95 % intervals." if content["seeds"][1:] else "")
    )


def _position_note(content: Content) -> str:
    last = content["lengths"][-1]
    return (
        f"Nats per token in rows of {last['tokens']:,}, by how many tokens of its document a label has before it: up "
        f"to each number, from the one before. Beyond {content['train_context']:,} no label was trained on. The "
        "documents that reach so far are not those of the first columns."
    )


def _measured_note(content: Content) -> str:
    return (
        f"A few training steps each of about {content['batch_tokens']:,} random tokens in rows of that length (at "
        "least one row), not compiled, on the device that the provenance names; peak memory is what PyTorch had "
        "allocated on a GPU, weights and optimizer states included."
    )


def _arm_line(arm: Content) -> str:
    return (
        f"{arm['canonical']}: {arm['params']['total']:,} parameters, {arm['params']['non_embedding']:,} without "
        "embedding and head."
    )


def number(value: float | None) -> str:
    """A whole number as people read it."""
    return "n/a" if value is None else f"{value:,.0f}"


def plus_minus(mean: float | None, half: float | None) -> str:
    """A score, and its interval where there is one."""
    return "n/a" if mean is None else f"{mean:.4f}" + ("" if half is None else f" ± {half:.4f}")


def share(value: float | None, of: float | None) -> str:
    """A signed deviation in percent."""
    return "n/a" if value is None or not of else f"{value / of - 1:+.1%}"
