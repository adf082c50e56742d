"""Tables of what corrections are worth under a mismatch that was made.

One table has every correction of a file of runs; another has every setting, with the laws side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from benchmarks.learning.arms import CORRECTIONS, DELETED, LOGGED
from benchmarks.learning.evidence.learnt import LATE, Runs, by_arm, rewards_after, rewards_late
from benchmarks.learning.evidence.places import H100, H200, H200_BROKEN_OFF, LARGE_BATCHES, SMALL_BATCHES
from benchmarks.learning.evidence.seeds import apart, mean
from benchmarks.learning.predicted import UNSEEN, last_tenth
from benchmarks.tables.markdown import table
from fp8plan import jsonl, schemas
from fp8plan.errors import ConfigError
from fp8plan.runtime.controller.laws import ConstantThresholds

USUAL: Final = "tis"  # the correction that others are held against: token TIS at C = 2
LAWS: Final = ("none", "adaptive", "least_error")
MASKS: Final = {"mis": "MIS", "icepop": "IcePop"}


def corrected(path: Path) -> str:
    """A line for each correction under each mismatch, in Markdown: rewards after the run, and beside C = 2.

    Means over seeds with their standard errors. KL and C are of the last tenth of the steps.

    Raises ConfigError if there is no such file.
    """
    heads = ("mismatch", "correction", "seeds", "reward before", "after", "less that of C = 2")
    return table((*heads, "KL k3, at last", "C, at last"), _corrected(kept_runs(path)))


def kept_runs(path: Path) -> dict[str, dict[Hashable, dict[str, Any]]]:
    """Arm -> seed -> the line of a run that `benchmarks.learning.keep` wrote."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; type: python -m benchmarks.learning.keep FOLDER/POLICY {path}")
    runs = defaultdict[str, dict[Hashable, dict[str, Any]]](dict)
    for row in jsonl.rows(path):
        runs[row["arm"]][row["seed"]] = row
    return runs


def _corrected(runs: Mapping[str, Mapping[Hashable, dict[str, Any]]]) -> Iterator[list[str]]:
    after = _after(runs)
    for arm in (name for name in LOGGED if name in runs):
        scenario, correction, rows = LOGGED[arm].mismatch, LOGGED[arm].correction, runs[arm].values()
        kls, bounds = ([x for row in rows for x in last_tenth(row[name])] for name in ("kl_k3", "tis"))
        cells = [scenario, _name(correction), str(len(rows)), mean([row["reward_before"] for row in rows])]
        cells += [mean(list(after[arm].values())), apart(after[arm], after.get(_arm(scenario, USUAL), {}))]
        yield [
            *cells,
            f"{fmean(kls):.2g}",
            UNSEEN if None in bounds or correction == "none" else f"{fmean(bounds):.2f}",
        ]


def _after(runs: Mapping[str, Mapping[Hashable, dict[str, Any]]]) -> dict[str, dict[Hashable, float]]:
    return {arm: {seed: row["reward_after"] for seed, row in rows.items()} for arm, rows in runs.items()}


class Measured(NamedTuple):
    """Runs by arm, then by seed: their rewards, and their mean k3 over the last ten steps."""

    rewards: dict[str, dict[Hashable, float]]
    kls: dict[str, dict[Hashable, float]]


def of_lines(path: Path) -> Measured:
    """The measurements in a file that keeps a line for each run."""
    runs = kept_runs(path)
    kls = {arm: {seed: fmean(row["kl_k3"][LATE]) for seed, row in rows.items()} for arm, rows in runs.items()}
    return Measured(_after(runs), kls)


def of_runs(reward: Callable[[Runs], dict[Hashable, float]], *policies: Path, unfinished: bool = False) -> Measured:
    """The measurements of the runs in the folders of policies.

    reward: which of the runs' rewards to take
    """
    found = by_arm(*policies, unfinished=unfinished)
    kls = {arm: {key: _late_kl(run.rows("run.jsonl")) for key, run in runs.items()} for arm, runs in found.items()}
    return Measured({arm: reward(runs) for arm, runs in found.items()}, kls)


