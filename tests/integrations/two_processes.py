"""One of two processes that train together: MODEL FOLDER [URL PORT]; prints what it has seen as one line of JSON.

URL: of a server; without one, each process has an engine of its own. PORT: where the first meets the server
"""

import json
import sys
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 -- the environment of an engine under test
from trl_runs import logged, started

from fp8plan.runtime.guard.fallback import Action
from fp8plan.runtime.guard.guard import Guard, Verdict


def judge(guard: Guard, observed: Any) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=Action.KV_TO_BF16, reason="a test")


def main(model: str, folder: str, url: str = "", port: str = "0") -> None:
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
    print(f"\nSEEN {json.dumps(seen)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
