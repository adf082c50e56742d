"""Ctrl-C at random moments of an engine in another process.

After each, the engine says the same as ever, bit for bit, or refuses until a complete sync. Half of the signals go to
the whole process group, as a terminal sends them; so this must be the leader of a session.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

from tiny_models import CALIBRATION, LONG_PROMPT, PROMPTS, Outputs, answer, started, weights

from fp8plan.errors import NotServingError
from fp8plan.runtime.apply.engine.engine import RolloutEngine


def said(engine: RolloutEngine) -> Outputs:
    """The engine's answers now. The long prompt is answered without its cached prefix."""
    short = [answer(engine, prompt) for prompt in PROMPTS]
    engine.llm.reset_prefix_cache()
    return [*short, answer(engine, LONG_PROMPT)]


def interrupted(act: Callable[[], Any], delay_s: float, group: bool) -> None:
    """Do `act`, and send one SIGINT after `delay_s`, when `act` may be over already."""

    def press() -> None:
        time.sleep(delay_s)
        os.killpg(0, signal.SIGINT) if group else os.kill(os.getpid(), signal.SIGINT)

    pressing = Thread(target=press)
    try:
        pressing.start()
        act()
        time.sleep(60)
        raise AssertionError("no interrupt has come out")
    except KeyboardInterrupt:
        pressing.join()


def main(interrupts: str, seed: str) -> None:
    """Press so many times. seed: of the moments"""
    from vllm import SamplingParams

    chance = random.Random(int(seed))
    how = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    batch = [{"prompt_token_ids": list(prompt)} for prompt in (*PROMPTS, LONG_PROMPT) * 2]
    sent = {which: weights("dense", which) for which in "ab"}
    settings = {"mode": "multiprocess", "chunk_bytes": 300_000}
    with started("dense", "b", "fp8_block+fp8_kv", **settings) as engine:
        serves, expected = "b", {"b": said(engine)}
        engine.sync_weights(sent["a"], kv_prompts=CALIBRATION)
        serves, expected["a"] = "a", said(engine)
        acts: dict[str, Callable[[], Any]] = {
            "generate": lambda: engine.generate(batch, how),
            "sync": lambda: engine.sync_weights(sent["b" if serves == "a" else "a"], kv_prompts=CALIBRATION),
            "recalibrate": lambda: engine.recalibrate_kv(kv_prompts=CALIBRATION),
        }
        took = {}
        for name, act in acts.items():
            begun = time.perf_counter()
            act()
            took[name] = time.perf_counter() - begun
        serves = "b"
        for number in range(int(interrupts)):
            name, version = list(acts)[number % len(acts)], engine.state.version
            interrupted(acts[name], chance.uniform(0, took[name]), group=chance.random() < 0.5)
            if engine.state.version != version:
                serves = "b" if serves == "a" else "a"
            if refuses := not engine.serving:
                try:
                    engine.generate(batch, how)
                    raise AssertionError("it generates while it refuses")
                except NotServingError:
                    engine.sync_weights(sent[serves], kv_prompts=CALIBRATION)
            assert said(engine) == expected[serves], f"other bits after {number}: {name}"
            print(name, "refused" if refuses else "served", flush=True)
