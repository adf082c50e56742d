"""The sampling of a rollout in a Monitor's steps: who says it, what the reason and the record say, and the warning."""

from __future__ import annotations

import re
import warnings
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from fp8plan.errors import ConfigError
from fp8plan.jsonl import plain
from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation
from fp8plan.runtime.watch.mismatch.sampling import Sampling, kept_logprobs
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback
from fp8plan.schemas import RunRecord, checked

FACTS = EngineFacts("Qwen/Qwen3-0.6B", "h200_sxm", "0.26.0", "fp8_block+fp8_kv", EngineLimits(max_num_seqs=64))
SEEN = Observation(seconds=0.9, prompt_lengths=[16] * 8, response_lengths=[64] * 8)
NUCLEUS = Sampling(top_p=0.8)
USUAL = re.compile(r"step 1 of 1 with the initial thresholds")


class Engine:
    """The part of a RolloutEngine that a Monitor uses. `sampling` is that of its last rollout."""

    guard_off = verdict = None

    def __init__(self, sampling: Sampling | None) -> None:
        self.guard, self.observation = Guard(FACTS), replace(SEEN, sampling=sampling)

    def report_kl(self, kl_k3: float) -> None: ...

    def engine_facts(self) -> EngineFacts:
        return FACTS


def logprobs(top_p: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(full, kept, rollout) log-probs [8, 64] of a trainer and an engine with the same weights: over the vocabulary, on
    the kept set, and as vLLM renormalises them."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(512, 200)
    probs, ids = logits.softmax(-1).sort(-1, descending=True)
    keep = (probs.cumsum(-1) - probs) < top_p
    mass = torch.where(keep, probs, 0.0).sum(-1, keepdim=True)
    pick = torch.multinomial(torch.where(keep, probs, 0.0) / mass, 1)
    tokens = ids.gather(-1, pick).squeeze(-1)
    sets = [row[some].tolist() for row, some in zip(ids, keep, strict=True)]
    rollout = (probs.gather(-1, pick) / mass).log()
    full = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return full.view(8, 64), kept_logprobs(logits, tokens, sets).view(8, 64), rollout.view(8, 64)


def step_of(trained: torch.Tensor, sampled: torch.Tensor, monitor: Monitor, **more: Any) -> tuple[Any, list[str]]:
    """A step, and its warnings, but for those of alarms."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = monitor.step(trained, sampled, torch.ones(8, 64), **more)
    return step, [text for text in map(str, (warning.message for warning in told)) if "fp8plan: alarm " not in text]


def test_identical_weights_with_top_p_are_named_in_reason_record_and_warning() -> None:
    taken: list[Any] = []
    full, kept, rollout = logprobs(0.8)
    monitor = Monitor(sinks=[Callback(taken.append)], sampling={"top_p": 0.8})
    (first, told), (second, again) = (step_of(full, rollout, monitor) for _ in range(2))
    assert Alarm.UNIT_MEAN in first.decided.alarms
    for step in (first, second):
        assert "top_p 0.8: vLLM renormalises over the kept tokens" in step.decided.reason
        assert step.sampling == NUCLEUS
    assert (len(told), again) == (1, [])
    assert "the ratios are biased: top_p 0.8" in told[0]
    assert taken[0]["sampling"] == asdict(NUCLEUS)
    assert taken[0]["reason"] == first.decided.reason
    read = checked(plain(taken[0]), RunRecord, "the record")
    assert Sampling.of(read.sampling) == NUCLEUS
    mended, told = step_of(kept, rollout, Monitor(sampling=Sampling(top_p=0.8, kept_set=True)))
    assert (mended.decided.alarms, told) == ((), [])
    assert USUAL.fullmatch(mended.decided.reason)
    assert mended.mismatch.k3 < 1e-10


def test_unit_mean_names_a_temperature_that_may_be_the_cause_and_only_then() -> None:
    full, kept, rollout = logprobs(0.8)
    warm = {"temperature": 0.7}
    step, told = step_of(full, rollout, Monitor(), sampling=warm)
    assert "only if the trainer divides its logits by 0.7" in step.decided.reason
    step, more = step_of(kept, rollout, Monitor(), sampling=warm)
    assert USUAL.fullmatch(step.decided.reason)
    assert (told, more) == ([], [])


def test_the_step_says_it_before_the_monitor_and_the_rollout_and_those_before_the_engine() -> None:
    _, kept, rollout = logprobs(1.0)
    named = {name: Sampling(temperature=t) for name, t in (("step", 0.5), ("monitor", 0.6), ("rollout", 0.7))}
    engine: Any = Engine(Sampling(temperature=0.8))
    seen = replace(SEEN, sampling=named["rollout"])
    steps = [
        step_of(kept, rollout, Monitor(engine=engine, sampling=named["monitor"]), sampling=named["step"], rollout=seen),
        step_of(kept, rollout, Monitor(engine=engine, sampling=named["monitor"]), rollout=seen),
        step_of(kept, rollout, Monitor(engine=engine), rollout=seen),
        step_of(kept, rollout, Monitor(engine=engine), rollout=SEEN),
        step_of(kept, rollout, Monitor(engine=engine)),
        step_of(kept, rollout, Monitor(), rollout={"boot": "a", "sampling": {"temperature": 0.9}}),
    ]
    assert [step.sampling.temperature for step, _ in steps] == [0.5, 0.6, 0.7, 0.8, 0.8, 0.9]


def test_every_step_on_one_rollout_has_its_sampling_and_an_unknown_one_is_null() -> None:
    taken: list[Any] = []
    full, _, rollout = logprobs(0.8)
    monitor = Monitor(sinks=[Callback(taken.append)], engine=Engine(NUCLEUS))  # type: ignore[arg-type]
    told = [step_of(full, rollout, monitor)[1] for _ in range(2)]
    assert [record["sampling"] for record in taken] == [asdict(NUCLEUS)] * 2
    assert [len(some) for some in told] == [1, 0]
    step, told_of_none = step_of(full, rollout, Monitor(sinks=[Callback(taken.append)]))
    assert (step.sampling, taken[-1]["sampling"], told_of_none) == (None, None, [])
    assert USUAL.fullmatch(step.decided.reason)


def test_a_sampling_that_cannot_be_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="top_p is 2; allowed"):
        Monitor(sampling={"top_p": 2})
    full, _, rollout = logprobs(0.8)
    monitor = Monitor()
    before = monitor.state_dict()
    with pytest.raises(ConfigError, match="temperature is -1; allowed"):
        monitor.step(full, rollout, torch.ones(8, 64), sampling={"temperature": -1})
    assert monitor.state_dict() == before
    _, told = step_of(rollout, rollout, monitor, rollout={"boot": "a", "sampling": {"top_k": -9}})
    assert len(told) == 1
    assert "left out of the record: top_k is -9; allowed" in told[0]
