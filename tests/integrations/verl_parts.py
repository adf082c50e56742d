"""verl's parts on a CPU: its configuration, its vLLM server with a real engine, and the sender of its transport."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frozen_imports import freeze_imports
from plans import predicted
from tiny_models import TOKENS, checkpoint, cpu_plan
from trl_runs import model
from verl_config import configured
from vllm_server import ROOT, entry_points

from fp8plan.model.plan.plan import Plan
from fp8plan.model.precision import PRESETS

BUCKET_MB = 1  # of the transport: a tiny model takes several


NAMED = "actor_rollout_ref.rollout.name=fp8plan"


def config(*overrides: str) -> Any:
    """verl's real configuration, with fp8plan's rollouts."""
    return configured([NAMED, *overrides])


def small(*overrides: str) -> Any:
    """The same for the engine of tiny_models.cpu_plan, and tiny rollouts."""
    return config(
        f"actor_rollout_ref.model.path={model()}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.max_model_len=256",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "trainer.n_gpus_per_node=1",
        *overrides,
    )


def planned(precision: str) -> Plan:
    """A plan for small(), of an engine as tiny_models starts them."""
    choices = (replace(predicted(name), kl_k3=1e-3, kl_k3_low=5e-4, kl_k3_high=8e-3) for name in PRESETS)
    return replace(cpu_plan(precision), model=model(), choices=tuple(choices), thresholds={"token_tis": 4.0})


@contextmanager
def installed() -> Iterator[None]:
    """An environment in which packages ask for `vllm` by that name, and for fp8plan's entry points."""
    helpers = [ROOT, *(ROOT / "tests" / name for name in ("integrations", "runtime", "model", "cpu_kernels"))]
    before = dict(os.environ)  # verl's server and its workers leave their ranks there
    with tempfile.TemporaryDirectory(prefix="fp8plan-verl-") as folder, pytest.MonkeyPatch.context() as patch:
        paths = [str(entry_points(Path(folder))), *map(str, helpers)]
        patch.setattr(sys, "path", [*paths, *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_cpu_platform")
        patch.setenv("VLLM_PLUGINS", "fp8plan_cpu_kernels")  # blockwise FP8 on any CPU
        yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


JOB = f"test-{os.getpid()}"  # verl's sockets are named by Ray's job
HANDLE = f"ipc:///tmp/rl-colocate-zmq-{JOB}-replica-0-rank-0.sock"


def send(pairs: Iterable[tuple[str, Any]]) -> None:
    """Send tensors from this thread as verl's trainer does."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    asyncio.run(BucketedWeightSender(HANDLE, BUCKET_MB, use_shm=True).async_send_weights(iter(pairs)))


@contextmanager
def engine_of(which: str = "a", kind: str = "dense", **settings: Any) -> Iterator[Any]:
    """A vllm.LLM in this process, whose worker has verl's methods and fp8plan's."""
    from native_client import SETTINGS, ended

    with installed(), pytest.MonkeyPatch.context() as patch:
        import verl_cpu_platform  # noqa: F401 -- verl may have been imported before
        from vllm import LLM

        patch.setenv("VERL_RAY_JOB_ID", JOB)
        patch.setenv("VERL_REPLICA_RANK", "0")
        freeze_imports()
        worker = "fp8plan.integrations.verl.worker.PlannedWorker"
        with unextended():
            llm = LLM(str(checkpoint(kind, which)), worker_extension_cls=worker, **(SETTINGS | settings))
            yield llm
            ended(llm)


@contextmanager
def unextended() -> Iterator[None]:
    """vLLM's worker as it was before engines of this process mixed their extensions in; the same afterwards."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    before = CPUWorker.__bases__
    CPUWorker.__bases__ = tuple(base for base in before if not base.__module__.startswith("fp8plan"))
    yield
    CPUWorker.__bases__ = before
    # Python keeps the way in which verl's mixin made instances, unless the class says another.
    CPUWorker.__new__ = lambda kind, *_, **__: object.__new__(kind)


def update(llm: Any, pairs: Iterable[tuple[str, Any]], **how: Any) -> dict[str, Any]:
    """The worker's answer to an update."""
    sender = threading.Thread(target=send, args=(pairs,), daemon=True)
    sender.start()
    answer: dict[str, Any] = llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True} | how)[0]
    sender.join(10)
    assert not sender.is_alive(), f"the sender waits for a worker that has answered {answer}"
    return answer


