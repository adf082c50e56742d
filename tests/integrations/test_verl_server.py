"""verl's own server with a planned engine, on the CPU: start, syncs as the trainer makes them, requests, refusals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import warm_processes  # noqa: F401 -- it changes how vLLM starts processes
from tiny_models import PROMPTS, TOKENS, started, weights
from verl_parts import Served, serving
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from fp8plan.errors import SyncError
from fp8plan.integrations.verl.front import VerlFront
from fp8plan.runtime.apply.server.front import Front, UpdateError
from fp8plan.runtime.apply.weight_sync.state import State
from fp8plan.runtime.watch.mismatch.sampling import Sampling

pytestmark = [pytest.mark.verl, pytest.mark.vllm]


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
    assert all(len(one.token_ids) == len(one.log_probs) == TOKENS for one in found)
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
    assert "so its scales cannot be measured yet" in server._front.state.refusal
    served.do(server.resume_kv_cache())
    assert (server._front.seen["weights"]["version"], server._front.seen["serving"]) == (3, True)
    served.do(server.resume_generation())
    assert len(served.answer([1, 2, 3], "separate").token_ids) == TOKENS


def test_a_rollout_is_timed_from_its_first_request_to_its_last(served: Served) -> None:
    served.do(served.server.fp8plan_begin())
    assert served.do(served.server.fp8plan_seen())["rollout"] is None
    for number in range(3):
        served.answer(list(PROMPTS[number % 2]), f"timed {number}")
    rollout = served.do(served.server.fp8plan_seen())["rollout"]
    assert rollout["prompt_lengths"] == [len(PROMPTS[0]), len(PROMPTS[1]), len(PROMPTS[0])]
    assert rollout["response_lengths"] == [TOKENS] * 3
    assert rollout["prompt_ids"][0] == rollout["prompt_ids"][2] != rollout["prompt_ids"][1]
    assert rollout["sampling"] == Sampling(trainer_temperature=1.0)
    served.answer(list(PROMPTS[0]), "of a nucleus", top_p=0.9)
    rollout = served.do(served.server.fp8plan_seen())["rollout"]
    assert rollout["sampling"] == Sampling(top_p=0.9, trainer_temperature=1.0)
    assert 0 < rollout["arrival_s"] < rollout["seconds"] < 60


def test_scales_are_measured_on_a_rollouts_sequences_and_on_no_validations(served: Served) -> None:
    served.answer([9, 8], "validated")
    served.do(served.server.fp8plan_begin())
    assert served.server._front._prompts()[0][-1][:2] == [9, 8]  # better than random tokens
    served.answer([5, 6], "sampled")
    assert [sequence[:2] for sequence in served.server._front._prompts()[0]] == [[5, 6]]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens": 1}, {"prompt_logprobs": 2}, {"logprobs": False}, {"stop": None}, {"stop_token_ids": None}],
    ids=lambda settings: next(iter(settings), "as verl asks"),
)
def test_a_request_gets_what_verls_own_server_gives(
    settings: dict[str, Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = served.answer([1, 2, 3], "to stop at").token_ids[0]  # what follows may repeat it, which the CPU decides
    settings |= {"stop": [f"w{first}"]} if "stop" in settings else {}
    settings |= {"stop_token_ids": [first]} if "stop_token_ids" in settings else {}

    def answer(name: str) -> Any:
        served.do(served.server.clear_kv_cache())
        return served.answer([1, 2, 3], name, **settings)

    ours = answer("ours")
    monkeypatch.setattr(VerlFront, "_outputs", Front._outputs)
    assert ours == answer("verl's")
    stops = {"stop", "stop_token_ids"} & settings.keys()
    assert len(ours.token_ids) == (1 if stops else settings.get("max_tokens", TOKENS))
    assert ours.stop_reason == "completed"


def test_requests_of_another_kind_than_verls_get_an_output_for_each_token(served: Served) -> None:
    """As those over HTTP, which ask for DELTA."""

    async def outputs(kind: RequestOutputKind) -> list[Any]:
        params = SamplingParams(max_tokens=4, ignore_eos=True, output_kind=kind)
        return [one async for one in served.server.engine.generate({"prompt_token_ids": [1, 2]}, params, kind.name)]

    added, last = served.do(outputs(RequestOutputKind.CUMULATIVE))
    assert (added.outputs, added.finished, last.finished) == ([], False, True)
    assert (len(last.outputs[0].token_ids), last.outputs[0].text) == (4, "")
    streamed = served.do(outputs(RequestOutputKind.DELTA))
    assert [len(one.outputs[0].token_ids) for one in streamed] == [1, 1, 1, 1]
    assert "".join(one.outputs[0].text for one in streamed).count("w") == 4


def test_an_abort_gives_the_tokens_so_far_and_does_not_wait_for_a_first_one(served: Served) -> None:
    """Twelve requests for an engine that runs eight at once."""
    states = served.server.engine.output_processor.request_states
    asked = [served.ask([number, 2, 3], f"aborted {number}", max_tokens=240) for number in range(12)]
    _wait(lambda: sum(state.detokenizer.num_output_tokens() > 3 for state in states.values()) == 8)
    detokenizers = {state.prompt_token_ids[0]: state.detokenizer for state in list(states.values())}
    assert served.server._admitting == 0
    assert served.do(served.server.abort_all_requests())["aborted_count"] == 12
    found = [one.result(10) for one in asked]
    assert [one.token_ids for one in found] == [detokenizers[number].output_token_ids for number in range(12)]
    lengths = sorted(len(one.token_ids) for one in found)
    assert lengths[:4] == [0, 0, 0, 0]
    assert 3 < lengths[4] <= lengths[-1] < 240
    assert {(one.stop_reason, len(one.log_probs) - len(one.token_ids)) for one in found} == {("aborted", 0)}
    served.do(served.server.resume_generation())
    partial = found[0]
    resumed = served.answer([0, 2, 3, *partial.token_ids], "resumed", max_tokens=4)
    assert (len(resumed.token_ids), resumed.stop_reason) == (4, "completed")


def test_a_request_whose_caller_is_gone_leaves_the_engine(served: Served) -> None:
    states = served.server.engine.output_processor.request_states
    asked = served.ask([5, 6], "given up", max_tokens=250)
    _wait(lambda: any(state.detokenizer.num_output_tokens() for state in states.values()))
    (state,) = states.values()
    assert asked.cancel()
    _wait(lambda: not states)
    assert state.detokenizer.num_output_tokens() < 250
    assert len(served.answer([5, 6], "after it").token_ids) == TOKENS


def test_a_request_that_fails_in_the_front_end_leaves_the_engine(served: Served) -> None:
    states = served.server.engine.output_processor.request_states
    asked = served.ask([7, 8], "to fail", max_tokens=250)
    _wait(lambda: any(state.detokenizer.num_output_tokens() for state in states.values()))
    (state,) = states.values()
    served.do(_called(lambda: state.queue.put(RuntimeError("broken output"))))
    with pytest.raises(RuntimeError, match="broken output"):
        asked.result(10)
    _wait(lambda: not states)
    assert state.detokenizer.num_output_tokens() < 250
    assert len(served.answer([7, 8], "after that").token_ids) == TOKENS


async def _called(function: Callable[[], Any]) -> None:
    """Call a function in the server's event loop."""
    function()


