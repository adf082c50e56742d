"""The requests that a Front lets generate, and when. A stand-in has the part of an AsyncLLM that a Front uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.runtime.mismatch.sampling import Sampling
from fp8plan.runtime.plugin import PROBE
from fp8plan.runtime.server.front import UpdateError
from fp8plan.runtime.server.routes import LifecycleFront


class Engine:
    """An engine that tokenises a prompt until it is told to go on. vLLM counts the request only from then on."""

    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks=4, block_size=16),
        model_config=SimpleNamespace(
            model="a-model", max_model_len=16, get_vocab_size=lambda: 8, is_multimodal_model=False
        ),
    )
    output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)

    def __init__(self, *responses: Any) -> None:
        self.go_on, self.calls, self.responses = asyncio.Event(), list[str](), list(responses)
        self.request_id = "0"

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        await self.go_on.wait()
        yield SimpleNamespace(prompt_token_ids=[1], outputs=self.responses, request_id=self.request_id)

    async def is_paused(self) -> bool:
        return False

    async def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")

    async def other(self, *_: Any) -> None: ...

    sleep = wake_up = resume_generation = other
    init_weight_transfer_engine = update_weights = finish_weight_update = other


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
def test_a_request_that_is_being_tokenised_counts_as_running(ends: str) -> None:
    async def meeting() -> None:
        engine = Engine()
        front = LifecycleFront(engine)

        async def one() -> list[Any]:
            return [found async for found in front.generate("a prompt")]

        seen = front.generate("another")
        engine.go_on.set()
        await anext(seen)  # vLLM counts it itself from then on
        engine.go_on.clear()
        request = asyncio.create_task(one())
        await asyncio.sleep(0)
        with pytest.raises(UpdateError, match="1 requests are running, which would meet a mixture of weights"):
            await front.start_weight_update()
        assert engine.calls == []
        if ends == "answered":
            engine.go_on.set()
        else:
            request.cancel()
        await asyncio.wait({request})
        await front.start_weight_update()
        assert engine.calls == ["start_weight_update"]

    asyncio.run(meeting())


def test_a_request_that_was_just_aborted_is_let_end() -> None:
    async def meeting() -> None:
        engine = Engine()
        front = LifecycleFront(engine)
        request = asyncio.create_task(anext(front.generate("a prompt")))
        await asyncio.sleep(0)
        update = asyncio.create_task(front.start_weight_update())
        await asyncio.sleep(0.02)
        engine.go_on.set()  # what an abort does: its last output comes
        await update
        assert engine.calls == ["start_weight_update"]
        await request

    asyncio.run(meeting())


@pytest.mark.parametrize(("total", "soiled"), [(float("nan"), True), (-1.0, False), (None, False)])
def test_log_probs_that_are_nan_have_the_kv_cache_cleaned_at_the_next_update(total: float | None, soiled: bool) -> None:
    async def meeting() -> None:
        engine = Engine(SimpleNamespace(cumulative_logprob=-1.0), SimpleNamespace(cumulative_logprob=total))
        front = LifecycleFront(engine)
        engine.go_on.set()
        await anext(front.generate("a prompt"))
        assert front.state.soiled == soiled

    asyncio.run(meeting())


def test_requests_are_counted_by_their_sampling_and_probes_are_not() -> None:
    async def meeting() -> None:
        engine = Engine()
        engine.go_on.set()
        front = LifecycleFront(engine)
        front.facts = {"logprobs_mode": "processed_logprobs"}

        async def ask(*how: Any, **more: Any) -> Sampling | None:
            async for _ in front.generate("a prompt", *how, **more):
                pass
            return front.sampling

        assert await ask() is None  # which an AsyncLLM does not take
        assert await ask({"top_p": 0.9}, "0") == Sampling(top_p=0.9)
        assert await ask(sampling_params={"temperature": 0.5}) == Sampling(top_p=0.9, temperature=0.5)
        engine.request_id = f"{PROBE}-1"
        assert await ask({"top_k": 5}) == Sampling(top_p=0.9, temperature=0.5)
        engine.request_id = "2"
        front.facts = {"logprobs_mode": "raw_logits"}
        assert await ask({"top_k": 5}) == Sampling(top_p=0.9, temperature=0.5)

    asyncio.run(meeting())


def test_the_status_answers_while_the_workers_wait_for_a_trainer() -> None:
    """Also one that was asked just before they began to wait; and afterwards they are asked again."""

    async def meeting() -> None:
        engine = Engine()
        arrives, asked = asyncio.Event(), list[str]()

        async def update_weights() -> None:
            await arrives.wait()

        async def collective_rpc(method: str, **_: Any) -> list[dict[str, Any]]:
            asked.append(method)
            if front._under_way or len(asked) == 2:
                await arrives.wait()  # a worker does one thing after another
            return [{"ok": {"version": len(asked), "refusal": None, "last_update": None, "kv_scales": {}}}]

        engine.update_weights, engine.collective_rpc = update_weights, collective_rpc  # type: ignore[attr-defined, method-assign, assignment]
        front = LifecycleFront(engine)
        assert (await front.status())["weights"]["version"] == 1
        early = asyncio.create_task(front.status())  # its question reaches the worker second
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        update = asyncio.create_task(front.update_weights())
        for found in (await early, await front.status()):
            assert found["weights"]["version"] == 1
        assert (await front.status())["under_way"] == ["update_weights"]
        assert len(asked) == 2
        arrives.set()
        await update
        assert (await front.status())["under_way"] == []
        assert (await front.status())["weights"]["version"] > 1

    asyncio.run(asyncio.wait_for(meeting(), 30))
