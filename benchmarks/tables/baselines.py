"""Tables of every method's errors on the same measured cells, from rollout records and baselines_SET.jsonl.

    python -m benchmarks.tables.baselines             fp8plan and AIConfigurator beside the goal
    python -m benchmarks.tables.baselines SET [...]   every method on one set of rollouts

Runs where fp8plan runs; AIConfigurator is not needed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from benchmarks.tables.cells import Accuracy, accuracy, cell_of, merged, noise_floor
from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import validate

# Set of measured rollouts -> its files in profiles/. Fits have seen those of "families" only.
SETS = {
    "validation": ("h200_sxm/vllm-0.26.0/validation/rollouts.jsonl",),
    "families": ("h200_sxm/vllm-0.26.0/families/rollouts.jsonl",),
    "held_out": ("h200_sxm/vllm-0.26.0/families/held_out.jsonl",),
    "h100": tuple(
        f"h100_sxm/vllm-0.26.0/{name}.jsonl"
        for name in ("validation/rollouts", "validation/anchored", "reports/rollouts")
    ),
    "h100_newer": ("h100_sxm/vllm-0.33.0/validation/rollouts.jsonl",),
    "h200_newer": ("h200_sxm/vllm-0.33.0/validation/rollouts.jsonl",),
}
HELD_OUT = ("validation", "held_out", "h100", "h100_newer", "h200_newer")
GOAL = 0.02, 2.0  # of makespans, and of speed-ups in points
MOST_REQUESTS = 512  # of a rollout that counts for the goal: vLLM's largest CUDA graph
PRODUCT = "**fp8plan**"
LABELS = {
    "datasheet profile": "fp8plan, uncalibrated (datasheet profile)",
    "roofline": "datasheet roofline on fp8plan's schedule",
    "aic-vllm-estimate": "AIConfigurator, vLLM tables: its estimate",
    "aic-vllm-simulated": "- its step times on fp8plan's schedule",
    "aic-vllm+trtllm-estimate": "AIConfigurator, vLLM tables mended by TRT-LLM's: its estimate",
    "aic-vllm+trtllm-simulated": "- its step times on fp8plan's schedule",
    "aic-vllm+sglang-estimate": "AIConfigurator, vLLM tables mended by SGLang's: its estimate",
    "aic-vllm+sglang-simulated": "- its step times on fp8plan's schedule",
    "aic-sglang-estimate": "AIConfigurator, SGLang tables: its estimate",
    "aic-sglang-simulated": "- its step times on fp8plan's schedule",
}
# The methods that are compared with the goal, each by AIConfigurator's step times on fp8plan's schedule.
PEERS = {
    "aic-vllm-simulated": "AIConfigurator, vLLM tables as shipped",
    "aic-vllm+trtllm-simulated": "AIConfigurator, mended by TRT-LLM's rows",
    "aic-vllm+sglang-simulated": "AIConfigurator, mended by SGLang's rows",
}
Row = Mapping[str, Any]
Predictions = Mapping[tuple[Any, ...], float | None]  # cell -> seconds, None where refused


def records(name: str) -> list[Record]:
    """The measured rollouts of a set. Raises ConfigError for an unknown one."""
    if name not in SETS:
        raise ConfigError(f"there is no set {name!r}; allowed: {', '.join(SETS)}")
    return [record for file in SETS[name] for record in read_records(profiles_path() / file)]


def results(name: str) -> Path:
    """The file of what the methods answered for a set."""
    return Path(__file__).parents[1] / "results" / f"baselines_{name}.jsonl"


def standing(validated: Mapping[str, Sequence[Row]]) -> str:
    """A table of fp8plan and its peers beside the goal, by GPU and vLLM version, in Markdown.

    validated: set -> fp8plan's validation of its records, `Validation.records`; at least the sets of HELD_OUT
    """
    larger = {x.group for name in HELD_OUT for x in records(name) if len(x.batch.responses) > MOST_REQUESTS}
    engines, answers = defaultdict[tuple[str, str], list[Row]](list), defaultdict[str, dict[Any, Any]](dict)
    for name in HELD_OUT:
        for row in validated[name]:
            if row["group"] not in larger:
                engines[row["gpu"], row["engine_version"]].append(row)
        for method, predicted in predictions(jsonl.rows(results(name))).items():
            answers[method].update(predicted)
    body = []
    for engine, rows in engines.items():
        cells = merged(rows)
        peers = {label: with_predictions(cells, answers[method], method) for method, label in PEERS.items()}
        for label, own in {PRODUCT: cells, **peers}.items():
            body.append([*engine, label, *_beside_the_goal(own)])
        answered = {cell_of(cell) for own in peers.values() for cell in own if cell["predicted_s"] is not None}
        same = [cell for cell in cells if cell_of(cell) in answered]
        if len(same) < len(cells):
            body.append([*engine, f"{PRODUCT}, where AIConfigurator answers", *_beside_the_goal(same)])
    head = ["GPU", "vLLM", "method", "cells", "makespan MAPE", "speed-up error, points", "within 2% and 2 points"]
    note = (
        f"Held-out rollouts of up to {MOST_REQUESTS} requests. AIConfigurator's are its step times on fp8plan's "
        "schedule."
    )
    return f"{markdown.table(head, body)}\n\n{note}"


def _beside_the_goal(cells: Sequence[Row]) -> list[str]:
    reached = accuracy(cells)
    answered, points = f"{reached.answered} of {len(cells)}", reached.speedup_mae_points
    if not reached.answered:
        return [answered, "-", "-", "no"]
    near = reached.makespan_mape <= GOAL[0] and points is not None and points <= GOAL[1]
    shown = "-" if points is None else f"{points:.1f}"
    return [answered, f"{reached.makespan_mape:.1%}", shown, "yes" if near else "no"]


def table(rows: Sequence[Row], lines: Sequence[Row]) -> str:
    """The table in Markdown.

    rows:  fp8plan's validation of the records, `Validation.records`; repeats of a cell count as one, with their median
    lines: of baselines_SET.jsonl
    """
    cells, noise = merged(rows), noise_floor(rows) or 0.0
    names = [name for name in PRESETS if any(cell["precision"] == name for cell in cells)]
    ours, warned = accuracy(cells, noise), dict.fromkeys(LABELS, 0)
    for line in lines:
        warned[line["method"]] += "warning" in line
    body = [_columns(PRODUCT, ours, len(cells), names)]
    for method, predicted in predictions(lines).items():
        reached = accuracy(with_predictions(cells, predicted, method), noise)
        body.append(_columns(LABELS[method], reached, len(cells), names, warned[method]))
    head = ["method", "cells answered", "makespan MAPE", "worst", "bias", *names]
    head += ["speed-up error, points", "worst", "fastest named right"]
    made_by = {line["by"].partition(", tables of ")[::2] for line in lines if line["method"].startswith("aic-")}
    releases, tables = (sorted(set(parts)) for parts in zip(*made_by, strict=True))
    dates = sorted({line["date"] for line in lines})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    notes = (
        f"{len(cells)} cells in {ours.groups} groups; repeated runs count as their median. A precision's column has "
        "the MAPE of its cells. *Fastest named right* counts the groups that were answered in full. A tie is within "
        f"{noise:.1%}, the median spread of repeated runs on one card. *Warned*: AIConfigurator's answer adds that the "
        "batch exceeds the KV cache and that the answer is inaccurate. "
        f"Baselines of {when}, by {'; '.join(releases)}. Its tables: {'; '.join(tables)}."
    )
    return f"{markdown.table(head, body)}\n\n{notes}"


def predictions(lines: Sequence[Row]) -> dict[str, Predictions]:
    """Method -> its predictions, in the order of LABELS."""
    answers: dict[str, dict[tuple[Any, ...], float | None]] = {}
    for line in lines:
        answers.setdefault(line["method"], {})[cell_of(line)] = line["predicted_s"]
    return {name: answers[name] for name in LABELS}


def with_predictions(cells: Sequence[Row], predicted: Predictions, method: str) -> list[dict[str, Any]]:
    """The cells with another method's predictions. Raises ConfigError when it was not asked about each of them."""
    missing = [cell for cell in cells if cell_of(cell) not in predicted]
    if missing:
        first = f"{missing[0]['group']}, {missing[0]['precision']}"
        raise ConfigError(f"{method} lacks {len(missing)} of {len(cells)} cells, first {first}; type: make baselines")
    return [{**cell, "predicted_s": predicted[cell_of(cell)]} for cell in cells]


