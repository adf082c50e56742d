"""The levers against plans and rollouts of the same thing, and the answer's sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal, Trace
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import power
from fp8plan.model.plan.planner import predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.plan.scene import Lever
from fp8plan.model.plan.turn_levers import CAP
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.rollout import simulate
from fp8plan.model.tune.answer import Answer, _changes
from fp8plan.model.tune.cut import Partial, partial_rollouts
from fp8plan.model.tune.levers import IN_FLIGHT, levers
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import Tuned, search
from fp8plan.model.tune.speculation import Speculation, speculated
from fp8plan.model.workload import Workload

MODEL = "Qwen/Qwen3-0.6B"
WORK = Workload(40, 16, Fixed(64), LogNormal(200, 0.9, 1500))
TIMES = StepTimes(train_s=5.0, logprob_s=0.5)


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return search(TuneRequest(MODEL, "h200", WORK, trainer=TIMES))


@pytest.fixture(scope="module")
def found(tuned: Tuned) -> dict[str, Lever]:
    return {lever.name: lever for lever in levers(tuned, tuned.scene())}


def seconds(tuned: Tuned, work: Workload = WORK, **limits: Any) -> float:
    """The rollout's seconds by a plan of the chosen precision alone."""
    setup = tuned.best.chosen.setup
    asked = replace(setup.limits, **limits)
    return predict(
        PlanRequest(MODEL, "h200", work, limits=asked, precisions=[setup.precision.name])
    ).chosen.timed.makespan_s


def test_a_limit_of_the_plan_is_worth_what_the_plan_without_it_takes_longer(
    tuned: Tuned, found: dict[str, Lever]
) -> None:
    assert tuned.changes == {"max_cudagraph_capture_size": (None, 1024)}
    for name, (old, new) in tuned.changes.items():
        lever = found[f"{name} {new}"]
        assert lever.in_plan
        assert lever.before_s == pytest.approx(seconds(tuned, **{name: old}))
        assert lever.after_s == pytest.approx(tuned.best.chosen.timed.makespan_s)
        assert lever.words["vllm"] == f"--{name.replace('_', '-')} {new}"


def test_the_precision_is_worth_what_the_plan_says(tuned: Tuned, found: dict[str, Lever]) -> None:
    dense = search(TuneRequest("Qwen/Qwen3-8B", "h200", Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480))))
    in_it = {lever.name: lever for lever in levers(dense, dense.scene())}
    for plan, every, pairs in (
        (tuned.best.plan, found, {"FP8 weights": ("bf16", "fp8_block"), "FP8 KV cache": ("bf16", "fp8_kv")}),
        (
            dense.best.plan,
            in_it,
            {"FP8 weights": ("fp8_kv", "fp8_block+fp8_kv"), "FP8 KV cache": ("fp8_block", "fp8_block+fp8_kv")},
        ),
    ):
        choices = {c.precision: c for c in plan.choices}
        for name, (without, with_it) in pairs.items():
            lever = every[name]
            assert (lever.before_s, lever.after_s) == (choices[without].makespan_s, choices[with_it].makespan_s)
            assert lever.in_plan == (plan.select().precision == with_it)
            assert lever.mismatch == f"KL k3 {power(choices[with_it].kl_k3)} instead of {power(choices[without].kl_k3)}"


def test_more_gpus_a_cap_and_samples_are_plans_of_the_same(tuned: Tuned, found: dict[str, Lever]) -> None:
    assert found["2 GPUs"].after_s == pytest.approx(seconds(tuned, data_parallel_size=2))
    factor = 2 * found["2 GPUs"].after_s / found["2 GPUs"].before_s
    assert found["2 GPUs"].price == f"{factor:.2f} times the GPU seconds"
    responses = WORK.batch().responses
    cap = int(np.quantile(responses, CAP))
    capped = replace_lengths(tuple(np.minimum(responses, cap).tolist()))
    lever = found[f"cap at {cap:,} tokens"]
    assert lever.after_s == pytest.approx(seconds(tuned, capped))
    lost = 1 - np.minimum(responses, cap).sum() / responses.sum()
    assert f"{lost:.0%} of the tokens are lost" in lever.price
    assert lever.words["verl"] == f"data.max_response_length={cap}"
    for each, prompts in ((8, 80), (32, 20)):
        same = replace_lengths(tuple(responses.tolist()), prompts, each)
        assert found[f"{each} samples per prompt"].after_s == pytest.approx(seconds(tuned, same))


def replace_lengths(lengths: tuple[int, ...], prompts: int = 40, samples: int = 16) -> Workload:
    return Workload(prompts, samples, Fixed(64), Trace(lengths, "a test"))


