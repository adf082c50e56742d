"""The log of a rollout: its requests become trajectories of turns, with waits, and its counts grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.runtime.apply.engine import rollout_log
from fp8plan.runtime.apply.engine.rollout_log import Response, RolloutLog, busy, most_at_once, responses_of
from fp8plan.runtime.watch.guard.observation import Observation
from fp8plan.runtime.watch.mismatch.sampling import Sampling


def test_busy_seconds_are_those_in_which_a_call_ran() -> None:
    assert busy([(0.0, 5.0)]) == (5.0, 0.0)
    assert busy([(0.0, 5.0), (10.0, 12.0)]) == (7.0, 5.0)  # one after the other, and tools between
    assert busy([(1.0, 6.0), (0.0, 5.0), (2.0, 3.0)]) == (6.0, 2.0)  # requests at once
    assert busy([(0.0, 4.0), (1.0, 9.0), (20.0, 21.0), (20.5, 25.0)]) == (14.0, 9.5)


def test_a_log_numbers_prompts_and_leaves_out_what_has_no_tokens() -> None:
    log = RolloutLog()
    assert log.observed() is None
    log.add(0.0, 2.0, [Response([1, 2], [9] * 4), Response([1, 2], []), Response([3], [9] * 5)], Sampling())
    log.add(2.0, 9.0, [Response([3], [])], Sampling(top_p=0.5))
    log.add(3.0, 5.0, [Response([1, 2], [9] * 6)], {"temperature": 0.7})
    seen = log.observed()
    assert seen is not None
    assert (seen["prompt_ids"], seen["prompt_lengths"], seen["response_lengths"]) == ([0, 1, 0], [2, 1, 2], [4, 5, 6])
    assert (seen["seconds"], seen["arrival_s"]) == (4.0, 2.0)
    assert Observation(**seen).sampling == Sampling(temperature=0.7)


def test_a_log_has_the_growth_of_each_count(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RolloutLog()
    log.add(0.0, 2.0, [Response([1, 2], [9] * 4)], Sampling())
    log.end()
    assert log.counted == {}  # nobody has begun to count
    so_far = [{"preemptions": 5, "compiled_files": 3}, {"preemptions": 9, "compiled_files": 2, "prefix_cache_hits": 7}]
    monkeypatch.setattr(rollout_log, "_counts", lambda: so_far.pop(0))
    log.begin()
    log.begin()
    log.end()
    seen = Observation(**log.observed())  # type: ignore[arg-type]
    assert (seen.preemptions, seen.compiled_files, seen.prefix_cache_hits, seen.prefix_cache_queries) == (4, 0, 7, None)


def observed(log: RolloutLog) -> Observation:
    seen = log.observed()
    assert seen is not None
    return Observation(**seen)


def test_a_prompt_that_begins_with_an_earlier_sequence_is_its_next_turn() -> None:
    """Requests of an engine under asyncio. The second trajectory is faster, and begins when the third one ends."""
    log = RolloutLog()
    log.add(0.0, 2.0, [Response([1, 2], [3, 4])], Sampling())
    log.add(0.0, 1.0, [Response([7], [8])], Sampling())
    log.add(3.5, 5.0, [Response([1, 2, 3, 4, 9, 9], [5])], Sampling())  # a tool took 1.5 s
    log.add(6.0, 8.0, [Response([1, 2, 3, 4, 9, 9, 5], [6, 6])], Sampling())  # and added nothing
    log.add(1.0, 4.0, [Response([1, 2], [3, 5])], Sampling())
    seen = observed(log)
    assert seen.turns == [[(2, 2, 1.5), (1, 0, 1.0), (2, 0, 0.0)], [(1, 0, 0.0)], [(2, 0, 0.0)]]
    assert (list(seen.prompt_lengths), list(seen.response_lengths)) == ([2, 1, 2], [5, 1, 2])
    assert list(seen.prompt_ids or ()) == [0, 1, 0]
    assert (seen.seconds, seen.concurrent, seen.arrival_s, seen.rewritten_tokens) == (8.0, 2, None, 0)


def test_calls_in_step_wait_for_their_slowest_response() -> None:
    """A response's own end is the begin of its wait, if it is on the call's clock."""
    log = RolloutLog()
    prompts = [[1], [1], [2]]
    answers = [[5, 5], [5, 5], [6]]  # two samples of a prompt may be the same
    ends = (4.0, None, 1e9)
    log.add(1.0, 6.0, map(Response, prompts, answers, ends), Sampling())
    turns = [[*prompt, *answer, 0] for prompt, answer in zip(prompts, answers, strict=True)]
    log.add(8.0, 9.0, [Response(turn, [7]) for turn in turns], Sampling())
    seen = observed(log)
    assert seen.turns == [[(2, 1, 4.0), (1, 0, 0.0)], [(2, 1, 2.0), (1, 0, 0.0)], [(1, 1, 2.0), (1, 0, 0.0)]]
    assert (seen.seconds, seen.concurrent, seen.arrival_s) == (8.0, None, None)


def test_responses_of_one_call_or_of_calls_at_once_are_no_turns() -> None:
    log = RolloutLog()
    log.add(0.0, 5.0, [Response([1], [2]), Response([1, 2, 3], [4])], Sampling())
    log.add(1.0, 3.0, [Response([1, 2, 9], [4])], Sampling())  # began before [1, 2] was there
    seen = observed(log)
    assert (seen.turns, seen.concurrent, seen.rewritten_tokens) == (None, None, 0)
    log.add(6.0, 7.0, [Response([1, 2, 8], [4]), Response([1, 2, 7], [4])], Sampling())  # only one goes on
    assert [len(turns) for turns in observed(log).every_turn] == [2, 1, 1, 1]


def test_answers_that_a_template_has_rewritten_are_counted() -> None:
    """The prompt goes on after an earlier prompt with other tokens than the engine generated."""
    log = RolloutLog()
    log.add(0.0, 1.0, [Response([1, 2], [3] * 10)], Sampling())
    log.add(2.0, 3.0, [Response([1, 2, 9, 9, 9], [4])], Sampling())  # its reasoning is dropped: a trajectory of its own
    assert (observed(log).turns, observed(log).rewritten_tokens) == (None, 3)
    log.add(4.0, 5.0, [Response([1, 2, 9, 9, 9, 4, 5], [6])], Sampling())
    log.add(6.0, 7.0, [Response([1, 2, 9, 9, 9, 4, 5, 8, 8], [6])], Sampling())  # 6 has become 8
    log.add(8.0, 9.0, [Response([1, 2], [3])], Sampling())  # another sample
    seen = observed(log)
    assert [[turn[:2] for turn in turns] for turns in seen.every_turn] == [
        [(10, 0)],
        [(1, 1), (1, 1), (1, 0)],
        [(1, 0)],
    ]
    assert seen.rewritten_tokens == 3 + 1


def test_the_prompt_of_a_trajectory_that_went_on_is_continued_by_none() -> None:
    log = RolloutLog()
    log.add(0.0, 1.0, [Response([1, 2], [3])], Sampling())
    log.add(1.0, 2.0, [Response([1, 2, 3, 4], [5])], Sampling())
    log.add(2.0, 3.0, [Response([1, 2, 8, 8, 8, 8], [5])], Sampling())
    assert (observed(log).rewritten_tokens, len(observed(log).every_turn)) == (0, 2)


def test_trajectories_at_once_are_counted_without_those_that_take_a_place() -> None:
    assert most_at_once([(0.0, 2.0), (0.0, 1.0), (1.0, 3.0), (2.0, 4.0)]) == 2
    assert most_at_once([(0.0, 2.0), (1.5, 3.0), (1.9, 2.5)]) == 3


def test_vllm_tells_when_a_response_ended() -> None:
    def output(**more: Any) -> Any:
        return SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[2])], **more)

    told = [output(metrics=SimpleNamespace(last_token_ts=3.5)), output(metrics=None), output()]
    assert [response.ended_s for response in responses_of(told)] == [3.5, None, None]
