"""The requests that a Front lets generate, and when. A stand-in has the part of an AsyncLLM that a Front uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slow_files import URL, SlowFiles, slow_files

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.engine.async_engine import answered_or_dead
from fp8plan.runtime.apply.plugin import PROBE
from fp8plan.runtime.apply.server.front import UpdateError
from fp8plan.runtime.apply.server.lifecycle import LifecycleFront
from fp8plan.runtime.apply.weight_sync.calls import Reset, rpc
from fp8plan.runtime.apply.weight_sync.delta.base import Chain
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.listing import HELD
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher
from fp8plan.runtime.apply.weight_sync.kv_calibration import clean
from fp8plan.runtime.apply.weight_sync.report import SyncReport
from fp8plan.runtime.apply.weight_sync.state import Event, State
from fp8plan.runtime.watch.mismatch.sampling import Sampling


class Engine:
    """An engine that tokenises a prompt until it is told to go on. vLLM counts the request only from then on."""

    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", num_gpu_blocks=4, block_size=16),
        model_config=SimpleNamespace(
            model="a-model", max_model_len=16, get_vocab_size=lambda: 8, is_multimodal_model=False
        ),
    )
    model_config = vllm_config.model_config
    output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
    errored, dead_error = False, RuntimeError("the engine's process has ended")

    def __init__(self, *responses: Any) -> None:
        self.go_on, self.calls, self.responses = asyncio.Event(), list[str](), list(responses)
        self.request_id = "0"
        self.weight_version = "default"

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        await self.go_on.wait()
        yield SimpleNamespace(prompt_token_ids=[1], outputs=self.responses, request_id=self.request_id)

    async def is_paused(self) -> bool:
        return False

    async def get_weight_version(self) -> str:
        return self.weight_version

    async def update_weight_version(self, new_version: str) -> None:
        self.weight_version = new_version

    async def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")

    async def other(self, *_: Any, **__: Any) -> None: ...

    async def reset_prefix_cache(self, **_: Any) -> bool:
        return True

    sleep = wake_up = pause_generation = resume_generation = release_kv_cache_memory = other
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


WORKER: dict[str, Any] = {"version": 3, "refusal": None, "last_update": None, "kv_scales": {}}


class Silent(LifecycleFront):
    """A front whose trainers count as gone after a moment, and whose workers note what becomes of an update.

    half: a worker has written some of the update's tensors
    """

    def __init__(self, engine: Engine, half: bool = False) -> None:
        super().__init__(engine)
        self.limit_s, self.given_up = 0.3, list[str]()
        self.half, engine.collective_rpc = half, self.collective_rpc  # type: ignore[attr-defined]

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        if method == "fp8plan_abort":
            self.given_up += args
            return [{"ok": True}, {"ok": not self.half}]
        return [{"ok": WORKER}]


@pytest.mark.parametrize("half", [False, True])
def test_an_update_that_nobody_ends_is_shown_and_ended(half: bool) -> None:
    """The old weights serve if they are whole. The pause of the trainer that is gone ends with its update."""

    async def meeting() -> None:
        engine, paused = Engine(), True

        async def is_paused() -> bool:
            return paused

        async def resume() -> None:
            nonlocal paused
            paused = False

        engine.is_paused, engine.resume_generation = is_paused, resume  # type: ignore[method-assign, assignment]
        engine.go_on.set()
        front = Silent(engine, half)
        await front.start_weight_update()
        await front.update_weights()
        waiting = asyncio.create_task(anext(front.generate("a prompt")))
        await asyncio.sleep(0.1)
        shown = await front.status()
        assert (shown["serving"], shown["paused"]) == (False, True)
        assert 0.1 <= shown["open_update"]["silent_s"] <= shown["open_update"]["age_s"] < 0.3
        assert shown["open_update"]["limit_s"] == 0.3
        assert "is open for 0 s, and its trainer silent for 0 s; after 0.3 s of silence" in shown["refusal"]
        assert not waiting.done()
        await asyncio.wait({waiting})
        ended = "the update was ended, as its trainer was silent for 0.3 s (FP8PLAN_TRANSFER_TIMEOUT_S)"
        failed = f"the update of the weights failed: {ended}"
        assert front.given_up == [failed]
        shown = await front.status()
        assert (shown["open_update"], shown["last_failure"]) == (None, ended)
        assert (shown["serving"], shown["refusal"], shown["paused"]) == (not half, failed if half else None, half)
        if half:
            assert failed in str(waiting.exception())
        else:
            assert waiting.result().prompt_token_ids == [1]
        paused = False
        await front.start_weight_update()  # the next trainer is taken

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_a_trainer_that_was_only_slow_is_told_that_its_update_was_ended(call: str) -> None:
    async def meeting() -> None:
        front = Silent(Engine())
        await front.start_weight_update()
        while front.open_update() is not None:
            await asyncio.sleep(0.05)
        for _ in range(2):
            with pytest.raises(UpdateError, match=r"^no update is open. The last one: the update was ended, .*; begin"):
                await getattr(front, call)()
        assert front.refusal is None

    asyncio.run(asyncio.wait_for(meeting(), 30))


async def being_finished(slow: str, fails: bool = False) -> tuple[Silent, asyncio.Task[None]]:
    """A front whose update is being finished, and the call that waits for it."""

    async def waits(*_: Any, **__: Any) -> bool:
        await asyncio.sleep(0.2)
        if fails:
            raise ValueError("missing: a tensor")
        return True

    front = Silent(engine := Engine(), half=True)
    await front.start_weight_update()
    await front.update_weights()
    if slow == "the workers":
        front._own["finish_weight_update"] = waits
    else:
        engine.reset_prefix_cache = waits  # type: ignore[method-assign]
    ending = asyncio.create_task(front.finish_weight_update())
    await asyncio.sleep(0.05)
    return front, ending


@pytest.mark.parametrize("slow", ["the workers", "the prefix cache"])
@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_call_beside_the_end_of_an_update_does_not_end_it(call: str, slow: str) -> None:
    """A client that gets no answer in time repeats its call, for example."""

    async def meeting() -> None:
        front, ending = await being_finished(slow)
        with pytest.raises(UpdateError, match="an update is being finished; wait for it before you"):
            await getattr(front, call)()
        await ending
        assert (front.refusal, front.failure) == (None, None)

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("slow", ["the workers", "the prefix cache"])
def test_an_update_whose_finish_was_cancelled_ends_all_the_same(slow: str, fails: bool) -> None:
    async def meeting() -> None:
        front, ending = await being_finished(slow, fails)
        ending.cancel()
        await asyncio.wait({ending})
        assert front.open_update() is None  # no trainer is waited for
        await asyncio.sleep(0.6)
        assert front.state.weights.state is (State.REFUSED if fails else State.SERVING)
        assert ("missing: a tensor" in (front.failure or "")) is fails
        await front.start_weight_update()  # the next trainer is taken

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_an_update_whose_start_was_cancelled_is_ended() -> None:
    async def meeting() -> None:
        async def slow(*_: Any) -> None:
            await asyncio.sleep(10)

        front = Silent(Engine())
        front._own["start_weight_update"] = slow
        beginning = asyncio.create_task(front.start_weight_update())
        await asyncio.sleep(0.05)
        beginning.cancel()
        await asyncio.wait({beginning})
        assert front.refusal is not None
        await asyncio.sleep(0.6)
        assert (front.open_update(), front.refusal) == (None, None)

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_trainer_that_is_heard_of_is_not_silent() -> None:
    """Neither between calls, nor in one that takes longer than the limit."""

    async def meeting() -> None:
        async def slow(*_: Any) -> None:
            await asyncio.sleep(0.6)

        front = Silent(engine := Engine())
        await front.start_weight_update()
        for call in (Engine.other, slow, Engine.other):
            await asyncio.sleep(0.2)
            front._own["update_weights"] = call
            await front.update_weights(engine)
        assert front.open_update() is not None
        assert front.open_update()["age_s"] >= 1.0  # type: ignore[index]
        assert not front.given_up

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_an_update_that_another_trainer_takes_over_is_given_up_and_never_finished() -> None:
    async def meeting() -> None:
        front = Silent(Engine())
        await front.start_weight_update()
        assert not front.given_up
        await front.start_weight_update()
        assert front.given_up == ["the update of the weights failed: a trainer has begun another"]

    asyncio.run(meeting())


@pytest.mark.parametrize("call", ["update", "finish", "pause", "wake up", "pull"])
def test_whoever_waits_for_an_engine_that_dies_gets_an_error(call: str) -> None:
    """vLLM itself never answers then."""

    async def meeting() -> None:
        engine = Engine()
        engine.engine_core = SimpleNamespace(_call_utility_async=lambda *_: asyncio.Event().wait())  # type: ignore[attr-defined]

        async def asked(*_: Any, **__: Any) -> None:
            await engine.engine_core._call_utility_async("a call")  # type: ignore[attr-defined]

        answered_or_dead(engine)
        engine.update_weights = engine.finish_weight_update = engine.pause_generation = engine.wake_up = asked  # type: ignore[method-assign]
        front = Follows(engine)
        if call == "pull":
            engine.collective_rpc = asked  # type: ignore[attr-defined]
        if call in ("update", "finish"):
            await front.start_weight_update()
        front.report, front._answered = None, {"worker": WORKER, "named": None, "paused": False}
        waits = asyncio.create_task(OTHERS[call](front))
        await asyncio.sleep(0.3)
        assert not waits.done()
        engine.errored = True
        with pytest.raises((RuntimeError, UpdateError), match="the engine's process has ended"):
            await waits
        shown = await front.status()  # of what was known last
        assert (shown["serving"], shown["refusal"]) == (
            False,
            "the engine's process has ended; start the server again",
        )

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize(
    "events", [(), (Event.BEGIN,), (Event.BEGIN, Event.WRITE), (Event.BEGIN, Event.CHECK)], ids=len
)
@pytest.mark.parametrize("ends", [False, True])
def test_in_no_state_does_a_server_whose_engine_was_killed_let_a_request_in(
    events: tuple[Event, ...], ends: bool
) -> None:
    async def meeting() -> None:
        front = LifecycleFront(engine := Engine())
        for event in (*events, Event.END) if ends else events:
            front.state.note(event)
        engine.errored = True
        with pytest.raises(UpdateError):
            await anext(front.generate("a prompt"))
        assert front.refusal == "the engine's process has ended; start the server again"
        assert not front.serving

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_requests_that_wait_for_an_update_do_not_outlive_the_engine() -> None:
    async def meeting() -> None:
        async def paused() -> bool:
            return True

        engine = Engine()
        engine.is_paused = paused  # type: ignore[method-assign]
        front = Silent(engine)
        front.limit_s = 60
        await front.start_weight_update()
        waiting = [asyncio.create_task(anext(front.generate("a prompt"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        await asyncio.wait({waiting[0]})
        engine.errored = True
        for request in waiting[1:]:
            with pytest.raises(RuntimeError, match="the engine's process has ended"):
                await request

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_wake_up_answers_what_vllm_answers() -> None:
    """vLLM's route says "sleeping" unless it is told that the engine is awake."""

    async def meeting() -> None:
        async def awake(*_: Any) -> bool:
            return True

        engine = Engine()
        engine.wake_up = awake  # type: ignore[method-assign]
        assert await Follows(engine).wake_up() is True

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
            return [{"ok": WORKER | {"version": len(asked)}}]

        engine.update_weights, engine.collective_rpc = update_weights, collective_rpc  # type: ignore[attr-defined, method-assign, assignment]
        front = LifecycleFront(engine)
        await front.start_weight_update()
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


