"""A run that a failure is injected into, and what fp8plan says of it.

Each failure begins with steps of a healthy run, in a Monitor of its own. Then its function does the damage, and goes on
with `Lab.step` and `Lab.doctor`. What they say, and errors of fp8plan's, are kept as signs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import torch

import fp8plan
from fp8plan import Scored
from fp8plan.errors import Fp8PlanError
from fp8plan.runtime.controller.alarms import MEANINGS, Alarm

from .policy import Example, Logprobs, Policy, Rollout, example

HEALTHY_STEPS: Final = 2
STEPS: Final = 6  # that a failure lasts: alarms of a smoothed KL need some
MOST_SAID: Final = 300  # characters of a sign
LENGTHS: Final = (150, 144, 120, 96, 80, 64, 48, 32)  # of prompts; two are longer than a block of the KV cache
PROMPTS: Final = [[(7 * n + 31 * row) % 1000 for n in range(size)] for row, size in enumerate(LENGTHS)] * 4
Sign = dict[str, str]
SCORED: Final = 6  # sequences that the doctor gets


@dataclass(frozen=True)
class Failure:
    """One injection. name: in reports.json; how: what is done, in words; inject: does it, and goes on with the run"""

    name: str
    how: str
    inject: Callable[[Any], None]


@dataclass
class Signs:
    """The signs of a failure, each once, in the order in which they came.

    known: signs that a healthy run gives, too
    """

    known: set[tuple[str, str]] = field(default_factory=set)
    found: dict[tuple[str, str], Sign] = field(default_factory=dict)

    def alarm(self, alarm: Alarm | str) -> None:
        self.add("alarm", str(alarm), MEANINGS[Alarm(alarm)].says)

    def add(self, source: str, name: str, says: str = "") -> None:
        if (source, name) not in self.known:
            text = " ".join(says.split())[:MOST_SAID]
            self.found.setdefault((source, name), {"from": source, "name": name, "says": text})


class Lab:
    """A policy, an engine that samples for it, and a Monitor.

    engine:   what the Monitor and the doctor are given: a RolloutEngine or a server's address; None: nothing
    generate: samples: (prompts, sampling parameters) -> rollouts
    """

    def __init__(self, policy: Policy, engine: Any, generate: Callable[..., list[Rollout]]) -> None:
        self.policy, self.engine, self._generate = policy, engine, generate
        self.first = policy.tensors()
        self.signs = Signs()
        self.kl: list[float] = []
        self._healthy: list[Example] = []
        self._monitor: Any = None
        self._settings: dict[str, Any] = {}

    # What a run does

    def roll(self, prompts: Sequence[Sequence[int]] | None = None, **sampling: Any) -> list[Rollout]:
        """Sample; sampling parameters are those of a healthy run unless given."""
        return self._generate(PROMPTS if prompts is None else prompts, sampling)

    def step(self, rollouts: Sequence[Rollout] | Example, scores: Logprobs | None = None, **more: Any) -> Any:
        """One step of the Monitor. scores: the trainer's; None: its own of those rollouts; more: as Monitor.step"""
        seen = rollouts if isinstance(rollouts, Example) else self.example(rollouts, scores)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say of alarms what is kept here
            found = self._monitor.step(seen.train, seen.rollout, seen.mask, **more)
        if isfinite(found.mismatch.k3):
            self.kl.append(float(found.mismatch.k3))
        for alarm in found.decided.alarms:
            self.signs.alarm(alarm)
        if found.sampling is not None and found.sampling.biased:
            self.signs.add("reason", "sampling", found.sampling.remarks()[0])
        if found.decided.decision == "no_data":
            self.signs.add("decision", "no_data", found.decided.reason)
        return found

    def last(self, *batches: Sequence[Rollout] | Example, **more: Any) -> None:
        """STEPS steps, of the same batches again and again."""
        seen = [one if isinstance(one, Example) else self.example(one) for one in batches]
        for number in range(STEPS):
            self.step(seen[number % len(seen)], **more)

    def example(self, rollouts: Sequence[Rollout], scores: Logprobs | None = None) -> Example:
        return example(rollouts, self.policy.scores(rollouts) if scores is None else scores)

    def grow(self, factor: float) -> None:
        """Let the policy's keys and values grow, as in a long training."""
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                if "k_norm" in name or "v_proj" in name:
                    parameter.mul_(factor)

    def doctor(self, scores: Callable[[list[Rollout]], Logprobs] | None = None, **given: Any) -> None:
        """Ask the doctor, where there is an engine.

        scores: the trainer's log-probs of responses to one token; None: the policy's own
        """
        if self.engine is None:
            return
        whole = [Rollout(one.prompt[:1], [*one.prompt[1:], *one.response], []) for one in self._healthy[0].rollouts]
        chosen = whole[:: len(whole) // SCORED][:SCORED]
        rows = (scores or self.policy.scores)(chosen)
        scored = [Scored([*x.prompt, *x.response], row.tolist()) for x, row in zip(chosen, rows, strict=True)]
        found = fp8plan.doctor(self.engine, scored=scored, **given)
        for one in found.faults:
            self.signs.add("doctor", str(one.fault), one.says)

    def attempt(self, act: Callable[[], Any]) -> None:
        """Do what fp8plan may refuse; a refusal is a sign, and the run goes on."""
        try:
            act()
        except Fp8PlanError as error:
            self.signs.add("refusal", type(error).__name__, str(error))

    def watch(self, **settings: Any) -> None:
        """Go on with another Monitor, which has seen the same healthy steps."""
        self._settings = settings
        self._monitor = fp8plan.Monitor(**settings)
        for number in range(HEALTHY_STEPS):
            self._monitor.step(*self._healthy[number % len(self._healthy)][1:])

    # What the harness does

    def calm(self) -> None:
        """Note a healthy run's alarms and the doctor's findings, so that no failure is blamed for them."""
        self.signs = Signs()
        self.restore()
        self._monitor = fp8plan.Monitor()
        self._healthy = [self.example(self.roll(seed=number)) for number in range(HEALTHY_STEPS)]
        for seen in self._healthy:
            self.step(seen)
        self.examine()
        self.signs = Signs(known=set(self.signs.found))

    def examine(self) -> None:
        """Ask the doctor what a healthy run asks."""
        self.doctor()

    def restore(self) -> None:
        """Give both sides the first weights again."""
        self.policy.load(self.first)

    def run(self, failure: Failure) -> dict[str, Any]:
        """Inject one failure. Returns its row of results, without its setting."""
        self.signs, self.kl = Signs(known=self.signs.known), []
        self.restore()
        self.watch()
        try:
            failure.inject(self)
        except Fp8PlanError as error:
            self.signs.add("refusal", type(error).__name__, str(error))
        finally:
            self.mend()
        return row_of(failure, self.signs, self.kl)

    def mend(self) -> None:
        """Undo what an injection may have left in the engine."""

    @property
    def healthy(self) -> Example:
        """A batch of the healthy run."""
        return self._healthy[0]


def cut(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Responses of many lengths, as they are once an EOS has ended some."""
    return [
        one._replace(response=one.response[:size], logprobs=one.logprobs[:size])
        for one, size in zip(rollouts, (24 + 3 * (row % 9) for row in range(1000)), strict=False)
    ]


def row_of(failure: Failure, signs: Signs, kl: Sequence[float]) -> dict[str, Any]:
    """A line of results/silent_failures.jsonl, without its setting. kl: k3 per token of each step"""
    found = list(signs.found.values())
    return {"failure": failure.name, "how": failure.how, "k3": max(kl, default=None), "signs": found}


def lora_twice(lab: Any) -> None:
    """Learn, and sync a change that is added twice. lab: of an own loop or of a server"""
    base = lab.policy.tensors(torch.float32)
    lab.learn()
    merged = lab.policy.tensors(torch.float32)
    lab.sync({name: (2 * merged[name] - base[name]).bfloat16() for name in merged})
    lab.go_on()
