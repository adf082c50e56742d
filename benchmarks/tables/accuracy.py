"""The accuracy of fp8plan's predictions as the documentation states it: totals, then by model, precision and workload.

`python -m benchmarks.tables.accuracy RECORDS` prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.markdown import table
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import (
    Accuracy,
    Validation,
    accuracy,
    by_group,
    merged,
    names_the_fastest,
    noise_floor,
    speedups,
    spreads,
    validate,
)

# Rollouts by which no constant of an interval was chosen.
OUTSIDE = {
    "vLLM 0.33, H200": "h200_sxm/vllm-0.33.0/validation/rollouts.jsonl",
    "vLLM 0.33, H200, later": "h200_sxm/vllm-0.33.0/validation/later_rollouts.jsonl",
    "vLLM 0.33, H100": "h100_sxm/vllm-0.33.0/validation/rollouts.jsonl",
}


def outside() -> dict[str, Validation]:
    """Words of OUTSIDE -> the validation of its rollouts."""
    return {words: validate(read_records(profiles_path() / path)) for words, path in OUTSIDE.items()}


def newer_line() -> str:
    """README's sentences on rollouts of vLLM 0.33."""
    h200, later, h100 = (
        f"{len(x.records)} rollouts are off by {x.makespan_mape:.1%} (worst {x.makespan_worst:.1%})"
        for x in outside().values()
    )
    return f"With vLLM 0.33 on an H200, {h200}. Another {later}, most of them with experts. On an H100, {h100}."


Cell = Mapping[str, Any]


def tables(result: Validation) -> str:
    """The tables in Markdown. Runs that repeat a cell count as one, with their median."""
    cells, noise = merged(result.records), noise_floor(result.records) or 0.0
    parts = [_totals(cells, noise, max(spreads(result.records), default=0.0)), _halves(result)]
    for title, name, order in (
        ("model", _model, None),
        ("precision", _precision, PRESETS),
        ("workload", _workload, None),
    ):
        names = order or dict.fromkeys(map(name, cells))
        parts.append(_by(title, cells, name, [x for x in names if any(name(cell) == x for cell in cells)]))
    return "\n\n".join(parts)


def families(result: Validation) -> str:
    """The table of several models in each of their precisions, and the pools' error."""
    cells = merged(result.records)
    kv = max(abs(x["predicted_kv_cache_tokens"] / x["measured_kv_cache_tokens"] - 1) for x in cells)
    names = dict.fromkeys(map(_engine, cells))
    halves = _halves(result)
    return f"{_by('model', cells, _engine, names)}\n\nKV cache tokens are within {kv:.2%}. {halves}"


def line(
    told: Validation, untold: Validation, every: Validation, families: Validation, at_first: Sequence[Cell]
) -> str:
    """The accuracy in a few sentences.

    told, untold: rollouts that no fit has seen, with the speed of their hosts where it was timed, and without
    every:        the same with the runs that later ones replaced
    families:     rollouts of model families that no fit has seen; at_first: as they were predicted at first sight
    """
    found, unknown, replaced, others = (_judged(x.records) for x in (told, untold, every, families))
    first = _judged(at_first)
    noise = noise_floor(told.records) or 0.0
    timed = sum(row.get("host_loop_s") is not None for row in told.records)
    cells = len(merged(told.records))
    single = max(abs(row["error"]) for row in every.records)
    return (
        f"Makespans of real vLLM 0.26 rollouts on H200s are off by {_mean_and_worst(found)} in {cells} cells that no "
        f"fit has seen. That is with the host's speed told where it was timed ({timed} of {len(told.records)} runs). "
        f"With no host told it is {_mean_and_worst(unknown)}. With {len(every.records) - len(told.records)} runs that "
        f"later ones replaced it is {_mean_and_worst(replaced)}. A cell is the median of its runs; single runs are up "
        f"to {single:.0%} off. In {len(merged(families.records))} cells of model families in no fit it is "
        f"{_mean_and_worst(others)}. At first sight, before the model was changed for them, it was "
        f"{_mean_and_worst(first)}. Speed-ups are off by {found.speedup_mae_points:.1f} points, those of the families "
        f"by {others.speedup_mae_points:.1f}, and by {first.speedup_mae_points:.1f} at first sight. The fastest "
        f"precision is named in {_named(told.records, 0.0)} groups. One within {noise:.1%} of it, the spread of "
        f"repeats, is named in {_named(told.records, noise)}. With no prediction, FP8 weights and KV are the fastest "
        f"in {_most_fp8(told.records, 0.0)}, and within {noise:.1%} in {_most_fp8(told.records, noise)}. Among the "
        f"families the fastest is named in {_named(families.records, 0.0)}."
    )


