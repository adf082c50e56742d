"""verl's own server with a planned engine, on the CPU: start, syncs as the trainer makes them, requests, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import warm_processes  # noqa: F401 -- it changes how vLLM starts processes
from tiny_models import PROMPTS, started, weights
from verl_parts import Served, serving

from fp8plan.errors import SyncError

pytestmark = [pytest.mark.verl, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("fp8_block+fp8_kv") as found:
        yield found


def test_the_engine_is_the_planned_one(served: Served) -> None:
    seen = served.do(served.server.fp8plan_seen())
    assert seen["status"]["precision"] == seen["facts"].precision == "fp8_block+fp8_kv"
    assert (seen["facts"].limits.max_model_len, seen["facts"].limits.max_num_seqs) == (256, 8)
    assert served.server.engine.model_config.logprobs_mode == "processed_logprobs"


def test_a_sync_of_the_colocated_trainer_serves_with_measured_scales(served: Served) -> None:
    served.step(weights("dense", "b").items(), 1)
    first = served.server._front.seen
    assert (first["serving"], first["weights"]["version"]) == (True, 1)
    assert first["kv_scales"]["source"] == "random tokens, as no rollout has run yet"
    found = [served.answer(list(prompt), f"first {number}") for number, prompt in enumerate(PROMPTS)]
    assert {one.extra_fields["global_steps"] for one in found} == {1}
    assert all(len(one.token_ids) == len(one.log_probs) == 5 for one in found)
    served.step(weights("dense", "b").items(), 2)
    second = served.server._front.seen
    assert second["kv_scales"]["source"] == "the last sequences that were generated"
    sequences = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, found, strict=True)]
    digests, scales = served.rpc("fp8plan_digests"), second["kv_scales"]["scales"]
    with started("dense", "b", "fp8_block+fp8_kv") as engine:
        engine.recalibrate_kv(kv_prompts=sequences)
        assert engine.llm.collective_rpc("fp8plan_digests")[0]["ok"] == digests
        assert engine.kv_scales() == scales


def test_a_sync_of_separate_engines_measures_them_in_the_pause(served: Served) -> None:
    """As CheckpointEngineManager.update_weights does: abort, release the KV cache, send, restore it, resume."""
    server = served.server
    served.do(server.abort_all_requests())
    served.do(server.release_kv_cache())
    served.sync(weights("dense", "a").items(), 3)
    assert "by which their scales are measured" in server._front.state.refusal
    served.do(server.resume_kv_cache())
    assert (server._front.seen["weights"]["version"], server._front.seen["serving"]) == (3, True)
    served.do(server.resume_generation())
    assert len(served.answer([1, 2, 3], "separate").token_ids) == 5


def test_a_rollout_is_timed_from_its_first_request_to_its_last(served: Served) -> None:
    served.do(served.server.fp8plan_begin())
    assert served.do(served.server.fp8plan_seen())["rollout"] is None
    for number in range(3):
        served.answer(list(PROMPTS[number % 2]), f"timed {number}")
    rollout = served.do(served.server.fp8plan_seen())["rollout"]
    assert rollout["prompt_lengths"] == [len(PROMPTS[0]), len(PROMPTS[1]), len(PROMPTS[0])]
    assert rollout["response_lengths"] == [5, 5, 5]
    assert rollout["prompt_ids"][0] == rollout["prompt_ids"][2] != rollout["prompt_ids"][1]
    assert 0 < rollout["seconds"] < 60


def test_a_refused_sync_is_an_error_and_garbage_does_not_generate(served: Served) -> None:
    sent = weights("dense", "b")
    sent["model.norm.weight"][3] = float("nan")
    served.do(served.server.sleep())
    served.do(served.server.wake_up(tags=["weights"]))
    with pytest.raises(SyncError, match=r"not finite: model\.norm\.weight.*the server refuses to generate"):
        served.sync(sent.items())
    served.do(served.server.wake_up(tags=["kv_cache"]))
    with pytest.raises(SyncError, match="generates again after a complete update"):
        served.answer([1, 2, 3], "refused")
    served.step(weights("dense", "b").items(), 4)
    assert len(served.answer([1, 2, 3], "again").token_ids) == 5
