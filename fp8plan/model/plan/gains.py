"""The sentences of a plan on its speed-up over BF16: first over the best BF16, then over BF16 on the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8plan.model.plan.choice import Choice, SpeedUp, several_layouts, speed_up
from fp8plan.model.precision import Stored
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.rollout import Rollout

NO_FASTER = 0.005  # gains below half a percent are not worth a sentence of their own
STEP_SHARES = (0.5, 0.8)  # shares of a rollout in an RL step


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan's choices and their rollouts, in the same order; a choice that cannot run has None."""

    choices: Sequence[Choice]
    chosen: int
    rollouts: Sequence[Rollout | None]
    profile: Profile
    budget: RiskBudget = field(default_factory=RiskBudget)
    baseline: int | None = None  # as in Plan; None: the fastest bf16
    observed: bool = False  # the baseline's layout is that of an observed rollout

    @property
    def picked(self) -> Choice:
        """The chosen choice."""
        return self.choices[self.chosen]

    @property
    def of_the_step(self) -> str:
        """The words for the time by which choices are compared, if that is not the rollout's."""
        return " for the whole RL step" if self.picked.rl_step_s is not None else ""

    def rollout(self, choice: Choice) -> Rollout:
        """The rollout of a choice that can run."""
        rollout = next(rollout for c, rollout in zip(self.choices, self.rollouts, strict=True) if c is choice)
        assert rollout is not None
        return rollout

    def gain(self, choice: Choice, than: Choice) -> SpeedUp:
        """The ratio of a choice's speed to that of `than`. Both can run."""
        steps_s = None
        if than.rl_step_s is not None and choice.rl_step_s is not None:
            steps_s = than.rl_step_s, choice.rl_step_s
        return speed_up(self.rollout(than), self.rollout(choice), self.profile, steps_s)


def gains(answer: Answer, stored: Stored | None) -> list[str]:
    """Sentences on the speed-up over the baseline, and behind it over bf16 on the same layout if that is another."""
    picked = answer.picked
    bf16 = [c for c in answer.choices if c.precision == "bf16"]
    runnable = [c for c in bf16 if c.makespan_s is not None]
    if not bf16:
        return ["bf16 was not asked for, so there is no speed-up to name."]
    if stored is not None:
        return [f"There is no speed-up to name, as the checkpoint holds its weights in {stored.label}."]
    if not runnable:
        return ["bf16 does not fit, so there is no speed-up to name."]
    if elsewhere := over_another_layout(answer):
        return [*elsewhere, *_of_both(picked.gain, picked.step_gain, "bf16 on the same layout")]
    than = ("the observed bf16" if answer.observed else "the best bf16") + ", on the same layout"
    return _of_both(picked.gain, picked.step_gain, than if several_layouts(answer.choices) else "bf16")


def over_another_layout(answer: Answer) -> list[str]:
    """A sentence on the speed-up over the baseline, if its layout is not the chosen one. Call it if bf16 can run."""
    runnable = [c for c in answer.choices if c.precision == "bf16" and c.makespan_s is not None]
    picked = answer.picked
    best = min(runnable, key=lambda c: c.seconds) if answer.baseline is None else answer.choices[answer.baseline]
    if best.layout == picked.layout:
        return []
    layout = where(best, answer.choices)
    than = f"bf16{layout}, as observed" if answer.observed else f"the best bf16,{layout}"
    gain = answer.gain(picked, best)
    subject = "The whole RL step" if answer.of_the_step else "It"
    return [f"{subject} is {gain.over(than)}{_doubt(gain)}."]


def _of_both(gain: SpeedUp | None, step: SpeedUp | None, than: str) -> list[str]:
    """Sentences on the speed-up of the rollout, and on that of the RL step."""
    sentences = [] if gain is None else [f"It is {gain.over(than)}{_doubt(gain)}."]
    return sentences + ([] if step is None else [f"The whole RL step is {step.over(f'with {than}')}{_doubt(step)}."])


def _doubt(gain: SpeedUp) -> str:
    """The words for a gain that may be none."""
    return ", and may be no faster: its interval holds 1.00" if gain.in_doubt and round(gain.ratio, 2) >= 1 else ""


def of_the_step(picked: Choice) -> list[str]:
    """Sentences on the speed-up of the whole RL step, for two shares of the rollout in it (Amdahl's law)."""
    gain = picked.best_gain
    if picked.step_gain is not None or gain is None or gain.ratio < 1 + NO_FASTER:
        return []
    less, more = (gain.of_step(share).over("with bf16") for share in STEP_SHARES)
    half, most = STEP_SHARES
    return [
        f"The whole RL step becomes {less} if {half:.0%} of it is rollout there. It becomes {more} if {most:.0%} is.",
        "Give --train-s and --logprob-s to have the whole RL step worked out.",
    ]


def where(choice: Choice, choices: Sequence[Choice]) -> str:
    """The words for a choice's layout; empty if all choices share it."""
    if not several_layouts(choices):
        return ""
    replicas = f"{choice.data_parallel} replicas" if choice.data_parallel > 1 else "1 replica"
    return f" on {replicas} of {choice.sizes}"
