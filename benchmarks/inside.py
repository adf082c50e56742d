"""Predicted rollouts inside verl and TRL beside those that ran there: by the engine alone, with the trainer's front
(`--inside`), and anchored to a run's first two warm steps.

    python -m benchmarks.inside              prints the table of docs/evidence/trainers.md; ten seconds on one core

`results/inside.jsonl` has a row for each run of verl and of TRL's server. Its steps have the mean length of responses
and the seconds. With random weights a response ends at each token with the same chance, so its length is geometric. A
run's first step is left out: the engine compiled in it. The rows were made of raw logs by commit 4f9b9518.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.configs import find_config
from fp8plan.model.cost.front import OWN, front_kernels
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.anchor import anchored
from fp8plan.model.plan.choice import SpeedUp
from fp8plan.model.profile.library import load_profile, with_kernels
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records, record_of
from fp8plan.model.validate.validate import simulated

RESULTS = Path(__file__).parent / "results"
LONG = RESULTS / "long_answers"
VERSION = "0.26.0"
FIRST = 2  # warm steps that a run is anchored to
OF_RECORDS = (
    *("gpu", "precision", "inside", "data_parallel"),
    *("gpu_memory_utilization", "max_model_len", "max_num_seqs"),
)  # fields of a run that its records have, too


@dataclass(frozen=True)
class Run:
    """The warm steps of one run as records of one engine. looks_s: seconds between verl's looks for answers"""

    name: str
    records: list[Record]
    looks_s: float = 2.0


def lengths(mean: float, limit: int, count: int) -> list[int]:
    """Geometric lengths, cut at `limit`, whose mean is nearly `mean`: quantiles of their distribution."""
    shares = (np.arange(count) + 0.5) / count
    chances = np.geomspace(1e-7, 0.5, 400)  # that a response ends at a token
    drawn = [np.minimum(limit, 1 + np.log(shares) / np.log1p(-chance)).astype(int) for chance in chances]
    return min(drawn, key=lambda tokens: abs(float(tokens.mean()) - mean)).tolist()


def runs(folder: Path) -> Iterator[Run]:
    """All runs with steps in which the engine and the trainer took turns. folder: for the models' configs"""
    for row in jsonl.rows(RESULTS / "inside.jsonl"):
        requests = row["requests"]
        fields = {name: row[name] for name in OF_RECORDS} | {
            "model": _model(row["model"], row["vocabulary"], folder),
            "engine_version": VERSION,
            "prompt_ids": [number // row["samples"] for number in range(requests)],
            "prompt_lengths": [row["prompt_tokens"]] * requests,
        }
        records = []
        for step, (mean, seconds) in enumerate(row["steps"], 2):
            ran = {"response_lengths": lengths(mean, row["longest"], requests), "seconds": seconds}
            records.append(record_of(fields | ran, step - 1, f"step {step}"))
        yield Run(row["name"], records, row["looks_s"])
    # the runs named trl_fp8 and trl_bf16 were made before fp8plan's outputs came to TRL
    fronts = {"verl_fp8": "verl", "verl_bf16": "verl", "trl_fp8": "trl-stock", "trl_bf16": "trl-stock"}
    for stem, inside in (fronts | {"trl_outputs_bf16": "trl"}).items():
        warm = read_records(LONG / f"{stem}.jsonl")
        records = [replace(record, fields=record.fields | {"inside": inside}) for record in warm]
        yield Run(f"{'verl' if inside == 'verl' else 'TRL, colocated'}, 1 H100, 2,048 tokens", records)


def _model(name: str, vocabulary: int | None, folder: Path) -> str:
    """The model, or a folder with its config.json with another vocabulary."""
    if vocabulary is None:
        return name
    place = folder / f"{name.replace('/', '--')}-{vocabulary}"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(find_config(name)[0] | {"vocab_size": vocabulary}))
    return str(place)


