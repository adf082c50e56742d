"""Two processes that train together."""

import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType, PartialState
from torch.distributed.tensor import DTensor
from trl_runs import logged, started
from vllm_server import free_port

from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard, Verdict

RANKS = 2
# As `accelerate launch` sets them.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
ZERO3 = {
    "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto"),
}


def launch(model: str, folder: str, url: str = "", port: str = "0", sharded: str = "") -> None:
    """Train a model in two processes; each writes what it has seen to a file of the folder.

    url:     of a server; without one, each process has an engine of its own. port: where the first meets the server
    sharded: "fsdp2" or "zero3": each process holds a half of the policy's large tensors
    """
    import trl.trainer.grpo_trainer  # noqa: F401 -- once for both

    if sharded == "fsdp2":
        os.environ |= FSDP
        shard_on_cpus()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        get_context("fork").Process(target=train, args=(rank, model, folder, url, port, sharded == "zero3"))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * RANKS


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs, too: it does so on GPUs alone."""
    begin = Accelerator.__init__

    def begun(self: Accelerator, *args: Any, **more: Any) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        begin(self, *args, **more)

    Accelerator.__init__ = begun


def whole(parameter: Any) -> Any:
    """A parameter of a policy with the shards of all processes."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def same(trainer: Any, policy: dict[str, Any]) -> bool:
    """Return whether the engine holds the policy's weights, of those that a CPU keeps unpacked, bit for bit."""
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    held = {name: x for name, x in model.named_parameters() if "norm" in name or "embed_tokens" in name}
    return len(held) > 10 and all(x.equal(policy[name].bfloat16()) for name, x in held.items())


def judge(guard: Guard, observed: Any) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=Action.KV_TO_BF16, reason="a test")


def train(rank: int, model: str, folder: str, url: str, port: str, zero3: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    Guard.after_rollout = judge  # type: ignore[method-assign]
    settings: dict[str, Any] = {"per_device_train_batch_size": 16, "max_steps": 3, "ddp_backend": "gloo"}
    settings["policy"] = model
    if zero3:
        os.environ["DS_ACCELERATOR"] = "cpu"
        from deepspeed import init_distributed

        init_distributed("gloo", auto_mpi_discovery=False)  # accelerate does so on GPUs alone
        settings["deepspeed"] = ZERO3
    if url:
        settings |= {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": int(port)}
    with started(Path(folder), plan="auto", choice="fp8_kv", **settings) as trainer:
        trainer.train()
        seen = {name: logged(trainer, f"fp8plan/{name}") for name in ("k3_kl", "fp8_kv", "threshold_tis")}
        seen |= {"ratio": logged(trainer, "sampling/importance_sampling_ratio/mean")}
        seen |= {"responses": trainer.plan.workload["prompts"] * trainer.plan.workload["samples"]}
        policy = {name: whole(x) for name, x in trainer.model.named_parameters()}
        seen |= {"weights": [float(x.double().sum()) for x in policy.values()]}
        seen |= {"shards": sum(isinstance(x, DTensor) or not x.numel() for x in trainer.model.parameters())}
        if not url:
            trainer.vllm_generation.sync_weights()  # of the last step, too
            seen |= {"same": same(trainer, policy)}
        seen |= {"state": trainer.monitor.state_dict()["controller"]}
    Path(folder, f"seen_{rank}.json").write_text(json.dumps(seen))
