"""Which calls of `generate` make a rollout, what is judged of it, and what becomes of the guard's advice. Without vLLM:
the engine's calls are answered by Llm.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.profile.profile import PACES
from fp8plan.runtime.apply.engine import judge as judging
from fp8plan.runtime.apply.engine import rollout_log
from fp8plan.runtime.apply.engine.base import EngineBase
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.judge import Judge
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.watch.controller.state import Escalation
from fp8plan.runtime.watch.guard.fallback import Action, GuardSettings
from fp8plan.runtime.watch.guard.guard import Guard
from fp8plan.runtime.watch.guard.observation import EngineFacts, Observation, joined
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

# No speed counts here: the guard's advice follows from the KL alone.
MISMATCH: dict[str, Any] = {"kl_limit": 1e-7, "margin": 1e9, "anchor": Anchor(dict.fromkeys(PACES, 0.0), (), ())}
FACTS = EngineFacts("Qwen/Qwen3-0.6B", "h200_sxm", "0.26.0", "fp8_kv", EngineLimits(max_num_seqs=64))


class Clock:
    """Seconds that pass only in a call of `generate`, and where a test lets them pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(judging, "time", SimpleNamespace(perf_counter=found))
    monkeypatch.setattr(rollout_log, "_counts", dict)
    return found


class Llm:
    """vllm.LLM: each response has as many tokens as its prompt's first token says, and takes as many seconds."""

    def __init__(self, clock: Clock) -> None:
        cache = SimpleNamespace(num_gpu_blocks=1000, block_size=16)
        config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(logprobs_mode="processed_logprobs"))
        self.llm_engine, self._clock = SimpleNamespace(vllm_config=config), clock

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self._clock.now += max(prompt[0] for prompt in prompts)
        return [
            SimpleNamespace(
                prompt_token_ids=prompt,
                outputs=[SimpleNamespace(token_ids=[prompt[1]] * prompt[0], cumulative_logprob=-1.0)],
            )
            for prompt in prompts
        ]


class Engine(RolloutEngine):
    """A RolloutEngine whose vLLM is Llm. done: the advice that was done"""

    _longest = 64

    def __init__(self, clock: Clock, settings: GuardSettings, precision: str = "fp8_kv") -> None:
        safer = {"bf16": SimpleNamespace(precision="bf16", fp8_kv=False, workers=1)}
        launched: Any = SimpleNamespace(precision=precision, fp8_kv=True, workers=1, with_precision=safer.__getitem__)
        EngineBase.__init__(self, launched, SyncSettings(), None, settings)
        self.mode, self.guard = "inprocess", Guard(replace(FACTS, precision=precision), settings)
        self._judge, self.llm, self.done = Judge(self, self.state), Llm(clock), list[str]()
        self.state.vocabulary = 1000

    def _busy(self) -> int:
        return 0

    def _finished(self, generate: Any) -> Any:
        return generate()

    def _recalibrate(self, *_: Any) -> Any:
        self.done.append("recalibrate_kv")
        yield from ()

    def _restart(self) -> Any:
        self.done.append(self.launch.precision)
        assert self.guard is not None
        self.guard.engine_changed(self.engine_facts())
        yield from ()

    def engine_facts(self) -> EngineFacts:
        return replace(FACTS, precision=self.launch.precision)

    def synced(self) -> None:
        """As sync_weights does at its end."""
        self.state.version += 1


def call(engine: Engine, *lengths: int, token: int = 7, **sampling: float) -> int:
    """Generate responses of these lengths, and return the tokens."""
    engine.generate([[length, token] for length in lengths], Sampling(**sampling))  # type: ignore[arg-type]
    return sum(lengths)