REPORT = SyncReport(3, {}, 1, 0, 1, {}, 0, 0, {}, (), 0, None, None, None, None)


class Follows(LifecycleFront):
    """A front with a stand-in for its store: a pull ends once `arrives` is set."""

    def __init__(self, engine: Engine, report: Any = None) -> None:
        super().__init__(engine)
        self.asked, self.arrives = list[str](), asyncio.Event()
        self.begun = asyncio.Event()
        self.follower, self.version = self, 1  # type: ignore[assignment]
        engine.collective_rpc = self.collective_rpc  # type: ignore[attr-defined]
        self.report = report

    async def collective_rpc(self, method: str, **_: Any) -> list[dict[str, Any]]:
        self.asked.append(method)
        if method == "fp8plan_begin":
            self.begun.set()
            await self.arrives.wait()
        return [{"ok": {"version": 3, "stamp": "a", "refusal": None}}]

    def announcing(self, front: LifecycleFront) -> Any:
        yield from ()

    def fetching(self, front: LifecycleFront, folder: str, refused: str | None) -> Any:
        yield from ()
        assert refused is None
        return "files"

    def writing(self, front: LifecycleFront, fetched: Any) -> Any:
        assert front is self
        assert fetched == "files"
        assert (self.state.version, self.state.stamp) == (3, "a")
        yield from clean(self.state)
        yield Reset()
        yield from rpc("fp8plan_begin")
        if isinstance(self.report, Exception):
            raise self.report
        return REPORT, None


