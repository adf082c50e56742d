"""The guard on rollouts of turns: their makespan beside the prediction, and prefixes that the cache has lost."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.profile.library import load_profile
from fp8plan.model.validate.records import LISTS, batch_of, read_records
from fp8plan.model.validate.validate import validate
from fp8plan.runtime.watch.guard.causes import Cause, LikelyCause
from fp8plan.runtime.watch.guard.guard import Guard, GuardSettings, GuardState, Verdict, teaches, update
from fp8plan.runtime.watch.guard.observation import A_LAYER, EngineFacts, Observation, joined, predict
from fp8plan.runtime.watch.guard.prefix_cache import Lost
from fp8plan.runtime.watch.guard.rollout_record import observation_in, rollout_fields
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

PROFILE = load_profile(find_gpu("h200_sxm"), "0.26.0")[0].on_host(2.6e-4)
ANCHORED = GuardSettings(anchor=Anchor({}, (), ()))
AMPLE, SMALL = 1_000_000, 120_000  # tokens of a pool
PROMPT, TOOL, TURNS = 3000, 1500, 5


def facts(**limits: Any) -> EngineFacts:
    return EngineFacts("Qwen/Qwen3-8B", "h200_sxm", "0.26.0", "fp8_kv", EngineLimits(max_num_seqs=256, **limits))


@cache
def work(pool: int = AMPLE, trajectories: int = 48) -> Observation:
    """Trajectories of 8 samples to each prompt, without their seconds."""
    chance = np.random.default_rng(0)
    turns = []
    for _ in range(trajectories):
        made = [(int(chance.integers(50, 200)), TOOL, float(chance.exponential(3.0))) for _ in range(TURNS)]
        turns.append([*made[:-1], (made[-1][0], 0, 0.0)])
    responses = [sum(turn[0] for turn in each) for each in turns]
    ids = [number // 8 for number in range(trajectories)]
    return Observation(1.0, [PROMPT] * trajectories, responses, ids, kv_cache_tokens=pool, turns=turns)


def seconds_of(engine: EngineFacts, pool: int) -> float:
    return predict(engine, work(pool), PROFILE).makespan_s


def counted(engine: EngineFacts, pool: int, kept: float = 1.0) -> dict[str, int]:
    """vLLM's counts by the prediction. kept: share of the predicted hits"""
    (plan,) = predict(engine, work(pool), PROFILE).ran.schedules
    hits, computed = plan.total(plan.cached_tokens), plan.total(plan.prefill_tokens)
    return {"prefix_cache_queries": hits + computed, "prefix_cache_hits": int(kept * hits)}


def judged(engine: EngineFacts, seen: Observation) -> Verdict:
    return update(GuardState(), seen, engine, PROFILE, ANCHORED)[1]


def lost(verdict: Verdict) -> list[LikelyCause]:
    return [each for each in verdict.causes if each.cause == Cause.PREFIX]


ENGINE = facts()


def test_the_makespan_is_judged_against_the_prediction_for_the_turns_that_ran() -> None:
    predicted = seconds_of(ENGINE, AMPLE)
    exact = judged(ENGINE, replace(work(), seconds=predicted))
    assert exact.ratio == pytest.approx(1.0)
    assert exact.as_fast
    assert not any(each.gap for each in exact.causes)
    slow = judged(ENGINE, replace(work(), seconds=1.4 * predicted))
    assert (slow.as_fast, [each.cause for each in slow.causes if each.gap]) == (False, [Cause.UNKNOWN])
    closed = replace(work(), turns=None)  # as if each response had one turn, and no tool took time
    assert 2 * predict(ENGINE, closed, PROFILE).makespan_s < predicted


def test_the_prediction_is_the_one_that_validate_makes(tmp_path: Path) -> None:
    """From the record of the rollout, which a Monitor writes."""
    hits = counted(ENGINE, SMALL)
    seen = replace(work(SMALL), seconds=seconds_of(ENGINE, SMALL), concurrent=32, **hits)
    record = rollout_fields(seen, replace(ENGINE, host_loop_s=2.6e-4)) | {"kv_cache_tokens": SMALL}
    text = json.dumps(record)
    assert observation_in(json.loads(text)) == replace(seen, turns=json.loads(text)["turns"])
    (tmp_path / "one.jsonl").write_text(text)
    (row,) = validate(read_records(tmp_path / "one.jsonl")).records
    made = predict(ENGINE, seen, PROFILE)
    assert made.rollout.turns is not None
    assert row["predicted_s"] == pytest.approx(made.makespan_s, rel=1e-9)
    assert row["predicted_prefix_hits"] == pytest.approx(made.rollout.turns["hit_share"])
    assert row["prefix_hits"] == hits["prefix_cache_hits"] / hits["prefix_cache_queries"]
    unlimited = predict(ENGINE, replace(seen, concurrent=None), PROFILE)
    assert unlimited.rollout.turns is not None
    assert unlimited.rollout.turns["again_tokens"] > 1.2 * made.rollout.turns["again_tokens"]