def test_one_step_off_policy_takes_the_longer_of_rollout_and_training(tuned: Tuned, found: dict[str, Lever]) -> None:
    lever, choice = found["one step off-policy"], tuned.best.chosen
    rollout, trainer = choice.timed.makespan_s, TIMES.seconds(0)
    assert choice.step_s is not None
    rest = choice.step_s - rollout - trainer
    assert (lever.before_s, lever.step) == (choice.step_s, True)
    assert lever.after_s == pytest.approx(max(rollout, trainer) + rest)
    assert lever.gain.low is not None
    assert lever.gain.high is not None
    assert lever.gain.low <= lever.gain.ratio <= lever.gain.high
    replicas = int(lever.price.rpartition("; ")[2].split()[0])
    assert seconds(tuned, data_parallel_size=replicas) <= trainer
    assert replicas == 1 or seconds(tuned, data_parallel_size=replicas - 1) > trainer
    slow = search(TuneRequest(MODEL, "h200", WORK, trainer=StepTimes(train_s=0.01, logprob_s=0.0)))
    one, fully = [x for x in levers(slow, slow.scene()) if x.step and not x.name.endswith(" sync")]
    if "fully" in one.name:
        one, fully = fully, one
    assert one.price.endswith("the longest response alone takes longer than training")
    assert fully.price.endswith("the longest response alone takes longer than training 4 times")


def beside(tuned: Tuned, share: float, replicas: int = 1) -> Partial:
    """Steps beside the trainer, of the plan's choice on so many replicas."""
    choice, profile = tuned.best.chosen, tuned.best.profile
    setup = replace(choice.setup, limits=replace(choice.setup.limits, data_parallel_size=replicas))
    return partial_rollouts(tuned.request.batch, share, setup, setup.memory().kv, setup.step_model(profile))


@pytest.mark.parametrize("max_lag", [2, 3, 4])
def test_asynchronous_training_takes_the_fastest_steps_within_its_lag(max_lag: int) -> None:
    work, times = replace(WORK, prompts=12), StepTimes(train_s=1.2, logprob_s=0.2, max_lag=max_lag)
    tuned = search(TuneRequest(MODEL, "h200", work, trainer=times))
    scene, choice, trainer = tuned.scene(), tuned.best.chosen, times.seconds(0)
    fully = [lever for lever in levers(tuned, scene) if "fully" in lever.name]
    allowed = {share: x for share in IN_FLIGHT if (x := beside(tuned, share)).most_lag <= max_lag}
    if not allowed:
        assert fully == []
        return
    (lever,) = fully
    share, best = min(allowed.items(), key=lambda pair: pair[1].seconds)
    assert choice.step_s is not None
    rest = choice.step_s - choice.timed.makespan_s - trainer
    assert lever.after_s == pytest.approx(max(best.seconds, trainer) + rest)
    assert lever.name == f"fully asynchronous, lag {best.most_lag}"
    assert lever.price.startswith(f"tokens are {best.lag:.1f} versions old, at most {best.most_lag}; ")
    assert lever.mismatch.startswith("unknown")
    assert f"async_training.staleness_threshold={share:g}" in lever.words["verl"]
    assert f"max_staleness={max_lag} max_inflight_tasks={round((1 + share) * 192)}" in lever.words["trl"]
    assert f"max_off_policy_steps={max_lag}" in lever.words["prime-rl"]
    replicas = int(lever.price.rpartition("; ")[2].split()[0])
    assert beside(tuned, share, replicas).seconds <= trainer
    assert replicas == 1 or beside(tuned, share, replicas - 1).seconds > trainer


def test_without_room_for_a_lag_there_is_only_one_step_off_policy(tuned: Tuned) -> None:
    times = replace(TIMES, max_lag=1)
    same = replace(tuned, best=replace(tuned.best, request=replace(tuned.request, trainer=times)))
    assert {lever.name for lever in levers(same, same.scene()) if lever.step and not lever.name.endswith(" sync")} == {
        "one step off-policy"
    }
    for wrong in (0, 1.5):
        with pytest.raises(ConfigError, match="max_lag is"):
            replace(TIMES, max_lag=wrong)  # type: ignore[arg-type]


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.verl
def test_the_words_of_verl_are_in_its_settings() -> None:
    settings = package("verl") / "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
    section = settings.read_text().partition("async_training:")[2]
    for word in ("staleness_threshold", "trigger_parameter_sync_step", "partial_rollout"):
        assert f"\n  {word}:" in section


