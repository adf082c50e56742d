"""The same syncs under asyncio, with vLLM's AsyncLLM in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from slow_files import URL, slow_files
from tiny_models import CALIBRATION, PROMPTS, TOKENS, Outputs, checkpoint, cpu_plan, started_beside_references, weights

import fp8plan
from fp8plan.errors import ConfigError, LostEngineError, NotServingError, SyncError
from fp8plan.runtime.apply.engine.async_engine import AsyncRolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Rpc
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.settings import SyncSettings
from fp8plan.runtime.apply.weight_sync.state import Weights

pytestmark = pytest.mark.vllm
Answer = TypeVar("Answer")


async def generate(engine: AsyncRolloutEngine) -> Outputs:
    return [await one(engine, prompt) for prompt in PROMPTS]


async def one(
    engine: AsyncRolloutEngine, prompt: list[int], tokens: int = TOKENS, **more: int
) -> tuple[list[int], list[float]]:
    from vllm import SamplingParams

    told: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    how = SamplingParams(**told | more)
    request = None
    async for request in engine.generate({"prompt_token_ids": prompt}, how):  # noqa: B007 -- the last is whole
        pass
    (found,) = request.outputs
    ids = list(found.token_ids)
    return ids, [entry[token].logprob for token, entry in zip(ids, found.logprobs, strict=True)]


@pytest.mark.parametrize(
    ("kind", "precision"), [("dense", "fp8_block"), pytest.param("moe", "fp8_block+fp8_kv", marks=pytest.mark.slow)]
)
def test_syncs_alternate_between_two_sets_of_weights(kind: str, precision: str, tmp_path: Path) -> None:
    import warm_processes  # noqa: F401 -- it imports vLLM

    with started_beside_references(kind, precision) as (_, found):
        expected = {which: outputs[: len(PROMPTS)] for which, outputs in found.items()}

    async def steps() -> None:
        folder = str(checkpoint(kind, "a"))
        engine = await AsyncRolloutEngine.from_plan(cpu_plan(precision), folder, skip_tokenizer_init=True)
        try:
            for which in "ba":
                report = await engine.sync_weights(weights(kind, which), kv_prompts=CALIBRATION)
                assert report.compared > 0
                assert await generate(engine) == expected[which]
            await faults(engine)
            await cancelled(engine)
            await engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION)
            assert await generate(engine) == expected["a"]
            await rolled_out(engine)
            await examined(engine)
            await pulled(engine)
            await died(engine)
        finally:
            engine.shutdown()
        await after_shutdown(engine)

    async def rolled_out(engine: AsyncRolloutEngine) -> None:
        """The requests of an opened rollout are judged together, others are not."""
        assert engine.observation is None
        with engine.rollout():
            await asyncio.gather(*(one(engine, prompt, tokens=5) for prompt in PROMPTS))
            await one(engine, PROMPTS[0], tokens=7)
        await one(engine, PROMPTS[1], tokens=9)  # an evaluation
        seen = engine.observation
        assert seen is not None
        assert sorted(seen.response_lengths) == [5, 5, 7]
        assert 0 < (seen.arrival_s or 0) < seen.seconds
        assert (engine.verdict is None) == (engine.guard is None)
        assert len(engine.last_sequences) == 3

    async def examined(engine: AsyncRolloutEngine) -> None:
        """The doctor asks it in its event loop, and sees the weights that it was not told of."""
        found = await fp8plan.async_doctor(engine, weights=weights(kind, "a"))
        assert [one.says for one in found.faults] == []
        assert found.target == "AsyncRolloutEngine on cpu"
        other = await fp8plan.async_doctor(engine, weights=weights(kind, "b"))
        assert [one.fault for one in other.faults] == ["stale_weights"]
        with pytest.raises(ConfigError, match=r"await fp8plan\.async_doctor"):
            fp8plan.doctor(engine)

    async def cancelled(engine: AsyncRolloutEngine) -> None:
        """Tasks that are cancelled at random moments leave no request, and weights that serve or are refused."""
        chance, serves = random.Random(5), "a"
        await engine.sync_weights(weights(kind, serves), kv_prompts=CALIBRATION)
        for number in range(9):
            other, version = "b" if serves == "a" else "a", engine.state.version
            work = {
                0: lambda: one(engine, PROMPTS[0], tokens=200),
                1: lambda other=other: engine.sync_weights(weights(kind, other), kv_prompts=CALIBRATION),
                2: lambda: engine.recalibrate_kv(kv_prompts=CALIBRATION),
            }[number % 3]()
            task = asyncio.create_task(work)
            await asyncio.sleep(chance.uniform(0, 0.3 if number % 3 == 0 else 0.1))
            task.cancel()
            await asyncio.wait({task})
            assert engine.llm.output_processor.get_num_unfinished_requests() == 0
            serves = serves if engine.state.version == version else other
            if not engine.serving:
                with pytest.raises(NotServingError, match="CancelledError"):
                    await one(engine, PROMPTS[0])
                await engine.sync_weights(weights(kind, serves), kv_prompts=CALIBRATION)
            assert await generate(engine) == expected[serves], f"other bits after {number}"

    async def pulled(engine: AsyncRolloutEngine) -> None:
        """It follows a store; in asyncio `pull` is a coroutine. Requests run while the files come."""
        settings, engine.state.settings = engine.state.settings, SyncSettings(weights_in="fp8_block")
        with slow_files(tmp_path / "temporary") as files:
            follower = Follower(URL)
            assert await follower.pull(engine) is None
            publisher, before = Publisher(URL), "a"
            for which, patched in (("b", False), ("a", True)):
                publisher.publish(weights(kind, which))
                files.begun.clear()
                files.fast.clear()
                pull = asyncio.create_task(follower.pull(engine, kv_prompts=CALIBRATION))
                while not files.begun.is_set():
                    await asyncio.sleep(0.01)
                assert await generate(engine) == expected[before]
                assert not pull.done()
                files.fast.set()
                report = await pull
                assert report.patched == patched
                assert await generate(engine) == expected[which]
                before = which
        engine.state.settings = settings

    async def died(engine: AsyncRolloutEngine) -> None:
        """A call that waits for an answer and a request that meets a closed socket say so. The next sync starts the
        engine again."""
        client = engine.llm.engine_core
        processes = client.resources.engine_manager.processes
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        waits = asyncio.create_task(engine.answer(Rpc("fp8plan_facts")))
        await asyncio.sleep(0.3)
        assert not waits.done()
        for process in processes:
            process.kill()
        with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again"):
            await waits
        engine.state.weights = Weights()  # as if nobody had noticed
        while not client.input_socket.closed:
            await asyncio.sleep(0.05)
        client.ensure_alive = lambda: None
        with pytest.raises(NotServingError, match="the engine has died; the next sync_weights starts it again"):
            await one(engine, PROMPTS[0])
        await engine.sync_weights(weights(kind, "b"), kv_prompts=CALIBRATION)
        assert await generate(engine) == expected["b"]

    async def after_shutdown(engine: AsyncRolloutEngine) -> None:
        assert not engine.serving
        for call in (
            lambda: one(engine, PROMPTS[0]),
            lambda: engine.sync_weights(weights(kind, "b")),
            engine.recalibrate_kv,
            engine.kv_scales,
            engine.sleep,
            engine.wake_up,
        ):
            with pytest.raises(LostEngineError, match="the engine was shut down; make another with from_plan"):
                await call()
        engine.shutdown()

    async def faults(engine: AsyncRolloutEngine) -> None:
        running = asyncio.create_task(one(engine, PROMPTS[0], tokens=240))
        await asyncio.sleep(0.1)
        with pytest.raises(SyncError, match="1 requests are running"):
            await engine.sync_weights(weights(kind, "a"), kv_prompts=CALIBRATION)
        await running
        for wrong in ({"seed": 2**70}, {"seed": 2**64 - 1, "n": 3}):  # they leave nothing that forbids a sync
            with pytest.raises(ConfigError, match=r"cannot be sent to the engine: .*allowed: whole numbers of 64 bits"):
                await one(engine, PROMPTS[0], tokens=240, **wrong)
            assert engine._busy() == 0
        measuring = asyncio.create_task(engine.recalibrate_kv(kv_prompts=CALIBRATION))
        await asyncio.sleep(0)
        with pytest.raises(NotServingError, match="a sync is running"):
            await one(engine, PROMPTS[0])
        await measuring
        spoilt = weights(kind, "a")
        spoilt["model.norm.weight"][0] = float("nan")
        with pytest.raises(SyncError, match=r"not finite: model\.norm\.weight.*refuses to generate"):
            await engine.sync_weights(spoilt, kv_prompts=CALIBRATION)
        with pytest.raises(NotServingError, match=r"model\.norm\.weight"):
            await one(engine, PROMPTS[0])

    finished(steps())


def finished(work: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(asyncio.wait_for(work, timeout=600))