def front_of(run: Run, profile: Profile) -> Profile:
    """The profile with the front's wait for this run's looks: half of the time between two."""
    fields = run.records[0].fields
    profile = with_kernels(profile, find_gpu(fields["gpu"]), front_kernels(fields["inside"]))
    name, usual = f"front.{fields['inside']}.start_seconds", Run.looks_s
    if name not in profile.coefficients:
        return profile
    wait = profile.coefficients[name] + (run.looks_s - usual) / 2
    return replace(profile, coefficients=profile.coefficients | {name: wait})


def error(records: Sequence[Record], profile: Profile, inside: str | None = None) -> tuple[float, float, float]:
    """Mean absolute error of a step, error of all steps together, and the share of steps inside of the 90% interval.

    inside: None: as recorded
    """
    gaps, held, totals = [], [], [0.0, 0.0]
    for record in records:
        asked = record if inside is None else replace(record, fields=record.fields | {"inside": inside})
        ran = simulated(asked, profile).rollout
        gaps.append(ran.makespan_s / record.seconds - 1)
        totals = [totals[0] + ran.makespan_s, totals[1] + record.seconds]
        held.append(ran.makespan_low_s <= record.seconds <= ran.makespan_high_s)
    return float(np.abs(gaps).mean()), totals[0] / totals[1] - 1, float(np.mean(held))


def lines() -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    every = []
    with TemporaryDirectory() as folder:
        for run in runs(Path(folder)):
            first, rest = run.records[:FIRST], run.records[FIRST:]
            fields = run.records[0].fields
            profile = front_of(run, load_profile(find_gpu(fields["gpu"]), VERSION)[0])
            errors = [error(run.records, profile, OWN), error(run.records, profile)]
            if rest:
                corrected = anchored(profile, first[0].setup.shape, VERSION, first).applied(profile)
                errors.append(error(rest, corrected))
            every += [
                (column, len(rest) if column == 2 else len(run.records), each) for column, each in enumerate(errors)
            ]
            cells = [f"{size:.1%} ({together:+.1%})" for size, together, _ in errors]
            yield (
                run.name,
                fields["inside"],
                f"`{fields['precision']}`",
                str(len(run.records)),
                *cells,
                *[""] * (3 - len(cells)),
            )
    cells = []
    for column in range(3):
        counts, errors = zip(*((count, each) for place, count, each in every if place == column), strict=True)
        size, _, held = np.average(errors, axis=0, weights=counts)
        cells.append(f"{size:.1%}, {held:.0%} held of {sum(counts)}")
    yield "all", "", "", "", *cells


def gains() -> Iterator[tuple[str, ...]]:
    """FP8 weights and KV cache beside BF16 in the runs of long answers: predicted before them, and measured."""
    for trainer in ("verl", "trl"):
        choices = {
            choice["precision"]: choice for choice in json.loads((LONG / f"{trainer}.json").read_text())["choices"]
        }
        fp8, bf16 = (
            float(np.mean([record.seconds for record in read_records(LONG / f"{trainer}_{name}.jsonl")]))
            for name in ("fp8", "bf16")
        )
        both, base = choices["fp8_block+fp8_kv"], choices["bf16"]
        gain = SpeedUp(both["speedup"], both["speedup_low"], both["speedup_high"])
        seconds = (f"{choice['makespan_s']:.1f}, {took:.1f}" for choice, took in ((base, bf16), (both, fp8)))
        yield trainer, *seconds, gain.cell, f"{bf16 / fp8:.2f}x"


def table() -> str:
    """The errors of each run, and the gains of long answers, in Markdown."""
    errors = markdown(("run", "`--inside`", "precision", "steps", "own", "with the front", "and anchored"), lines())
    heads = ("2,048 tokens", "BF16, predicted and measured (s)", "FP8 (s)", "gain, predicted", "measured")
    return f"{errors}\n\n{markdown(heads, gains())}"


if __name__ == "__main__":
    print(table())