@pytest.mark.trl
def test_the_words_of_trl_are_fields_of_its_settings() -> None:
    source = (package("trl") / "experimental/async_grpo/async_grpo_config.py").read_text()
    for word in ("max_staleness", "max_inflight_tasks"):
        assert f"    {word}: int" in source


def test_the_order_is_that_of_the_requests() -> None:
    work = Workload(20, 8, LogNormal(800, 0.8, 3000), LogNormal(300, 0.9, 2000))
    given = EngineLimits(max_num_seqs=32)
    tuned = search(TuneRequest(MODEL, "h200", work, limits=given, precisions=["bf16"]))
    every = {x.name: x for x in levers(tuned, tuned.scene())}
    batch, choice, profile = work.batch(), tuned.best.chosen, tuned.best.profile
    orders = {
        "order: samples of a prompt apart": np.arange(160).reshape(20, 8).T.ravel(),
        "order: long responses first": np.argsort(-batch.responses, kind="stable"),
    }
    for name, rows in orders.items():
        other = simulate(choice.setup, batch.take(rows), profile).rollout
        assert every[name].after_s == pytest.approx(other.makespan_s)
        changed = other.cached_tokens != choice.timed.cached_tokens
        assert (f"serves {other.cached_tokens:,} tokens" in every[name].price) == changed
    firsts = batch.prompts[::8]
    by_prompt = np.concatenate([np.arange(8 * i, 8 * i + 8) for i in np.argsort(-firsts, kind="stable")])
    same = simulate(choice.setup, batch.take(by_prompt), profile).rollout.makespan_s
    assert every["order: long prompts first"].after_s == pytest.approx(same)


def test_long_requests_are_dealt_to_the_replicas_in_turn() -> None:
    work = Workload(8, 2, Fixed(32), LogNormal(300, 0.9, 2000))
    tuned = search(
        TuneRequest(MODEL, "h200", work, limits=EngineLimits(data_parallel_size=2, max_num_seqs=4), precisions=["bf16"])
    )
    every = {x.name: x for x in levers(tuned, tuned.scene())}
    batch, choice = work.batch(), tuned.best.chosen
    longest = np.argsort(-batch.responses, kind="stable")
    dealt = batch.take(np.append(longest[::2], longest[1::2]))
    after = simulate(choice.setup, dealt, tuned.best.profile).rollout.makespan_s
    assert every["order: long responses first"].after_s == pytest.approx(after)


def test_stopping_the_tail_saves_time_and_loses_long_responses(tuned: Tuned, found: dict[str, Lever]) -> None:
    few, many = (found[f"stop the tail, {share} more"] for share in ("10%", "25%"))
    assert many.after_s < few.after_s < few.before_s == pytest.approx(tuned.best.chosen.timed.makespan_s)
    assert "bias to short answers: mean length -" in few.price
    partial = found["partial rollouts, 10% more"]
    assert few.after_s < partial.after_s  # it computes tokens again, and loses none
    assert partial.mismatch == "unknown"


def test_drafts_are_weighed_with_an_acceptance(tuned: Tuned) -> None:
    without = Answer.of(tuned)
    assert not any("speculative" in lever.name for lever in without.levers)
    assert any("type --acceptance" in sentence for sentence in without.sentences)
    drafts = Speculation(0.7, 2, "mtp")
    answer, choice = Answer.of(replace(tuned, request=replace(tuned.request, speculation=drafts))), tuned.best.chosen
    (lever,) = [lever for lever in answer.levers if "speculative" in lever.name]
    rollout = speculated(choice.setup, tuned.request.batch, tuned.best.profile, drafts)
    assert lever.after_s == rollout.makespan_s
    assert lever.mismatch == "nothing"
    assert not lever.measured
    assert lever.words["vllm"].startswith('--speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\'')
    assert lever.words["verl"].endswith("actor_rollout_ref.model.mtp.num_speculative_tokens=2")
    assert not any("type --acceptance" in sentence for sentence in answer.sentences)


def test_savings_and_their_interval(found: dict[str, Lever]) -> None:
    for lever in found.values():
        saved, low, high = lever.saved_s
        assert saved == lever.before_s - lever.after_s
        assert low <= saved + 1e-9
        assert saved <= high + 1e-9
        assert lever.gain.ratio == pytest.approx(lever.before_s / lever.after_s)
        told = json.loads(json.dumps(lever.to_dict()))
        assert told["ground"] == ("measured" if lever.measured else "modelled")
    assert found["FP8 KV cache"].measured
    assert all(lever.measured for name, lever in found.items() if name.startswith("stop the tail"))
    assert not found["one step off-policy"].measured
    saves = [lever.saved_s[0] for lever in found.values()]
    assert saves == sorted(saves, reverse=True)