class Served:
    """verl's server in this process, with the event loop that it lives on in a thread."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.begin(work).result(240)

    def rpc(self, method: str) -> Any:
        """The worker's answer to one of fp8plan's methods."""
        return self.do(self.server.collective_rpc(method))[0]["ok"]

    def sync(self, pairs: Iterable[tuple[str, Any]], step: int | None = None, **how: Any) -> None:
        """Send tensors as verl's ServerAdapter does (workers/rollout/vllm_rollout/vllm_rollout.py, update_weights)."""
        arguments = {"peft_config": None, "base_sync_done": True, "use_shm": True} | how
        call = self.server.collective_rpc("update_weights_from_ipc", timeout=None, args=(), kwargs=arguments)
        future = self.begin(call)
        send(pairs)
        future.result(60)
        self.do(self.server.clear_kv_cache())
        if step is not None:
            self.do(self.server.set_global_steps(step))

    def step(self, pairs: Iterable[tuple[str, Any]], step: int | None = None) -> None:
        """One sync of the colocated trainer: asleep, weights awake, weights sent, KV cache awake."""
        self.do(self.server.sleep())
        self.do(self.server.wake_up(tags=["weights"]))
        self.sync(pairs, step)
        self.do(self.server.wake_up(tags=["kv_cache"]))

    def ask(self, prompt: list[int], name: str = "request", **settings: Any) -> Future[Any]:
        """Begin one request, sampled as tiny_models.answer samples."""
        how = {"temperature": 1.0, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True} | settings
        return self.begin(self.server.generate(prompt, how, name))

    def answer(self, prompt: list[int], name: str = "request", **settings: Any) -> Any:
        return self.ask(prompt, name, **settings).result(240)

    def end(self) -> None:
        self.do(_ended(self.server))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)


async def _ended(server: Any) -> None:
    server.engine.shutdown()
    server._server_task.cancel()


@contextmanager
def serving(plan: str | Plan, *overrides: str) -> Iterator[Served]:
    """verl's server with an engine of fp8plan's, as verl's replica launches it on a GPU. plan: or a precision of one"""
    from omegaconf import open_dict

    with installed(), pytest.MonkeyPatch.context() as patch:
        import verl.workers.rollout.vllm_rollout.vllm_async_server as of_verl
        import verl_cpu_platform  # noqa: F401 -- verl may have been imported before
        from verl.workers.rollout.replica import RolloutMode

        from fp8plan.integrations.verl.server import PlannedServer
        from fp8plan.integrations.verl.settings import hand_on

        context = SimpleNamespace(get_job_id=lambda: JOB)
        util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        patch.setattr(of_verl, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
        for name in ("CUDA_VISIBLE_DEVICES", "VERL_REPLICA_RANK", "VERL_RAY_JOB_ID"):
            patch.setenv(name, "")  # the server sets them; gone again afterwards
        told = small(*overrides)
        made_plan = planned(plan) if isinstance(plan, str) else plan
        hand_on(told, made_plan.to_json(), told.actor_rollout_ref.rollout.max_model_len)
        with open_dict(told):
            told.actor_rollout_ref.rollout.enable_sleep_mode = False  # of GPUs
        arguments: dict[str, Any] = {"replica_rank": 0, "node_rank": 0, "gpus_per_node": 1, "nnodes": 1}
        rollout, models = told.actor_rollout_ref.rollout, told.actor_rollout_ref.model

        async def made() -> Any:
            server = PlannedServer(rollout, models, RolloutMode.HYBRID, [], cuda_visible_devices="", **arguments)
            await server.launch_server()
            return server

        served = Served(None)
        served.server = served.do(made())
        try:
            yield served
        finally:
            served.end()