def batch(tokens: int, sigma: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of trainer and engine, packed, of so many tokens."""
    chance = torch.Generator().manual_seed(tokens)
    rollout = -1 - torch.rand(tokens, generator=chance)
    return rollout + sigma * torch.randn(tokens, generator=chance), rollout


def step_of(monitor: Monitor, tokens: int) -> tuple[Any, list[str]]:
    """A step on a batch of one sequence, and its warnings about the batch."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = monitor.step(*batch(tokens), lengths=[tokens])
    return step, [text for text in (str(warning.message) for warning in told) if "its rollout" in text]


def test_until_a_rollout_is_opened_each_call_is_one_and_the_last_counts(clock: Clock) -> None:
    engine = Engine(clock, GuardSettings(**MISMATCH))
    call(engine, 5, 6)
    call(engine, 3)
    seen = engine.observation
    assert seen is not None
    assert (seen.seconds, list(seen.response_lengths), seen.arrival_s, seen.kv_cache_tokens) == (3.0, [3], None, 16000)
    assert engine.last_sequences == [[3, 7, 7, 7, 7]]
    with engine.rollout():
        pass  # from now on the loop opens its rollouts
    assert (engine.observation, engine.verdict) == (None, None)
    call(engine, 9)
    assert engine.observation is None
    assert engine.last_sequences == [[3, 7, 7, 7, 7]]
    engine._judge.close()


def test_an_open_rollout_is_one_observation_of_all_its_calls(clock: Clock) -> None:
    engine = Engine(clock, GuardSettings(**MISMATCH))
    for idle_s in (None, 50.0):
        clock.now += 50
        with engine.rollout():
            call(engine, 5, 6)
            clock.now += 30  # tools run
            with engine.rollout():  # of a function that opens its own
                call(engine, 4, 6, token=8)
            call(engine, 2)
        call(engine, 40, temperature=0.0)  # an evaluation, in which the engine is not idle
        seen = engine.observation
        assert seen is not None
        assert (seen.seconds, seen.arrival_s, seen.idle_s) == (14.0, 12.0, idle_s)
        assert list(seen.response_lengths) == [5, 6, 4, 6, 2]
        assert list(seen.prompt_ids or ()) == [0, 1, 2, 3, 4]
        assert seen.sampling == Sampling()
        engine.synced()
    assert [sequence[0] for sequence in engine.last_sequences] == [5, 6, 4, 6, 2]
    engine._judge.close()


def test_a_rollout_that_is_broken_off_or_empty_uses_nothing_up(clock: Clock) -> None:
    engine = Engine(clock, GuardSettings(**MISMATCH, patience=1))
    with engine.rollout():
        call(engine, 5)
    first, state = engine.observation, engine.guard and engine.guard.state
    engine.report_kl(0.5)
    with suppress(KeyError), engine.rollout():
        call(engine, 6)
        raise KeyError
    with engine.rollout():
        pass
    assert (engine.observation, engine.guard and engine.guard.state) == (first, state)
    with engine.rollout():
        call(engine, 7)
    assert engine.observation is not None
    assert engine.observation.kl_k3 == 0.5
    assert engine.verdict is not None
    assert engine.verdict.action == Action.RECALIBRATE_KV
    engine._judge.close()


def test_an_own_loop_with_evaluations_scorings_and_two_rollouts_between_steps(clock: Clock) -> None:
    """Must show 4 of the issue: advice is done once and before the next sync, and every figure is the batch's own."""
    settings, records = GuardSettings(**MISMATCH, patience=2), list[Any]()
    engine = Engine(clock, settings)
    monitor = Monitor(engine=engine, sinks=[Callback(records.append)])
    done_before, saved = list[list[str]](), dict[int, Any]()
    with engine.rollout():
        pass
    for number in range(8):
        call(engine, 40, 40, temperature=0.0)  # an evaluation
        with engine.rollout():
            tokens = call(engine, 5, 6, 7) + call(engine, 4)
        call(engine, 1, top_p=0.5)  # a scoring
        with engine.rollout():
            tokens += call(engine, 9, 8, token=11)
        call(engine, 30, temperature=0.0)
        step, told = step_of(monitor, tokens)
        assert told == []
        assert sum(records[-1]["response_lengths"]) == tokens == step.mismatch.tokens
        assert records[-1]["seconds"] == 7 + 4 + 9
        assert step.sampling == Sampling()
        kept = {tuple(sequence[:2]) for sequence in engine.last_sequences}
        assert kept == {(5, 7), (6, 7), (7, 7), (4, 7), (9, 11), (8, 11)}
        engine.apply(step.verdict, step.decided.escalate)
        engine.apply(engine.verdict)  # it is done already
        saved[number] = monitor.state_dict()
        engine.synced()
        done_before.append(list(engine.done))
    assert engine.done == ["recalibrate_kv", "bf16"]
    assert done_before[1:5] == [[], ["recalibrate_kv"], ["recalibrate_kv"], ["recalibrate_kv", "bf16"]]
    states = [record["guard"]["state"] for record in records]
    assert [(state["rung"], state["taken"]) for state in states[2:6]] == [
        ("recalibrate_kv", "none"),
        ("recalibrate_kv", "recalibrate_kv"),
        ("kv_to_bf16", "recalibrate_kv"),
        ("kv_to_bf16", "kv_to_bf16"),
    ]
    engine._judge.close()
    for start in ("fp8_kv", "bf16"):  # as planned, or as the run ended
        resumed = Engine(clock, settings, start)
        again = Monitor(engine=resumed)
        again.load_state_dict(saved[7])
        for _ in range(3):
            with resumed.rollout():
                tokens = call(resumed, 5, 6)
            step, _ = step_of(again, tokens)
            resumed.apply(step.verdict, step.decided.escalate)
            resumed.synced()
        assert resumed.done == (["bf16"] if start == "fp8_kv" else [])
        resumed._judge.close()


def test_advice_stands_until_it_is_done(clock: Clock) -> None:
    engine = Engine(clock, GuardSettings(**MISMATCH, patience=1))
    engine.report_kl(1.0)
    call(engine, 5)
    for _ in range(3):  # nobody looks
        call(engine, 5)
    verdict = engine.verdict
    assert verdict is not None
    assert verdict.action == Action.RECALIBRATE_KV
    assert "recalibrate_kv was advised before, and is not done" in verdict.reason
    engine.apply(verdict)
    assert engine.verdict is not None
    assert engine.verdict.action == Action.NONE
    engine.apply(engine.verdict)
    assert engine.done == ["recalibrate_kv"]
    engine.apply(None, Escalation.STEP_DOWN)
    assert engine.done == ["recalibrate_kv", "bf16"]
    engine._judge.close()


def test_a_monitor_says_once_that_a_batch_is_not_the_rollout(clock: Clock) -> None:
    engine = Engine(clock, GuardSettings(**MISMATCH))
    monitor = Monitor(engine=engine)
    tokens = call(engine, 5, 6)
    assert step_of(monitor, tokens)[1] == []
    tokens = call(engine, 5, 6)
    call(engine, 30, temperature=0.0)  # an evaluation, which a loop without rollouts cannot tell apart
    (told,) = step_of(monitor, tokens)[1]
    assert "a step's batch has 11 tokens, and its rollout 30" in told
    assert "type: with engine.rollout():" in told
    call(engine, 30)
    assert step_of(monitor, tokens)[1] == []
    engine._judge.close()


def test_rollouts_one_after_the_other_are_joined() -> None:
    first = Observation(3.0, [1, 1], [4, 5], [7, 7], preemptions=1, compiled_files=1, idle_s=9.0, kl_k3=0.5)
    last = Observation(2.0, [1], [6], preemptions=2, compiled_files=0, arrival_s=0.5, idle_s=1.0, kv_cache_tokens=64)
    first = replace(first, prefix_cache_queries=30, prefix_cache_hits=9)
    last = replace(last, prefix_cache_queries=12)
    both = joined([first, last])
    assert (both.seconds, both.arrival_s, both.idle_s) == (5.0, 3.5, 9.0)
    assert (list(both.response_lengths), list(both.prompt_ids or ())) == ([4, 5, 6], [0, 0, 1])
    assert (both.preemptions, both.compiled_files, both.kv_cache_tokens, both.kl_k3) == (3, 1, 64, 0.5)
    assert (both.prefix_cache_queries, both.prefix_cache_hits) == (42, None)
    assert joined([first, replace(last, compiled_files=None)]).compiled_files is None


def test_an_engine_of_single_requests_judges_opened_rollouts_only(clock: Clock) -> None:
    engine = SimpleNamespace(guard=None, guard_off=None)
    judge, llm = Judge(engine, calls=False), Llm(clock)
    sampling = Sampling()

    def request(length: int) -> None:
        ended = judge.begin(llm, sampling)
        ended(llm.generate([[length, 1]], sampling, use_tqdm=False))

    request(5)
    assert judge.last.observation is None
    with judge.rollout():
        request(5)
        request(6)
    request(40)
    assert judge.last.observation is not None
    assert list(judge.last.observation.response_lengths) == [5, 6]
    with pytest.raises(ConfigError, match="kl_k3 is inf"):
        judge.report_kl(float("inf"))
    judge.close()
