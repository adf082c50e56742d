"""Profiles of GPUs we cannot touch, fitted to the tables of `aic_tables`, and how wrong such a profile is.

The tables time kernels. What they do not time keeps the datasheet profile's value and uncertainty: the host, sampling,
small kernels, and how an fp8_block layer's time divides into quantisation and GEMM. The sustained clock is what long
rows are slower than short ones: near 1 where tables were timed hot throughout, so that their efficiencies are a hot
GPU's. `try_out` imports the tables of a GPU that we did measure in the same way and compares; the error found there is
every imported profile's model error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from fp8plan.errors import ConfigError
from fp8plan.model.calibrate.aic_tables import Tables, find_data, importable, read_tables
from fp8plan.model.calibrate.fit import Observations, fit, robust_sd
from fp8plan.model.calibrate.kernel_rows import hull, observe, read_all
from fp8plan.model.hardware import Gpu, find_gpu
from fp8plan.model.profile.library import datasheet_profile, profile_path, rare_parts, without_rare_parts
from fp8plan.model.profile.profile import Profile
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import simulated

TRIED_ON = "h200_sxm"  # the GPU that we measured; its import is for the trial only
SAMPLE = 1000  # rows of each kernel: more do not move the coefficients
UNSEEN = 4  # one weight shape or head layout in so many is kept from the fit
FEWEST_SHAPES = 8  # of a kernel of which some are kept
Import: TypeAlias = tuple[Gpu, Tables]
ASSUMED = ("quantise",)  # the tables time them as a part of another kernel


@dataclass(frozen=True, slots=True)
class Trial:
    """A test of the import on a measured GPU: how far it is from the measurements.

    kernels:  kernel -> median |log(predicted / measured)| of our own timings
    rollouts: log(predicted / measured) of each rollout's makespan
    """

    gpu: str
    kernels: dict[str, float]
    rollouts: tuple[float, ...]

    @property
    def model_error(self) -> float:
        """Root mean square of the log errors of the makespans."""
        return float(np.sqrt(np.mean(np.square(self.rollouts))))

    def __str__(self) -> str:
        errors = np.abs(np.expm1(self.rollouts))
        text = (
            f"tested on {self.gpu}: makespan of {errors.size} measured rollouts, mean error {errors.mean():.1%}, "
            f"worst {errors.max():.1%}"
        )
        kernels = ", ".join(f"{kernel} {error:.1%}" for kernel, error in self.kernels.items())
        return f"{text}; median error of kernels: {kernels}" if kernels else text


def import_all(
    names: Sequence[str] | None,
    rollouts: Sequence[Path],
    kernels: Sequence[Path],
    output: Path,
    progress: Callable[[Iterable[Import]], Iterable[Import]] = lambda found: found,
) -> list[tuple[Path, Profile]]:
    """Write the profiles of the GPUs called `names` (None: all) to `output`. Returns (path, profile) of each.

    rollouts, kernels: measurements of TRIED_ON to test its import with

    Raises ConfigError without the package, for a GPU it has no tables of, and for TRIED_ON.
    """
    named = [find_gpu(name) for name in names or []]
    data, version = find_data()
    cards = named or [x for x in importable(data) if x.name != TRIED_ON]
    if any(card.name == TRIED_ON for card in cards):
        raise ConfigError(
            f"{TRIED_ON} was measured, so its tables serve as the test of the others; leave it out of --gpu"
        )
    if kernels and not rollouts:
        raise ConfigError("--kernels is given without --rollouts, whose error is the profiles' model error; give both")
    found = [(card, read_tables(card, data, version)) for card in cards]
    trial = None
    if rollouts:
        card, rows = find_gpu(TRIED_ON), read_all(kernels)
        records = [record for path in rollouts for record in read_records(path)]
        trial = try_out(card, read_tables(card, data, version), rows, records)
    return [_written(import_profile(card, tables, trial), output) for card, tables in progress(found)]


def _written(profile: Profile, folder: Path) -> tuple[Path, Profile]:
    path = profile_path(folder, profile.gpu, profile.engine_version)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json())
    return path, profile


def import_profile(card: Gpu, tables: Tables, trial: Trial | None = None) -> Profile:
    """Fit the profile of `card` to its tables. Without a trial, the model error is the datasheet profile's."""
    prior = without_rare_parts(datasheet_profile(card, tables.engine_version), parts=rare_parts(card))
    rows = tables.rows.sample(frac=1, random_state=0).groupby("kernel").head(SAMPLE)
    parts = [_split(observation) for observation in observe(rows, card)]
    used = dict.fromkeys(name for seen, _ in parts for name in seen.predict(prior).partials)
    free = [name for name in used if name.partition(".")[0] not in ASSUMED]
    found = fit([seen for seen, _ in parts], prior, free)
    unseen = {x.kernel: robust_sd(x.errors(found.profile)) for _, x in parts if x.seconds.size}
    fitted = f"fitted to {tables.source}"
    return replace(
        found.profile,
        kind="imported",
        source=f"{tables.source}; {trial if trial else 'not tested against measurements'}",
        residuals=found.residuals | unseen,
        model_error=trial.model_error if trial else prior.model_error,
        hull=hull(tables.rows),
        date=date.today().isoformat(),
        notes=prior.notes | dict.fromkeys(free, fitted),
    )


def try_out(card: Gpu, tables: Tables, rows: pd.DataFrame, records: Sequence[Record]) -> Trial:
    """Compare the import of `card` with our own measurements of it: `rows` as `kernel_rows.observe` takes them.

    Raises ConfigError if there is no record of a rollout on this GPU.
    """
    records = [record for record in records if record.fields["gpu"] == card.name]
    if not records:
        raise ConfigError(f"the records hold no rollout on {card.name}, the GPU whose import is tested")
    profile = import_profile(card, tables)
    kernels = {x.kernel: float(np.median(np.abs(x.errors(profile)))) for x in observe(rows, card)}
    return Trial(card.name, kernels, tuple(_log_error(record, profile) for record in records))


def _log_error(record: Record, profile: Profile) -> float:
    return float(np.log(simulated(record, profile).rollout.makespan_s / record.seconds))


def _split(observation: Observations) -> tuple[Observations, Observations]:
    """Split the rows into (seen, unseen), by whole groups."""
    few = np.unique(observation.groups).size < FEWEST_SHAPES
    unseen = np.zeros_like(observation.groups, dtype=bool) if few else observation.groups % UNSEEN == 0
    return observation.subset(~unseen), observation.subset(unseen)
