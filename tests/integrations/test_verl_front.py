"""The front of verl's server, before a stand-in that has the part of an AsyncLLM that it uses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.integrations.verl.front import VerlFront
from fp8plan.runtime.apply.weight_sync.state import State


class Engine:
    """An engine without requests, whose workers have no fault."""

    model_config = SimpleNamespace(
        model="a-model", max_model_len=16, get_vocab_size=lambda: 8, is_multimodal_model=False
    )
    cache_config = SimpleNamespace(cache_dtype="auto", num_gpu_blocks=4, block_size=16)
    vllm_config = SimpleNamespace(cache_config=cache_config, model_config=model_config)
    output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
    errored = False

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        status = {"version": 1, "refusal": None, "last_update": None, "kv_scales": {}}
        return [{"ok": False if method == "fp8plan_abort" else status}]

    async def is_paused(self) -> bool:
        return False

    async def get_weight_version(self) -> str:
        return "default"

    async def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    async def other(self, *_: Any, **__: Any) -> None: ...

    generate = pause_generation = resume_generation = sleep = wake_up = release_kv_cache_memory = other


@pytest.mark.parametrize("answer", [{"ok": None}, {"error": "missing: a tensor"}])
def test_an_update_that_was_cancelled_ends_all_the_same(answer: dict[str, Any]) -> None:
    async def meeting() -> None:
        async def slow() -> list[dict[str, Any]]:
            await asyncio.sleep(0.2)
            return [answer]

        front = VerlFront(Engine())
        update = asyncio.create_task(front.update(slow))
        await asyncio.sleep(0.05)
        update.cancel()
        await asyncio.wait({update})
        assert front.state.weights.state is State.WRITING
        await asyncio.sleep(0.4)
        assert front.state.weights.state is (State.REFUSED if "error" in answer else State.SERVING)

    asyncio.run(asyncio.wait_for(meeting(), 30))
