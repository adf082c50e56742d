"""One table of every method's errors on the same measured cells, from rollout records and baselines.jsonl.

`python -m benchmarks.tables.baselines RECORDS [--baselines FILE]` prints it. Runs where fp8plan runs; AIConfigurator is
not needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import Accuracy, accuracy, cell_of, merged, noise_floor, validate

NAMES = ("baselines", "baselines_families", "baselines_held_out")
BASELINES, OF_FAMILIES, OF_HELD_OUT = (Path(__file__).parents[1] / "results" / f"{name}.jsonl" for name in NAMES)
PRODUCT = "**fp8plan**"
LABELS = {
    "datasheet profile": "fp8plan, uncalibrated (datasheet profile)",
    "roofline": "datasheet roofline on fp8plan's schedule",
    "aic-vllm-estimate": "AIConfigurator, vLLM tables: its estimate",
    "aic-vllm-either": "- its estimate, simulated where it refuses or warns",
    "aic-vllm-simulated": "- its step times on fp8plan's schedule",
    "aic-sglang-estimate": "AIConfigurator, SGLang tables: its estimate",
    "aic-sglang-either": "- its estimate, simulated where it refuses or warns",
    "aic-sglang-simulated": "- its step times on fp8plan's schedule",
}
Predictions = Mapping[tuple[Any, ...], float | None]  # cell -> seconds, None where refused


def table(rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown.

    rows:  fp8plan's validation of the records, `Validation.records`; repeats of a cell count as one, with their median
    lines: of baselines.jsonl
    """
    cells, noise = merged(rows), noise_floor(rows) or 0.0
    names = [name for name in PRESETS if any(cell["precision"] == name for cell in cells)]
    ours, warned = accuracy(cells, noise), dict.fromkeys(LABELS, 0)
    for line in lines:
        warned[line["method"]] += "warning" in line
    body = [_columns(PRODUCT, ours, len(cells), names)]
    for method, predicted in predictions(lines).items():
        found = accuracy(with_predictions(cells, predicted, method), noise)
        body.append(_columns(LABELS[method], found, len(cells), names, warned[method]))
    head = ["method", "cells answered", "makespan MAPE", "worst", "bias", *names]
    head += ["speed-up error, points", "worst", "fastest named right"]
    made_by = sorted({line["by"] for line in lines if line["method"].startswith("aic-")})
    dates = sorted({line["date"] for line in lines})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    notes = (
        f"{len(cells)} cells in {ours.groups} groups; repeated runs count as their median. A precision's column has "
        "the MAPE of its cells. *Fastest named right* counts the groups that were answered in full. A tie is within "
        f"{noise:.1%}, the median spread of repeated runs on one card. *Warned*: AIConfigurator's answer adds that the "
        "batch exceeds the KV cache and that the answer is inaccurate. "
        f"Baselines of {when}; {'; '.join(made_by)}."
    )
    return f"{markdown.table(head, body)}\n\n{notes}"


def predictions(lines: Sequence[Mapping[str, Any]]) -> dict[str, Predictions]:
    """Method -> its predictions, in the order of LABELS.

    `aic-*-either` is the estimate, but the simulation where the estimate is refused or comes with a warning.
    """
    found: dict[str, dict[tuple[Any, ...], float | None]] = {}
    doubted = {(line["method"], cell_of(line)) for line in lines if "warning" in line or "refusal" in line}
    for line in lines:
        found.setdefault(line["method"], {})[cell_of(line)] = line["predicted_s"]
    for name in [name for name in LABELS if name.endswith("-either")]:
        own, instead = (name.replace("either", kind) for kind in ("estimate", "simulated"))
        found[name] = {
            cell: found[instead][cell] if (own, cell) in doubted else seconds for cell, seconds in found[own].items()
        }
    return {name: found[name] for name in LABELS}


def with_predictions(cells: Sequence[Mapping[str, Any]], predicted: Predictions, method: str) -> list[dict[str, Any]]:
    """The cells with another method's predictions. Raises ConfigError when it was not asked about each of them."""
    missing = [cell for cell in cells if cell_of(cell) not in predicted]
    if missing:
        first = f"{missing[0]['group']}, {missing[0]['precision']}"
        raise ConfigError(f"{method} lacks {len(missing)} of {len(cells)} cells, first {first}; type: make baselines")
    return [{**cell, "predicted_s": predicted[cell_of(cell)]} for cell in cells]


def _columns(label: str, found: Accuracy, cells: int, names: Sequence[str], warned: int = 0) -> list[str]:
    answered = f"{found.answered} of {cells}" + (f", {warned} warned" if warned else "")
    if not found.answered:
        return [label, answered, *["-"] * (len(names) + 6)]
    by_name = [f"{found.mape_by_precision[name]:.1%}" if name in found.mape_by_precision else "-" for name in names]
    mean, worst = found.speedup_mae_points, found.speedup_worst_points
    points = ["-", "-"] if mean is None or worst is None else [f"{mean:.1f}", f"{worst:.1f}"]
    makespan = [f"{found.makespan_mape:.1%}", f"{found.makespan_worst:.1%}", f"{found.makespan_bias:+.1%}"]
    right = f"{found.ranked_right} of {found.ranked}" if found.ranked else "-"
    return [label, answered, *makespan, *by_name, *points, right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--baselines", type=Path, default=BASELINES)
    arguments = parser.parse_args()
    print(table(validate(read_records(arguments.records)).records, jsonl.rows(arguments.baselines)))


if __name__ == "__main__":
    main()