def coverage(sets: Mapping[str, Validation]) -> str:
    """What the intervals of several sets of rollouts hold, in Markdown. sets: words for each -> its validation"""
    rows = [
        (
            words,
            str(len(x.records)),
            f"{x.makespan_mape:.1%}",
            f"{x.coverage:.0%}",
            f"+-{x.interval_median_halfwidth:.1%}",
        )
        for words, x in sets.items()
    ]
    return table(("rollouts", "runs", "MAPE", "90% interval holds", "median half-width"), rows)


def _judged(rows: Sequence[Cell]) -> Accuracy:
    return accuracy(merged(rows))


def _mean_and_worst(found: Accuracy) -> str:
    return f"{found.makespan_mape:.1%} on average (worst {found.makespan_worst:.1%})"


def _named(rows: Sequence[Cell], noise: float) -> str:
    """The groups whose fastest precision is named right, of all."""
    found = accuracy(merged(rows), noise)
    return f"{found.ranked_right} of {found.ranked}"


def _named_within(rows: Sequence[Cell], noise: float) -> str:
    return f"named in {_named(rows, 0.0)} groups, within {noise:.1%} in {_named(rows, noise)}"


def _most_fp8(rows: Sequence[Cell], noise: float) -> str:
    """The groups in which the precision with most FP8 is the fastest, of all that have several."""
    groups = [group for group in by_group(merged(rows)).values() if len({cell["precision"] for cell in group}) > 1]
    rank = list(PRESETS)
    chosen = [[{**cell, "predicted_s": -rank.index(cell["precision"])} for cell in group] for group in groups]
    return f"{sum(names_the_fastest(group, noise) for group in chosen)} of {len(groups)}"


def _totals(cells: Sequence[Cell], noise: float, largest: float) -> str:
    found, repeats = accuracy(cells, noise), f"median {noise:.1%}, largest {largest:.1%}"
    kv = max(abs(x["predicted_kv_cache_tokens"] / x["measured_kv_cache_tokens"] - 1) for x in cells)
    starved = [x for x in cells if x["preemptions"]]
    counts = "; ".join(f"{x['preemptions']} / {x['predicted_preemptions']}" for x in starved)
    others_named = f"most FP8 is so in {_most_fp8(cells, 0.0)} and {_most_fp8(cells, noise)}"
    rows = [
        (
            "makespan",
            f"MAPE {found.makespan_mape:.1%}, worst {found.makespan_worst:.1%}, bias {found.makespan_bias:+.1%}",
        ),
        (
            "speed-up over BF16",
            f"mean error {found.speedup_mae_points:.1f} points, worst {found.speedup_worst_points:.1f}",
        ),
        ("fastest precision", f"{_named_within(cells, noise)}; {others_named}"),
        ("KV cache tokens", f"within {kv:.2%}"),
        ("preemptions, measured / predicted", f"{counts}; 0 / 0 in all other cells"),
        ("noise: spread of a repeated cell on one card", repeats),
    ]
    others = sum(bool(x["predicted_preemptions"]) for x in cells if not x["preemptions"])
    if others:
        rows[4] = (rows[4][0], f"{counts}; predicted but not measured in {others} cells")
    return table((f"{len(cells)} cells, {len(by_group(cells))} groups", ""), rows)


def _halves(result: Validation) -> str:
    return (
        f"The 90% interval holds {result.coverage:.0%} of the {len(result.records)} runs; its median half-width is "
        f"{result.interval_median_halfwidth:.1%}."
    )


def _by(title: str, cells: Sequence[Cell], name: Callable[[Cell], str], names: Iterable[str]) -> str:
    gains, rows = _gains(cells), []
    for wanted in names:
        chosen = [cell for cell in cells if name(cell) == wanted]
        found: Accuracy = accuracy(chosen)
        points = np.abs([gains[id(cell)] for cell in chosen if id(cell) in gains])
        speed = (f"{points.mean():.1f}", f"{points.max():.1f}") if points.size else ("-", "-")
        errors = (f"{found.makespan_mape:.1%}", f"{found.makespan_bias:+.1%}", f"{found.makespan_worst:.1%}")
        rows.append((wanted, str(len(chosen)), *errors, *speed))
    return table((f"by {title}", "cells", "makespan MAPE", "bias", "worst", "speed-up error, points", "worst"), rows)


def _gains(cells: Sequence[Cell]) -> dict[int, float]:
    """id of a cell -> error of its speed-up in points, where its group has a bf16 cell and it is not that."""
    found = {}
    for group in by_group(cells).values():
        others = (cell for cell in group if cell["precision"] != "bf16")
        found |= {id(cell): gain["error_points"] for gain, cell in zip(speedups(group), others, strict=False)}
    return found


def _model(cell: Cell) -> str:
    return str(cell["model"])


def _engine(cell: Cell) -> str:
    return f"{cell['model']} {cell['precision']}"


def _precision(cell: Cell) -> str:
    return str(cell["precision"])


def _workload(cell: Cell) -> str:
    return str(cell["workload"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    print(tables(validate(read_records(parser.parse_args().records))))


if __name__ == "__main__":
    main()
