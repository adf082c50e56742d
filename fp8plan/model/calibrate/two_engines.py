"""The profile of a GPU by the rollouts of two engines there: `fp8plan calibrate --grid anchor`.

    FOLDER/anchor/rollouts.jsonl             the rollouts (fp8plan.runtime.measure.rollouts.run)
    FOLDER/anchor/rollouts.set_aside.jsonl   attempts at them that a slow host or a compiled kernel disturbed
    FOLDER/profile.json                      the profile, which `fp8plan calibrate` writes

The nearest profile is corrected as a plan is by observed rollouts (fp8plan.model.plan.anchor). The result serves other
models. Kernels that fill enough of the rollouts are noted as measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fp8plan.errors import ConfigError, warn
from fp8plan.jsonl import rows
from fp8plan.model.calibrate.profile_of import STEPS, Calibration, KernelError, cards_of, check_same, no_rollouts
from fp8plan.model.cost.base import QUANTITIES
from fp8plan.model.hardware import Gpu
from fp8plan.model.plan import anchor
from fp8plan.model.profile.library import nearest_profile
from fp8plan.model.profile.profile import ANCHORED, FITTED, GPU_PACE, HOST_PACE, PRECISION, SEEN, Profile, between
from fp8plan.model.rollout import Simulated, step_batch
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated
from fp8plan.schemas import QUIET_HOST

TWO_ENGINES = "anchor"  # the grid, and its subfolder
# A kernel is measured if a rollout spends LEAST_SHARE of its time in it, and the rollouts take LEAST_TAKEN of the
# variance of that time.
LEAST_SHARE, LEAST_TAKEN = 0.03, 0.5


def calibrate_by_two_engines(folder: Path, card: Gpu, engine_version: str) -> Calibration:
    """Correct the nearest profile by the rollouts in `folder`.

    Raises ConfigError if there are none, and for those of another GPU or version.
    """
    file = folder / TWO_ENGINES / "rollouts.jsonl"
    if not file.is_file():
        raise no_rollouts(folder, TWO_ENGINES)
    records, prior = read_records(file), nearest_profile(card, engine_version)
    check_same(records, card, engine_version)
    profile = by_two_engines(prior, records, engine_version)
    slowdowns = [record.fields.get("host_slowdown") or 1.0 for record in records]
    if (usual := float(np.median(slowdowns))) > QUIET_HOST:
        warn(
            f"Python took {usual:.1f} times as long as on a quiet core, so the rollouts tell little about the host. "
            "End other programs, and calibrate again with another --output"
        )
    source = f"{profile.source} ({seconds_spent(rows(file), rows(file.with_suffix('.set_aside.jsonl')))})"
    return Calibration(replace(profile, source=source), _errors(prior, profile, records), prior.label)


def check_replaceable(folder: Path) -> None:
    """Raise ConfigError if `folder` has the profile of a full calibration, which says more than two engines do."""
    file = folder / "profile.json"
    if file.is_file() and Profile.from_json(file.read_text(encoding="utf-8"), str(file)).kind != ANCHORED:
        raise ConfigError(f"{file} is of a fuller calibration; name another folder with --output, or move it away")


def by_two_engines(prior: Profile, records: Sequence[Record], engine_version: str) -> Profile:
    """The profile `prior` of these records' GPU, corrected by them. None of its intervals is wider."""
    runs = [simulated(record, prior) for record in records]
    corrected = anchor.anchored(prior, None, engine_version, records).applied(prior)
    # The rollouts tell nothing of the paces of precisions, which are each model's own: `model_error` has them again.
    names = [name for name in corrected.coefficients if not name.startswith(PRECISION)]
    engines = len({(record.fields["model"], record.fields["precision"]) for record in records})
    kept = replace(
        corrected,
        coefficients={name: corrected.coefficients[name] for name in names},
        log_covariance=between(corrected.log_covariance, set(names)),
        model_error=prior.model_error,
    )
    if prior.hull is not None and prior.engine_version != engine_version:
        kept = kept.with_notes(f"{FITTED}measurements with {prior.engine} {prior.engine_version}")
    here = f"{SEEN}rollouts of {engines} engines"
    return replace(
        kept,
        engine_version=engine_version,
        kind=ANCHORED,
        source=f"{prior.label}, corrected by {len(records)} rollouts of {engines} engines on {cards_of(records)}",
        residuals={},
        hull=_hull(prior, runs),
        date=max(str(record.fields.get("date", ""))[:10] for record in records) or prior.date,
        notes=kept.notes | dict.fromkeys(_measured(prior, kept, runs), here),
    )


