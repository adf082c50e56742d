"""The arms of the experiment, as a table: what samples, how gradients are corrected, and what goes wrong meanwhile.

FP8 is what runs at speed on the device: on a GPU blockwise FP8 weights and an FP8 KV cache; on a CPU the cache alone,
as vLLM has no blockwise kernel for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, Controller, LevelThresholds
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds

FP8: Final = {"cpu": "fp8_kv", "cuda": "fp8_block+fp8_kv"}


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction of gradients.

    follows: what the arm does if the controller asks for it; without any, an arm is what other stacks have
    """

    settings: CorrectionSettings
    controller: Controller
    follows: tuple[Escalation, ...] = ()


def _constant(c: float) -> Correction:
    return Correction(CorrectionSettings(thresholds=Thresholds(c)), ConstantThresholds(c))


def _level(c: float, narrowest: float) -> Correction:
    """A candidate for the default: a law that measures the KV scales again, and never steps down."""
    law = LevelThresholds(tis=c, narrowest=narrowest)
    return Correction(CorrectionSettings(thresholds=Thresholds(c)), law, (Escalation.RECALIBRATE_KV,))


# The constants but 2 tell a law that moves C from a law that only ends at a better C.
CONSTANTS: Final = {"tis": 2.0, "tis_1.1": 1.1, "tis_1.4": 1.4, "tis_5": 5.0}
# Token weights, as truncated importance sampling. "adaptive" is the name of LevelThresholds in logs of before.
CORRECTIONS: Final = {
    "none": Correction(CorrectionSettings(level=None), ConstantThresholds()),
    **{name: _constant(c) for name, c in CONSTANTS.items()},
    "adaptive": Correction(
        CorrectionSettings(thresholds=Thresholds(2.0)), LevelThresholds(2.0, narrowest=0.4), tuple(Escalation)
    ),
    # C from 2 down to 1.4, and from 4 down to 2.
    "level_2_1.4": _level(2.0, 0.485),
    "level_4_2": _level(4.0, 0.5),
}
# Scenario -> relative noise of the weights that are sent to the engine, by the share of the run that is over. The
# trainer's own stay clean: what the engine samples then really comes from another policy.
# On a CPU 0.12 left k3 at 0.01, and no arm apart from another; with 0.6 it grows from 0.004 to 0.3.
GROWN: Final = 0.6
# Mismatches that grow over RISE of a run, and stay; a growing one is large in a run's last steps only. With the
# moderate one, on a CPU a k3 of about 0.1, corrected runs still learn.
LASTING: Final = {"lasting": GROWN, "moderate": 0.3}
RISE: Final = 0.3
SPIKE, SPIKES, SPIKE_WIDTH = 0.8, (0.25, 0.5, 0.75), 0.02
# Two happen without noise. "staler": in each quarter of a run rollouts are up to twice as old, at last 8 steps.
# "broken": from the middle on, BROKEN_STEPS syncs leave the first layer as it was before the run.
QUARTERS, BROKEN_AT, BROKEN_STEPS = 4, 0.5, 5
NOISELESS: Final = ("benign", "staler", "broken")


def strength(scenario: str, step: int, steps: int) -> float:
    """Noise of the weights as a share of each matrix's RMS. Raises ConfigError for a scenario that there is not."""
    at = step / steps
    if scenario in NOISELESS:
        return 0.0
    if scenario == "growing":
        return GROWN * at
    if scenario in LASTING:
        return LASTING[scenario] * min(1.0, at / RISE)
    if scenario == "spiking":
        return SPIKE if any(start <= at < start + max(SPIKE_WIDTH, 1 / steps) for start in SPIKES) else 0.0
    raise ConfigError(f"mismatch is {scenario!r}; allowed: benign, growing, lasting, moderate, spiking, staler, broken")


def broken(scenario: str, step: int, steps: int) -> bool:
    """True if the sync after this many steps leaves out the first layer."""
    first = int(BROKEN_AT * steps)
    return scenario == "broken" and first <= step < first + BROKEN_STEPS


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm.

    precision:      a preset, or "fp8": FP8 of the device
    correction:     a name in CORRECTIONS
    kv_scales:      "measured" after each sync, or "unit": 1.0, as vLLM leaves them
    mismatch:       a scenario of `strength`, `stale` or `broken`
    replay:         the trainer replays the experts that the engine picked
    """

    precision: str = "fp8"
    correction: str = "tis"
    kv_scales: str = "measured"
    mismatch: str = "benign"
    replay: bool = False

    def preset(self, device: str) -> str:
        """The name of the precision on a device, "cpu" or "cuda"."""
        return FP8[device] if self.precision == "fp8" else self.precision

    def stale(self, step: int, steps: int) -> bool:
        """True if no sync follows this step (0, 1, ...) of a run."""
        every = 2 ** (QUARTERS * step // steps)
        return self.mismatch == "staler" and (step + 1) % every != 0


BASELINE: Final = "bf16"  # the arm that all are held against
MAIN: Final = {
    "bf16": Arm("bf16", "none"),
    "bf16-tis": Arm("bf16", "tis"),
    "fp8": Arm(correction="none"),
    "fp8-tis": Arm(),
    "fp8-adaptive": Arm(correction="adaptive"),
    "fp8-unit-kv": Arm(kv_scales="unit"),
}


# For policies with experts.
REPLAY: Final = {"fp8-replay": Arm(correction="none", replay=True), "fp8-replay-tis": Arm(replay=True)}


def _under(scenarios: Iterable[str], corrections: Iterable[str]) -> dict[str, Arm]:
    """Each correction under each scenario."""
    return {
        f"{scenario}-{name.replace('_', '-')}": Arm(correction=name, mismatch=scenario)
        for scenario in scenarios
        for name in corrections
    }


CANDIDATES: Final = ("level_2_1.4", "level_4_2")  # for the default, in the order in which they are judged
CONTROL: Final = _under(
    ("growing", *LASTING, "spiking", "staler", "broken"), [x for x in CORRECTIONS if x not in CANDIDATES]
)
# The runs by which default thresholds are judged.
JUDGED: Final = ("lasting", "growing", "spiking", "staler", "broken")
EVERY: Final = (*JUDGED, "benign")
DEFAULTS: Final = _under(EVERY, ("none", "tis", "tis_1.4", "adaptive"))
GROUPS: Final = {"main": MAIN, "replay": REPLAY, "control": CONTROL, "defaults": DEFAULTS}
GROUPS |= {name.replace("_", "-"): _under(EVERY, ("tis", name)) for name in CANDIDATES}
ARMS: Final = MAIN | REPLAY | CONTROL | DEFAULTS | _under(EVERY, CANDIDATES)  # in the order of tables


def arm_named(name: str) -> Arm:
    """The arm of this name. Raises ConfigError for one that is none of ARMS."""
    if name not in ARMS:
        raise ConfigError(f"arm is {name!r}; allowed: {', '.join(ARMS)}")
    return ARMS[name]


def chosen(words: list[str]) -> list[str]:
    """The arms of a list of arms' and groups' names. Raises ConfigError for others."""
    names = [name for word in words for name in GROUPS.get(word, [word])]
    for name in names:
        arm_named(name)
    return list(dict.fromkeys(names))


def uncorrected(name: str) -> str | None:
    """The arm that differs from an arm in having no correction, alone; None if there is no such arm."""
    wanted = replace(ARMS[name], correction="none")
    return next((other for other, arm in ARMS.items() if arm == wanted), None)
