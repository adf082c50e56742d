"""The accuracy of fp8plan's predictions in the pages: totals, then by model, precision and workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.tables.cells import Accuracy, accuracy, merged, names_the_fastest, noise_floor, spreads
from benchmarks.tables.markdown import table
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import Validation, by_group, speedups, validate

# Rollouts by which no constant of an interval was chosen.
OUTSIDE = {
    "vLLM 0.33, H200": "h200_sxm/vllm-0.33.0/validation/rollouts.jsonl",
    "vLLM 0.33, H100": "h100_sxm/vllm-0.33.0/validation/rollouts.jsonl",
}


def outside() -> dict[str, Validation]:
    """Rollouts of OUTSIDE, apart those with more running requests than CUDA graphs take -> their validation.

    Python launches the kernels of larger steps one by one, and the host decides.
    """
    judged = {}
    for words, path in OUTSIDE.items():
        records = read_records(profiles_path() / path)
        graphed = [record for record in records if not _outgrows_graphs(record)]
        judged[words] = validate(graphed)
        if len(graphed) < len(records):
            judged[f"{words}, larger than the CUDA graphs"] = validate([x for x in records if _outgrows_graphs(x)])
    return judged


def _outgrows_graphs(record: Record) -> bool:
    """True if all requests together, one token each, are more than the largest CUDA graph takes."""
    return min(record.batch.responses.size, record.limits.max_num_seqs) > max(record.setup.cudagraph_sizes)


Cell = Mapping[str, Any]


def tables(result: Validation) -> str:
    """The tables in Markdown. Runs that repeat a cell count as one, with their median."""
    cells, noise = merged(result.records), noise_floor(result.records) or 0.0
    parts = [_totals(cells, noise, max(spreads(result.records), default=0.0)), _halves(result)]
    for title, order in (("model", None), ("precision", PRESETS), ("workload", None)):
        name = itemgetter(title)
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


def summary(
    unseen: Validation,
    untimed: Validation,
    every: Validation,
    families: Validation,
    at_first: Sequence[Cell],
    newer: Mapping[str, Validation],
) -> str:
    """README's table of the accuracy, in Markdown.

    unseen, untimed: rollouts that no fit has seen, with the speed of their hosts where it was timed, and without
    every:        the same with the runs that later ones replaced
    families:     rollouts of model families that no fit has seen; at_first: as they were predicted at first sight
    newer:        as from `outside`
    """
    noise = noise_floor(unseen.records) or 0.0
    timed = sum(row.get("host_loop_s") is not None for row in unseen.records)
    replaced = len(every.records) - len(unseen.records)
    named = f"{_named(unseen.records, 0.0)}; within {noise:.1%} of it {_named(unseen.records, noise)}"
    rows = [
        (f"vLLM 0.26, H200; host timed in {timed} of {len(unseen.records)} runs", *_off(unseen.records), named),
        ("the same, no host timed", *_off(untimed.records), ""),
        (f"the same, with {replaced} runs that later ones replaced", *_off(every.records), ""),
        ("model families", *_off(families.records), _named(families.records, 0.0)),
        ("the same, before the model was changed for them", *_off(at_first), ""),
        *((words, *_runs_off(validation), "") for words, validation in newer.items()),
    ]
    heads = ("rollouts that no fit has seen", "number", "makespan off by", "worst", "speed-up off by, points")
    single = max(abs(row["error"]) for row in every.records)
    shown = table((*heads, "fastest precision named"), rows)
    return (
        f"{shown}\n\nA cell is the median of its runs; single runs are up to "
        f"{single:.0%} off. Who always takes FP8 weights with an FP8 cache has the fastest in "
        f"{_most_fp8(unseen.records, 0.0)} groups. It is within {noise:.1%} of the fastest, the spread of repeats, in "
        f"{_most_fp8(unseen.records, noise)}."
    )


def in_a_line(unseen: Validation, untimed: Validation) -> str:
    """The accuracy in three sentences, in Markdown. The arguments are those of `summary`."""
    noise = noise_floor(unseen.records) or 0.0
    timed, others = (accuracy(merged(validation.records)) for validation in (unseen, untimed))
    return (
        f"On rollouts that no fit has seen (vLLM 0.26, H200), times were off by {timed.makespan_mape:.1%}, or by "
        f"{others.makespan_mape:.1%} where nobody timed the host. Speed-ups were off by "
        f"{timed.speedup_mae_points:.1f} points.\nThe fastest precision was named in "
        f"{_named(unseen.records, 0.0)} groups, and one within {noise:.1%} of it in {_named(unseen.records, noise)}."
    )


def _off(rows: Sequence[Cell]) -> tuple[str, ...]:
    """The number of cells, and how far off they are."""
    judged = accuracy(merged(rows))
    points = "" if judged.speedup_mae_points is None else f"{judged.speedup_mae_points:.1f}"
    return f"{len(merged(rows))} cells", f"{judged.makespan_mape:.1%}", f"{judged.makespan_worst:.1%}", points


def _runs_off(validation: Validation) -> tuple[str, ...]:
    """The number of runs, and how far off they are."""
    runs = f"{len(validation.records)} runs"
    points = "" if validation.speedup_mae_points is None else f"{validation.speedup_mae_points:.1f}"
    return runs, f"{validation.makespan_mape:.1%}", f"{validation.makespan_worst:.1%}", points


def coverage(sets: Mapping[str, Validation]) -> str:
    """The coverage of the intervals on several sets of rollouts, in Markdown. sets: words for each -> its validation"""
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


def _named(rows: Sequence[Cell], noise: float) -> str:
    """The groups whose fastest precision is named right, of all."""
    judged = accuracy(merged(rows), noise)
    return f"{judged.ranked_right} of {judged.ranked}"


def _most_fp8(rows: Sequence[Cell], noise: float) -> str:
    """The groups in which the precision with most FP8 is the fastest, of all that have several."""
    groups = [group for group in by_group(merged(rows)).values() if len({cell["precision"] for cell in group}) > 1]
    rank = list(PRESETS)
    chosen = [[{**cell, "predicted_s": -rank.index(cell["precision"])} for cell in group] for group in groups]
    return f"{sum(names_the_fastest(group, noise) for group in chosen)} of {len(groups)}"


def _totals(cells: Sequence[Cell], noise: float, largest: float) -> str:
    judged, repeats = accuracy(cells, noise), f"median {noise:.1%}, largest {largest:.1%}"
    kv = max(abs(x["predicted_kv_cache_tokens"] / x["measured_kv_cache_tokens"] - 1) for x in cells)
    starved = [x for x in cells if x["preemptions"]]
    counts = "; ".join(f"{x['preemptions']} / {x['predicted_preemptions']}" for x in starved)
    named = f"named in {_named(cells, 0.0)} groups, within {noise:.1%} in {_named(cells, noise)}"
    others_named = f"most FP8 wins in {_most_fp8(cells, 0.0)} and {_most_fp8(cells, noise)}"
    rows = [
        (
            "makespan",
            f"MAPE {judged.makespan_mape:.1%}, worst {judged.makespan_worst:.1%}, bias {judged.makespan_bias:+.1%}",
        ),
        (
            "speed-up over BF16",
            f"mean error {judged.speedup_mae_points:.1f} points, worst {judged.speedup_worst_points:.1f}",
        ),
        ("fastest precision", f"{named}; {others_named}"),
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
        judged: Accuracy = accuracy(chosen)
        points = np.abs([gains[id(cell)] for cell in chosen if id(cell) in gains])
        speed = (f"{points.mean():.1f}", f"{points.max():.1f}") if points.size else ("-", "-")
        errors = (f"{judged.makespan_mape:.1%}", f"{judged.makespan_bias:+.1%}", f"{judged.makespan_worst:.1%}")
        rows.append((wanted, str(len(chosen)), *errors, *speed))
    return table((f"by {title}", "cells", "makespan MAPE", "bias", "worst", "speed-up error, points", "worst"), rows)


def _gains(cells: Sequence[Cell]) -> dict[int, float]:
    """id of a cell -> error of its speed-up in points, where its group has a bf16 cell and it is not that."""
    gains = {}
    for group in by_group(cells).values():
        others = (cell for cell in group if cell["precision"] != "bf16")
        gains |= {id(cell): gain["error_points"] for gain, cell in zip(speedups(group), others, strict=False)}
    return gains


def _engine(cell: Cell) -> str:
    return f"{cell['model']} {cell['precision']}"
