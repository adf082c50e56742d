"""How a server ends whose engine has died, or that is told to end: with stand-ins for vLLM's engine and HTTP server."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fp8plan.runtime.apply.server.ending import Ending

pytestmark = pytest.mark.vllm


class Engine:
    """An engine that lives until it is told to end, or dies."""

    errored, dead_error = False, RuntimeError("the engine has died")

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True


class Http:
    """A server that ends once it is asked to, after its open requests."""

    def __init__(self) -> None:
        self.should_exit, self.requests = False, asyncio.Event()

    async def serve(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)
        await self.shutdown()

    async def shutdown(self, sockets: Any = None) -> None:
        await self.requests.wait()


def ends(how: str, hangs: bool = False) -> tuple[str, list[int]]:
    """How the server's own coroutine ends, and the exit codes with which the process was left."""
    left, over = list[int](), threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        over.set()

    async def served() -> str:
        engine, state = Engine(), SimpleNamespace()
        ending = Ending(engine, state, grace_s=0.2 if hangs else 60, leave=leave)
        state.server = http = Http()
        serves = asyncio.create_task(http.serve())
        await asyncio.sleep(0.6)
        assert not serves.done()
        if how == "dies":
            engine.errored = True
        else:
            engine.shutdown(timeout=0)
            assert ending.ended
            http.should_exit = True
        if hangs:
            await asyncio.to_thread(over.wait, 30)
            return "hangs"
        http.requests.set()
        try:
            await serves
        except RuntimeError as error:
            return str(error)
        return "well"

    return asyncio.run(asyncio.wait_for(served(), 60)), left


def test_an_engine_that_dies_ends_the_server_with_an_error() -> None:
    assert ends("dies") == ("the engine has died", [])


def test_a_server_that_is_told_to_end_ends_well() -> None:
    assert ends("told") == ("well", [])


@pytest.mark.parametrize("how", ["dies", "told"])
def test_a_request_that_hangs_does_not_hold_the_server(how: str) -> None:
    assert ends(how, hangs=True) == ("hangs", [1])


def test_vllms_own_wish_to_stay_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")

    async def served() -> None:
        state = SimpleNamespace(server=(http := Http()))
        engine = Engine()
        Ending(engine, state, grace_s=0, leave=lambda code: pytest.fail("left"))
        engine.errored = True
        await asyncio.sleep(0.8)
        assert not http.should_exit

    asyncio.run(served())