def test_a_cache_that_keeps_what_is_predicted_has_lost_nothing() -> None:
    seen = replace(work(), seconds=seconds_of(ENGINE, AMPLE), **counted(ENGINE, AMPLE))
    verdict = judged(ENGINE, seen)
    assert lost(verdict) == []
    assert teaches(seen, verdict)


def test_a_cache_that_is_too_small_says_what_it_holds_and_costs() -> None:
    seen = replace(work(SMALL), seconds=seconds_of(ENGINE, SMALL), **counted(ENGINE, SMALL))
    (cause,) = lost(judged(ENGINE, seen))
    made = predict(ENGINE, seen, PROFILE).rollout
    ideal, counts = counted(ENGINE, AMPLE)["prefix_cache_hits"], counted(ENGINE, SMALL)
    lost_share = (ideal - counts["prefix_cache_hits"]) / counts["prefix_cache_queries"]
    said = re.match(r"(\d+)% of the prompt tokens were computed again; the cache holds (\d+)% of what", cause.sentence)
    assert said is not None
    again, held = (int(percent) / 100 for percent in said.groups())
    assert again == pytest.approx(lost_share, abs=0.02)
    assert held == pytest.approx(counts["prefix_cache_hits"] / ideal, abs=0.02)
    assert 0.2 < again < 0.4
    assert cause.sentence.endswith(": run fewer trajectories at once, or give the KV cache more room")
    assert not cause.gap
    assert cause.lost_s == pytest.approx(made.makespan_s - seconds_of(ENGINE, AMPLE), rel=0.01)


def test_a_cache_that_is_off_says_what_it_would_save() -> None:
    off = facts(enable_prefix_caching=False)
    (cause,) = lost(judged(off, replace(work(), seconds=seconds_of(off, AMPLE))))
    assert cause.sentence.startswith("prefix caching is off, so that turns of a trajectory and samples of a prompt")
    assert not cause.gap
    assert cause.lost_s == pytest.approx(seconds_of(off, AMPLE) - seconds_of(ENGINE, AMPLE), rel=0.01)


