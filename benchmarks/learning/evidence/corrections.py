"""Tables of what corrections are worth under a mismatch that was made.

One table has every correction of a file of runs; another has every setting, with the laws side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from benchmarks.learning.arms import CORRECTIONS, DELETED, LOGGED
from benchmarks.learning.evidence.kept import Runs, figure, kept_runs
from benchmarks.learning.evidence.places import H100, H200, H200_BROKEN_OFF, LARGE_BATCHES, SMALL_BATCHES
from benchmarks.learning.evidence.seeds import apart, mean
from benchmarks.learning.predicted import UNSEEN
from benchmarks.tables.markdown import table
from fp8plan.runtime.watch.controller.laws import ConstantThresholds

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


def _corrected(arms: Mapping[str, Runs]) -> Iterator[list[str]]:
    after = _after(arms)
    for arm, runs in arms.items():
        scenario, correction = LOGGED[arm].mismatch, LOGGED[arm].correction
        bounds = [row["tis_end"] for row in runs.values()]
        cells = [scenario, _name(correction), str(len(runs)), mean(list(figure(runs, "reward_before").values()))]
        cells += [mean(list(after[arm].values())), apart(after[arm], after.get(_arm(scenario, USUAL), {}))]
        yield [
            *cells,
            f"{fmean(figure(runs, 'kl_end').values()):.2g}",
            UNSEEN if None in bounds or correction == "none" else f"{fmean(bounds):.2f}",
        ]


def _after(arms: Mapping[str, Runs]) -> dict[str, dict[Hashable, float]]:
    return {arm: dict(figure(runs, "reward_after")) for arm, runs in arms.items()}


class Measured(NamedTuple):
    """Runs by arm, then by table and seed: their rewards, and their mean k3 over the last ten steps."""

    rewards: dict[str, dict[Hashable, float]]
    kls: dict[str, dict[Hashable, float]]


def whole_runs(*tables: Path, policy: str | None = None) -> Measured:
    """The measurements of runs that are over: rewards after them."""
    arms = kept_runs(*tables, policy=policy)
    return Measured(_after(arms), _late_kls(arms))


def runs_in_training(*tables: Path, policy: str | None = None) -> Measured:
    """The measurements of all runs: the mean rewards of the last ten steps, of what the engine sampled."""
    arms = kept_runs(*tables, policy=policy, unfinished=True)
    return Measured({arm: dict(figure(runs, "reward_late")) for arm, runs in arms.items()}, _late_kls(arms))


def _late_kls(arms: Mapping[str, Runs]) -> dict[str, dict[Hashable, float]]:
    return {arm: dict(figure(runs, "kl_late")) for arm, runs in arms.items()}


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
BROKEN_OFF: Final = partial(runs_in_training, H200_BROKEN_OFF, H100, policy="qk-norm")
LARGE, SMALL = (partial(whole_runs, path) for path in (LARGE_BATCHES, SMALL_BATCHES))
SETTINGS: Final = (
    Setting(ON_GPUS, 256, "lasting", partial(whole_runs, H100, policy="qk-norm")),
    Setting(WITH_H200, 256, "lasting", BROKEN_OFF),
    Setting(ON_H200, 256, "growing", partial(whole_runs, H200, policy="qk-norm")),
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