def test_the_answer_separates_what_changes_nothing(tuned: Tuned, found: dict[str, Lever]) -> None:
    answer = Answer.of(tuned)
    assert {*answer.idle} | {lever.name for lever in answer.levers} == set(found)
    assert all(abs(lever.gain.ratio - 1) >= 0.005 for lever in answer.levers)
    assert "order: long responses first" in answer.idle  # all run at once
    told = json.loads(json.dumps(answer.to_dict()))
    assert told["before_s"] == tuned.base.chosen.seconds
    assert told["levers"][0]["lever"] == answer.levers[0].name
    alone = tuned.request.batch.take([int(tuned.request.batch.responses.argmax())])
    choice = tuned.best.chosen
    floor = simulate(choice.setup, alone, tuned.best.profile).rollout.makespan_s
    assert f"{alone.responses[0]:,} tokens take {floor:.3g} s even alone" in answer.floor


def test_the_waterfall_goes_from_bf16_over_each_change_to_the_datasheet() -> None:
    work = Workload(64, 16, Fixed(16), Fixed(512))
    tuned = search(TuneRequest("Qwen/Qwen3-8B", "h200", work, host_loop_s=2.6e-4, engine_version="0.26.0"))
    fall = Answer.of(tuned).waterfall
    before, after = tuned.base.plan, tuned.best.plan
    assert (before.select().precision, after.select().precision) == ("fp8_block", "fp8_block+fp8_kv")
    bf16 = next(c for c in before.choices if c.precision == "bf16")
    assert fall.before == ("before: bf16", bf16.makespan_s, bf16.makespan_low_s, bf16.makespan_high_s)
    limits = replace(before.limits, max_cudagraph_capture_size=1024)
    known = {"limits": limits, "precisions": ["fp8_block"], "host_loop_s": 2.6e-4, "engine_version": "0.26.0"}
    graphs = predict(PlanRequest("Qwen/Qwen3-8B", "h200", work, **known)).chosen.timed.makespan_s
    end = after.select().makespan_s
    steps = {
        "fp8_block": before.select().makespan_s,
        "max_cudagraph_capture_size 1024": graphs,
        "fp8_block+fp8_kv": end,
    }
    assert {level.name: level.seconds for level in fall.changes} == pytest.approx(steps)
    assert fall.tuned.seconds == fall.changes[-1].seconds == end
    host, kernels = fall.beyond
    parts = tuned.best.chosen.timed.parts
    assert host.seconds == pytest.approx(end * (1 - parts["host"]))
    assert 0 < kernels.seconds == fall.limit.seconds < host.seconds
    assert f"compute for {fall.limit.seconds:.3g} s at the datasheet's" in Answer.of(tuned).floor


def test_a_limit_that_needs_the_next_one_shares_its_level(tuned: Tuned) -> None:
    base, limits = tuned.base, tuned.best.plan.limits
    both = replace(tuned.best.plan, limits=replace(limits, max_num_seqs=20_000, max_num_batched_tokens=20_000))
    changed = replace(tuned, best=replace(tuned.best, plan=both))
    names = [level.name for level in _changes(base.chosen, changed)]
    together = "max_num_seqs 20000, max_cudagraph_capture_size 1024, max_num_batched_tokens 20000"
    assert names == [together, *([] if tuned.best.chosen.setup.precision == base.chosen.setup.precision else names[1:])]


@pytest.mark.parametrize(
    ("model", "work", "limits", "words"),
    [
        (MODEL, replace(WORK, prompts=8), {}, "The tail limits the rollout"),
        ("Qwen/Qwen3-8B", Workload(16, 8, Fixed(200), Fixed(900)), {"gpu_memory_utilization": 0.14, "max_num_seqs": 64},
         "The KV pool limits the rollout"),
        (MODEL, Workload(2, 2, Fixed(64), Fixed(200)), {"enforce_eager": True}, "Launches limit the rollout"),
        ("Qwen/Qwen3-8B", Workload(8, 8, Fixed(2000), Fixed(900)), {}, "The GPU limits the rollout"),
    ],
)  # fmt: skip
def test_the_sentence_on_the_limit(model: str, work: Workload, limits: dict[str, Any], words: str) -> None:
    given = EngineLimits(**limits) if limits else None
    answer = Answer.of(search(TuneRequest(model, "h200", work, limits=given, precisions=["bf16"])))
    assert answer.limited_by.startswith(words)