OTHERS: dict[str, Any] = {
    "init": lambda front: front.init_weight_transfer_engine(),
    "start": lambda front: front.start_weight_update(),
    "update": lambda front: front.update_weights(),
    "finish": lambda front: front.finish_weight_update(),
    "pause": lambda front: front.pause_generation(mode="keep"),
    "resume": lambda front: front.resume_generation(),
    "sleep": lambda front: front.sleep(),
    "release": lambda front: front.release_kv_cache_memory(),
    "wake up": lambda front: front.wake_up(),
    "pull": lambda front: front.pull(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_changes_the_permission_to_generate_beside_a_pull(other: str) -> None:
    async def meeting() -> None:
        front = Follows(engine := Engine())
        engine.go_on.set()
        pull = asyncio.create_task(front.pull())
        await front.begun.wait()
        with pytest.raises(UpdateError, match="a pull is under way; wait for it"):
            await OTHERS[other](front)
        assert front._under_way == ["pull"]
        waiting = asyncio.create_task(anext(front.generate("a prompt")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        front.arrives.set()
        assert (await pull)["store_version"] == 1  # type: ignore[index]
        assert (await waiting).prompt_token_ids == [1]
        assert not engine.calls
        await front.start_weight_update()
        with pytest.raises(UpdateError, match="an update of the weights is open"):
            await front.pull()

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("switch", ["pause", "resume", "sleep", "wake up"])
def test_a_pull_does_not_begin_beside_a_call_that_switches_generation(switch: str) -> None:
    async def meeting() -> None:
        answer = asyncio.Event()

        async def slow(*_: Any, **__: Any) -> None:
            await answer.wait()

        engine = Engine()
        engine.sleep = engine.wake_up = engine.pause_generation = engine.resume_generation = slow  # type: ignore[method-assign]
        front = Follows(engine)
        front.arrives.set()
        call = asyncio.create_task(OTHERS[switch](front))
        await asyncio.sleep(0)
        with pytest.raises(UpdateError, match="a call to pause, resume, sleep or wake up is under way"):
            await front.pull()
        answer.set()
        await call
        front.state.asleep = frozenset()
        await front.pull()
        assert engine.weight_version == str(front.version)  # vLLM's clients see it

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_pull_waits_for_an_engine_that_is_awake() -> None:
    async def meeting() -> None:
        front = Follows(Engine())
        front.arrives.set()
        await front.sleep(1)
        with pytest.raises(UpdateError, match="kv_cache and weights sleep; wake them up"):
            await front.pull()
        await front.wake_up(["weights"])
        with pytest.raises(UpdateError, match="kv_cache sleep; wake them up"):
            await front.pull()
        await front.wake_up()
        await front.sleep(0)  # a pause
        await front.pull()

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_pull_leaves_the_blocks_of_requests_that_a_pause_keeps() -> None:
    async def meeting() -> None:
        async def paused() -> bool:
            return True

        engine = Engine()
        engine.is_paused = paused  # type: ignore[method-assign]
        engine.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 1)
        engine.resume_generation = engine.reset_prefix_cache = lambda: pytest.fail("touched")  # type: ignore[attr-defined, assignment]
        front = Follows(engine)
        front.state.soiled = True
        front.arrives.set()
        await front.pull()
        assert "fp8plan_zero_kv" not in front.asked
        assert front.state.soiled  # so that a later update zeroes it

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("dead", [False, True])
def test_a_pull_that_fails_lets_requests_go_on_unless_the_engine_is_lost(dead: bool) -> None:
    async def meeting() -> None:
        front = Follows(engine := Engine(), SyncError("the store is on fire; the old weights serve"))
        engine.go_on.set()
        if dead:
            front.state.note(Event.DIE)
        pull = asyncio.create_task(front.pull())
        await front.begun.wait()
        waiting = asyncio.create_task(anext(front.generate("a prompt")))
        await asyncio.sleep(0.05)
        front.arrives.set()
        with pytest.raises(UpdateError, match=r"^the store is on fire; the old weights serve$"):
            await pull
        assert front.failure == "the store is on fire; the old weights serve"
        if dead:
            with pytest.raises(UpdateError, match="the engine's process has ended; start the server again"):
                await waiting
        else:
            await waiting

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_pause_that_cannot_be_put_back_does_not_lock_requests_out() -> None:
    async def meeting() -> None:
        async def paused() -> bool:
            return True

        async def broken(**_: Any) -> None:
            raise OSError("the engine is gone")

        engine = Engine()
        engine.is_paused, engine.pause_generation = paused, broken  # type: ignore[method-assign, assignment]
        front = Follows(engine)
        front.arrives.set()
        with pytest.raises(UpdateError, match="the engine is gone"):
            await front.pull()
        assert not front._measuring
        assert not front._updating

    asyncio.run(asyncio.wait_for(meeting(), 30))


class Downloads(LifecycleFront):
    """A front that follows a slow store. Its workers' part of a write ends once `writes` is set."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.follower, self.state.stamp = Follower(URL), "a"
        self.writing, self.writes = asyncio.Event(), asyncio.Event()
        engine.collective_rpc = self.collective_rpc  # type: ignore[attr-defined]

    async def collective_rpc(self, method: str, **_: Any) -> list[dict[str, Any]]:
        if method == "write":
            self.writing.set()
            await self.writes.wait()
        return [{"ok": {"version": 3, "stamp": "a", "refusal": None}}]

    def syncing(self, chain: Chain, *_: Any) -> Any:
        names = [name for name, _ in chain.patches()]
        yield from rpc("write")
        return SyncReport(3, {}, len(names), 0, 1, {}, 0, 0, {}, (), 0, None, None, None, None)

    async def downloading(self) -> asyncio.Task[Any]:
        """A pull in the middle of its download."""
        SlowFiles.begun.clear()
        SlowFiles.fast.clear()
        pull = asyncio.create_task(self.pull())
        while not SlowFiles.begun.is_set():
            assert not pull.done()
            await asyncio.sleep(0.01)
        return pull


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Publisher]:
    """A store with one version, over a slow link."""
    with slow_files(tmp_path / "temporary"):
        publisher = Publisher(URL, fp8=[])
        formats = {"manifest": [["a", "bfloat16", [64, 8]]], "fp8": [], "reloaded": {}}
        publisher._store.write_json(HELD, formats)
        publisher.publish({"a": torch.ones(64, 8).bfloat16()})
        yield publisher


def test_requests_run_during_a_download_and_wait_during_the_write(store: Publisher) -> None:
    async def meeting() -> None:
        front = Downloads(engine := Engine())
        pull = await front.downloading()
        engine.go_on.set()
        assert (await anext(front.generate("a prompt"))).prompt_token_ids == [1]
        assert not pull.done()
        engine.go_on.clear()
        late = asyncio.create_task(anext(front.generate("one that runs on")))
        await asyncio.sleep(0)
        SlowFiles.fast.set()
        while not front._measuring:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not front.writing.is_set()  # as that request still runs
        engine.go_on.set()
        await late
        await front.writing.wait()
        waiting = asyncio.create_task(anext(front.generate("a prompt")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        front.writes.set()
        assert (await pull)["store_version"] == 1
        assert (await waiting).prompt_token_ids == [1]

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_run_beside_a_download_but_no_second_pull(store: Publisher, other: str) -> None:
    """The pull looks again before it writes."""

    async def meeting() -> None:
        front = Downloads(Engine())
        front.writes.set()
        pull = await front.downloading()
        if other == "pull":
            with pytest.raises(UpdateError, match="a pull is under way; wait for it before you begin a pull"):
                await front.pull()
        elif other in ("update", "finish"):
            with pytest.raises(UpdateError, match=r"no update is open; begin one \(start_weight_update\)"):
                await OTHERS[other](front)
        else:
            await OTHERS[other](front)
        SlowFiles.fast.set()
        if other in ("start", "sleep", "release"):
            with pytest.raises(UpdateError, match=r"an update of the weights is open|kv_cache (and weights )?sleep"):
                await pull
            assert not front.writing.is_set()
            assert front._updating == (other == "start")
        else:
            assert (await pull)["store_version"] == 1

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_download_that_fails_is_noted_and_closes_no_update(store: Publisher) -> None:
    async def meeting() -> None:
        store.publish({"a": torch.ones(64, 8).bfloat16() * 2})
        SlowFiles.vanishing.append("00000002.patches")
        front = Downloads(Engine())
        pull = await front.downloading()
        await front.start_weight_update()
        SlowFiles.fast.set()
        failure = r"^copying slow://store/00000002-\w{8}.patches to .*\. Nothing was written"
        with pytest.raises(UpdateError, match=failure) as raised:
            await pull
        assert front.failure == str(raised.value)
        assert front._updating

    asyncio.run(asyncio.wait_for(meeting(), 30))


def test_a_server_that_ends_during_a_download_leaves_no_files(store: Publisher) -> None:
    async def meeting() -> None:
        pull = await Downloads(Engine()).downloading()
        pull.cancel()
        await asyncio.wait({pull})
        assert not SlowFiles.fast.is_set()

    asyncio.run(asyncio.wait_for(meeting(), 30))


@pytest.mark.parametrize("ends", ["pause", "death"])
def test_a_request_that_runs_on_does_not_hold_a_pull_up_for_ever(store: Publisher, ends: str) -> None:
    """A pause keeps it. With the engine it is dead."""

    async def meeting() -> None:
        front = Downloads(engine := Engine())
        front.writes.set()
        paused = False

        async def is_paused() -> bool:
            return paused

        engine.is_paused = is_paused  # type: ignore[method-assign]
        running = asyncio.create_task(anext(front.generate("one that runs on")))
        await asyncio.sleep(0)
        pull = await front.downloading()
        SlowFiles.fast.set()
        while not front._measuring:
            await asyncio.sleep(0.01)
        if ends == "pause":
            await front.pause_generation(mode="keep")
            paused = True
            assert (await pull)["store_version"] == 1
            assert front.state.soiled
        else:
            engine.errored = True
            with pytest.raises(UpdateError, match="the engine's process has ended"):
                await pull
            assert not front.writing.is_set()
        assert not front._measuring
        running.cancel()

    asyncio.run(asyncio.wait_for(meeting(), 30))