# The engine's limits, changes of what was seen, the share of the predicted hits; words of the sentence and the remedy.
MORE_LOST: dict[str, tuple[dict[str, Any], dict[str, Any], float, str, str]] = {
    "other tokens": ({}, {}, 0.5, "no cache of this size loses so many", "begin with the tokens of the turns before"),
    "another replica": (
        {"data_parallel_size": 2}, {}, 0.5, "another of 2 replicas finds nothing there", "route each trajectory",
    ),
    "a template": (
        {}, {"rewritten_tokens": 200_000}, 0.9, "stand in the place of an answer", "without a template that drops",
    ),
    "a cache that evicts more": (
        {}, {"kv_cache_tokens": SMALL}, 0.8, "the cache holds", "give the KV cache more room",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("limits", "changes", "kept", "says", "todo"), MORE_LOST.values(), ids=MORE_LOST)
def test_more_lost_than_predicted_is_named_with_its_likely_cause(
    limits: dict[str, Any], changes: dict[str, Any], kept: float, says: str, todo: str
) -> None:
    engine = facts(**limits)
    pool = changes.get("kv_cache_tokens", AMPLE)
    seen = replace(work(pool), **changes, **counted(ENGINE, pool, kept))
    seen = replace(seen, seconds=1.3 * predict(engine, seen, PROFILE).makespan_s)
    verdict = judged(engine, seen)
    (cause,) = lost(verdict)
    assert cause.gap
    assert Cause.UNKNOWN not in {each.cause for each in verdict.causes}
    assert not teaches(replace(seen, compiled_files=0), replace(verdict, as_fast=True))
    read = Lost.of(cause.sentence)
    assert " of the prompt tokens were computed again, " in read.says
    assert says in read.says
    assert todo in read.todo
    assert read.sentence == cause.sentence


def test_an_engine_that_others_use_too_has_no_share() -> None:
    hits = counted(ENGINE, AMPLE, kept=0.1)
    hits["prefix_cache_queries"] *= 2
    assert lost(judged(ENGINE, replace(work(), seconds=9.0, **hits))) == []


def test_rollouts_of_turns_correct_the_profile_and_have_waits() -> None:
    guard = Guard(ENGINE, profile=PROFILE)
    for _ in range(5):
        seen = replace(work(), seconds=1.1 * seconds_of(ENGINE, AMPLE), **counted(ENGINE, AMPLE))
        verdict = guard.after_rollout(seen)
    assert len(guard.rollouts) == 3
    assert guard.settings.anchor is not None
    assert verdict.as_fast is True
    unknown = replace(work(), turns=[[(a, b, None) for a, b, _ in each] for each in work().every_turn])
    with pytest.raises(ConfigError, match="the log does not say how long the tools took"):
        guard.after_rollout(unknown)
    with pytest.raises(ConfigError, match=r"response 1 has .* tokens in its turns"):
        replace(work(), response_lengths=[1] * 48)


def test_a_monitor_judges_and_records_a_rollout_of_turns_of_another_engine() -> None:
    records = list[Any]()
    monitor = Monitor(guard=Guard(ENGINE, ANCHORED, PROFILE), sinks=[Callback(records.append)])
    seen = replace(work(SMALL), seconds=9.0, **counted(ENGINE, SMALL, 0.8))
    fields = json.loads(json.dumps(rollout_fields(seen, ENGINE)))
    for turns, verdicts in ((fields["turns"], True), ([[[1, 0, 0.0]]] * 48, False), (None, True)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = monitor.step(
                torch.full((9,), -1.0), torch.full((9,), -1.1), lengths=[9], rollout=fields | {"turns": turns}
            )
        assert (step.verdict is not None) == verdicts
        assert verdicts != any("tokens in its turns" in str(warning.message) for warning in told)
        assert records[-1].get("turns") == (turns if verdicts else None)
    assert "computed again" in json.dumps(records[0]["guard"]["verdict"]["causes"])
    assert "computed again" not in json.dumps(records[2]["guard"]["verdict"]["causes"])


def test_rollouts_one_after_the_other_are_joined_with_their_turns() -> None:
    one = Observation(3.0, [5, 5], [7, 3], turns=[[(3, 2, 1.0), (4, 0, 0.0)], [(3, 0, 0.0)]], arrival_s=0.5)
    both = joined([one, replace(one, turns=None, response_lengths=[1, 2], prompt_lengths=[4, 4])])
    assert both.every_turn == [*one.every_turn, [(1, 0, 0.0)], [(2, 0, 0.0)]]
    assert (both.concurrent, both.arrival_s, both.seconds) == (2, None, 6.0)
    assert both.batch.lengths.tolist() == [5 + 7 + 2, 5 + 3, 5, 6]


TURNS_OF_ANOTHER_FORM = ([3, 4], [[7], [3]], [[(7, 0)], [(3, 0)]], [[("7", 0, 0)], [(3, 0, 0)]])


@pytest.mark.parametrize(
    ("name", "wrong"), [*product(LISTS, (3, "two")), *(("turns", wrong) for wrong in TURNS_OF_ANOTHER_FORM)]
)
def test_a_list_of_another_form_is_refused_with_one_to_type(name: str, wrong: Any) -> None:
    lengths = {"prompt_lengths": [5, 5], "response_lengths": [7, 3]}
    told = re.escape(f"{name} is {wrong!r:.60}; allowed: a list, such as {LISTS[name]}")
    with pytest.raises(ConfigError, match=told):
        Observation(1.0, **(lengths | {name: wrong}))
    with pytest.raises(ConfigError, match=told):
        batch_of(lengths | {name: wrong})


@pytest.mark.parametrize("wrong", [3, "two"])
def test_layers_of_another_form_are_refused_with_one_to_type(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"kv_clipped is {wrong!r}; allowed: a list, such as {A_LAYER}")):
        Observation(1.0, [5, 5], [7, 3], kv_clipped=wrong)


def test_lengths_in_lists_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("prompt_lengths is [[5], [5, 5]]; allowed: a list of whole")):
        Observation(1.0, [[5], [5, 5]], [7, 3])  # type: ignore[list-item]