def _wait(until: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


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
    assert len(served.answer([1, 2, 3], "again").token_ids) == TOKENS


@pytest.mark.parametrize("answer", [{"ok": None}, {"error": "missing: a tensor"}])
def test_an_update_that_was_cancelled_ends_all_the_same(answer: dict[str, Any]) -> None:
    async def slow() -> list[dict[str, Any]]:
        await asyncio.sleep(0.2)
        return [answer]

    async def meeting() -> None:
        model = SimpleNamespace(model="m", max_model_len=16, get_vocab_size=lambda: 8, is_multimodal_model=False)
        config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks=4, block_size=16))
        config.model_config = model
        engine = AsyncMock(errored=False, model_config=model, vllm_config=config)
        engine.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
        engine.is_paused.return_value = False
        status = {"version": 1, "refusal": None, "last_update": None, "kv_scales": {}}
        engine.collective_rpc.side_effect = lambda method, args: [{"ok": method != "fp8plan_abort" and status}]
        front = VerlFront(engine)
        update = asyncio.create_task(front.update(slow))
        await asyncio.sleep(0.05)
        update.cancel()
        await asyncio.wait({update})
        assert front.state.weights.state is State.WRITING
        with pytest.raises(UpdateError, match="under way; wait for it before you begin another"):
            await front.update(slow)
        await asyncio.sleep(0.4)
        assert front.state.weights.state is (State.REFUSED if "error" in answer else State.SERVING)

    asyncio.run(asyncio.wait_for(meeting(), 30))