def _columns(label: str, reached: Accuracy, cells: int, names: Sequence[str], warned: int = 0) -> list[str]:
    answered = f"{reached.answered} of {cells}" + (f", {warned} warned" if warned else "")
    if not reached.answered:
        return [label, answered, *["-"] * (len(names) + 6)]
    by_name = [f"{reached.mape_by_precision[name]:.1%}" if name in reached.mape_by_precision else "-" for name in names]
    mean, worst = reached.speedup_mae_points, reached.speedup_worst_points
    points = ["-", "-"] if mean is None or worst is None else [f"{mean:.1f}", f"{worst:.1f}"]
    makespan = [f"{reached.makespan_mape:.1%}", f"{reached.makespan_worst:.1%}", f"{reached.makespan_bias:+.1%}"]
    right = f"{reached.ranked_right} of {reached.ranked}" if reached.ranked else "-"
    return [label, answered, *makespan, *by_name, *points, right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(SETS))
    names = parser.parse_args().sets
    try:
        _print(names)
    except ConfigError as error:
        parser.error(str(error))


def _print(names: Sequence[str]) -> None:
    validated = {name: validate(records(name)).records for name in names or HELD_OUT}
    print("\n\n".join([table(validated[x], jsonl.rows(results(x))) for x in names] or [standing(validated)]))


if __name__ == "__main__":
    main()
