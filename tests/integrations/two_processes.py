"""Two processes that train together."""

import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trl_runs import logged, started
from vllm_server import free_port

from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard, Verdict

RANKS = 2


def launch(model: str, folder: str, url: str = "", port: str = "0") -> None:
    """Train a model in two processes; each writes what it has seen to a file of the folder.

    url: of a server; without one, each process has an engine of its own. port: where the first meets the server
    """
    import trl.trainer.grpo_trainer  # noqa: F401 -- once for both

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [get_context("fork").Process(target=train, args=(rank, model, folder, url, port)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS


def judge(guard: Guard, observed: Any) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=Action.KV_TO_BF16, reason="a test")


def train(rank: int, model: str, folder: str, url: str, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    Guard.after_rollout = judge  # type: ignore[method-assign]
    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 3, "ddp_backend": "gloo"}
    settings["policy"] = model
    if url:
        settings |= {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": int(port)}
    with started(Path(folder), plan="auto", choice="fp8_kv", **settings) as trainer:
        trainer.train()
        seen = {name: logged(trainer, f"fp8plan/{name}") for name in ("k3_kl", "fp8_kv", "threshold_tis")}
        seen |= {"ratio": logged(trainer, "sampling/importance_sampling_ratio/mean")}
        seen |= {"responses": trainer.plan.workload["prompts"] * trainer.plan.workload["samples"]}
        seen |= {"weights": [float(x.detach().double().sum()) for x in trainer.model.parameters()]}
        seen |= {"state": trainer.monitor.state_dict()["controller"]}
    Path(folder, f"seen_{rank}.json").write_text(json.dumps(seen))