def _late_kl(rows: list[dict[str, Any]]) -> float:
    return fmean(row["metrics"][schemas.K3] for row in rows[LATE])


class Setting(NamedTuple):
    """A line of `laws`: runs in Markdown, with a link; sequences in a step; the mismatch."""

    runs: str
    batch: int
    mismatch: str
    measure: Callable[[], Measured]


ON_GPUS: Final = "[25M parameters](#a-mismatch-that-lasts), two H100s"
WITH_H200: Final = "these and two of an H200 that were broken off: reward in the last ten steps"
ON_H200: Final = "[25M parameters](#on-an-h200), an H200"
TINY: Final = "[tiny](#learning-under-an-artificial-mismatch-on-a-cpu), a CPU"
TINY_SMALL: Final = "[tiny](#small-batches), a CPU"
BROKEN_OFF: Final = partial(of_runs, rewards_late, H200_BROKEN_OFF / "qk-norm", H100 / "qk-norm", unfinished=True)
LARGE, SMALL = (partial(of_lines, path) for path in (LARGE_BATCHES, SMALL_BATCHES))
SETTINGS: Final = (
    Setting(ON_GPUS, 256, "lasting", partial(of_runs, rewards_after, H100 / "qk-norm")),
    Setting(WITH_H200, 256, "lasting", BROKEN_OFF),
    Setting(ON_H200, 256, "growing", partial(of_runs, rewards_after, H200 / "qk-norm")),
    *(Setting(TINY, 512, name, LARGE) for name in ("lasting", "growing", "spiking", "moderate")),
    *(Setting(TINY_SMALL, 32, name, SMALL) for name in ("lasting", "moderate")),
)


def laws() -> str:
    """A line for each setting, in Markdown: rewards with no correction and with each law, less those of C = 2.

    Means over the seeds that both have, with their standard errors. The seeds are those that C = 2 shares with
    `LevelThresholds`; k3 is that of C = 2 over the last ten steps.
    """
    heads = ("runs", "batch", "mismatch", "seeds", "k3 at last", *map(_name, LAWS))
    measured = {measure: measure() for measure in dict.fromkeys(setting.measure for setting in SETTINGS)}
    return table(heads, (_laws(setting, measured[setting.measure]) for setting in SETTINGS))


def _laws(setting: Setting, measured: Measured) -> list[str]:
    rewards, kls = measured
    usual, adaptive = (_arm(setting.mismatch, name) for name in (USUAL, "adaptive"))
    seeds = len(rewards[usual].keys() & rewards[adaptive].keys())
    others = (rewards.get(_arm(setting.mismatch, name), {}) for name in LAWS)
    cells = [setting.runs, str(setting.batch), setting.mismatch, str(seeds), f"{fmean(kls[usual].values()):.1g}"]
    return [*cells, *(apart(other, rewards[usual]) for other in others)]


def _arm(mismatch: str, correction: str) -> str:
    return f"{mismatch}-{correction.replace('_', '-')}"


def _name(correction: str) -> str:
    """A correction as the pages call it."""
    if correction in DELETED:
        return f"`{DELETED[correction]}`"
    settings, law = CORRECTIONS[correction].settings, CORRECTIONS[correction].controller
    level, mode = settings.level, settings.mode
    way = "" if mode == "tis" else f"{level} {MASKS[mode]}, "
    if isinstance(law, ConstantThresholds):
        bounds = f"C = {law.tis:g}" if law.band is None else "[{:g}, {:g}]".format(*law.band)
        return "none" if level is None else f"{way or 'token TIS, '}{bounds}"
    relaxing = f" up to a KL of {law.limit_kl:g}" if law.limit_kl != type(law)().limit_kl else ""
    return f"{way}`{type(law).__name__}`{relaxing}"