def seconds_spent(records: Iterable[Mapping[str, Any]], set_aside: Iterable[Mapping[str, Any]]) -> str:
    """The words for the seconds that a grid took: of the timed rollouts, the warm-ups, and the engines' starts."""
    records = list(records)
    timed = sum(row["seconds"] for row in [*records, *set_aside])
    warmed = sum(row.get("warmup_s", 0.0) for row in records)
    starts = {
        (row["model"], row["precision"], row.get("engine_start_s", 0.0), row.get("compile_s", 0.0)) for row in records
    }
    begun, compiled = (sum(start[i] for start in starts) for i in (2, 3))
    return (
        f"{timed:.0f} s of timed rollouts and {warmed:.0f} s of warm-ups, beside {begun:.0f} s of the engines' starts "
        f"and {compiled:.0f} s of their first prompts, which compile kernels"
    )


def _measured(prior: Profile, corrected: Profile, runs: Sequence[Simulated]) -> list[str]:
    """The coefficients of the kernels whose time these rollouts tell."""
    wide = anchor.prior(prior, corrected.coefficients)
    kernels: dict[str, list[str]] = defaultdict(list)
    for name in wide.log_covariance:
        if not name.endswith(".pace"):
            kernels[name.rpartition(".")[0]].append(name)
    return [
        name
        for kernel, names in kernels.items()
        if _is_measured(kernel, names, wide, corrected, runs)
        for name in names
    ]


def _is_measured(
    kernel: str, names: Sequence[str], wide: Profile, corrected: Profile, runs: Sequence[Simulated]
) -> bool:
    """True if the rollouts tell the time of a kernel, which depends on these coefficients and on a pace."""
    slopes = np.array([[run.rollout.log_gradient.get(name, 0.0) for name in names] for run in runs])
    shares = np.abs(slopes).sum(axis=1)
    most = int(np.argmax(shares))
    if shares[most] < LEAST_SHARE:
        return False
    pace = HOST_PACE if kernel.startswith("host") else GPU_PACE
    every, slope = [*names, pace], np.append(slopes[most], shares[most])
    before, after = (float(slope @ profile.covariance(every) @ slope) for profile in (wide, corrected))
    return after <= (1 - LEAST_TAKEN) * before


def _hull(prior: Profile, runs: Sequence[Simulated]) -> dict[str, dict[str, tuple[float, float]]]:
    """The prior's ranges, and those of the rollouts' steps and linear layers where it has none."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for layer in run.model.main_linears:
            for name in ("n", "k"):
                values[f"gemm.{run.model.precision.gemm_dtype}"][name].append(getattr(layer, name))
        for name in QUANTITIES:
            steps = np.concatenate([getattr(step_batch(planned), name) for planned in run.schedules])
            values[STEPS][name] += steps[steps > 0].tolist()
    known = prior.hull or {}
    covered = {quantity for ranges in known.values() for quantity in ranges}
    ranges = {
        kernel: {name: (min(seen), max(seen)) for name, seen in own.items() if seen and name not in covered}
        for kernel, own in values.items()
        if kernel not in known
    }
    return known | {kernel: own for kernel, own in ranges.items() if own}


def _errors(prior: Profile, profile: Profile, records: Sequence[Record]) -> tuple[KernelError, ...]:
    """The errors of each engine's rollouts. Those that are held out are of the prior corrected by the other engine."""
    engines: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        engines[f"{record.fields['model']} {record.fields['precision']}"].append(record)
    errors = []
    for engine, own in engines.items():
        others = [record for other, rest in engines.items() if other != engine for record in rest]
        unseen = by_two_engines(prior, others, profile.engine_version) if others else prior
        before, fitted, held_out = (
            [abs(simulated(record, each).rollout.makespan_s / record.seconds - 1) for record in own]
            for each in (prior, profile, unseen)
        )
        middle, after, elsewhere = (float(np.median(each)) for each in (before, fitted, held_out))
        errors.append(KernelError(engine, len(own), 0, middle, after, elsewhere, max(held_out)))
    return tuple(errors)
