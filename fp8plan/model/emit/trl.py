"""A planned engine as arguments of TRL 1.16's GRPOConfig, and as the line or the server that goes with them.

An engine on one GPU is fp8plan's own, inside the trainer's process (fp8plan.integrations.trl). It keeps every plan. An
engine on several GPUs is TRL's own, colocated, if that can keep the plan. Else it is a vLLM server beside the trainer,
with fp8plan's weight-transfer backend and fp8plan's trainer.
"""

from __future__ import annotations

import json
from math import ceil
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import replicas_note, rollout_notes, shared_gpu_note
from fp8plan.model.emit.trainers import TRL
from fp8plan.model.emit.vllm import serve_command, vllm_env, vllm_kwargs
from fp8plan.model.setup import EngineSetup

MODES: Final = ("auto", "colocate", "server")

# Limits that TRL's colocated engine fixes (trl/generation/vllm_generation.py, VLLMGeneration._init_vllm, 1.16).
# GRPOConfig has no word for them, so a plan with other values is for another engine.
_COLOCATED: Final = {
    "max_num_batched_tokens": 4096,
    "block_size": 16,
    "enable_prefix_caching": True,
    "enforce_eager": False,
    "async_scheduling": True,
    "scheduler_reserve_full_isl": True,
    "num_gpu_blocks": None,
    "enable_expert_parallel": False,
    "max_cudagraph_capture_size": None,
    "enable_return_routed_experts": False,
}

# Settings that TRL needs of a vLLM server (trl/scripts/vllm_serve.py, build_command and main), with fp8plan's backend.
_SERVER_ENV: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "fp8plan"}
_SERVER_FLAGS: Final = ("--weight-transfer-config", '{"backend": "fp8plan"}', "--max-logprobs", "-1")

_IMPORT: Final = "# from fp8plan.integrations.trl import GRPOTrainer"


def trl_config(job: Job, mode: str = "auto") -> dict[str, Any]:
    """Keyword arguments of `trl.GRPOConfig`. Raises ConfigError for anything that TRL cannot do."""
    job.refuse("TRL")
    TRL.words(job.setup.remedies)  # refuses those that it does not have
    limits = job.setup.limits
    samples = job.tokens("samples")
    if samples < 2:
        raise ConfigError("TRL's GRPO needs at least 2 samples per prompt, the workload has 1; use --samples 2 or more")
    resolved = _resolve(job, mode)
    config = {
        "use_vllm": True,
        "vllm_mode": resolved,
        "num_generations": samples,
        "generation_batch_size": job.tokens("prompts") * samples,
        "max_completion_length": job.tokens("max_response_tokens"),
        **_correction(job.tis if _is_ours(resolved, job.setup) else job.constant_tis),
    }
    if resolved == "colocate":
        config |= {
            "vllm_gpu_memory_utilization": limits.gpu_memory_utilization,
            "vllm_max_model_length": limits.max_model_len,
            "vllm_tensor_parallel_size": limits.tensor_parallel_size,
        }
    return config


def server_command(setup: EngineSetup) -> str:
    """The shell command of the server that runs a plan for TRL, with fp8plan's weight-transfer backend."""
    return serve_command(vllm_kwargs(setup), vllm_env(setup) | _SERVER_ENV, _SERVER_FLAGS)


def emit_trl(job: Job) -> str:
    """The settings as JSON {"grpo_config", "trainer", "command", "env", "notes"}.

    trainer: the line that runs the plan, or null if TRL's own GRPOTrainer does
    command: the vLLM server's, or null if vLLM runs inside the trainer
    """
    return json.dumps(_settings(job), indent=2)


def emit_trl_python(job: Job) -> str:
    """The same settings as Python to paste, which makes `training_args`. Comments name the parts that you fill in."""
    settings = _settings(job)
    config = "".join(f"    {name}={value!r},\n" for name, value in settings["grpo_config"].items())
    env = {} if settings["command"] else settings["env"]  # a server's command sets its variables itself
    lines = [f"os.environ[{name!r}] = {value!r}  # before vLLM is imported" for name, value in env.items()]
    imports = ["import os", "", *lines, ""] if lines else []
    comments = [settings["trainer"] and settings["trainer"].replace("(...,", "(..., args=training_args,", 1)]
    comments += [settings["command"] and f"the server: {settings['command']}", *settings["notes"]]
    return "\n".join(
        [
            *imports,
            "from trl import GRPOConfig",
            "",
            f"training_args = GRPOConfig(\n{config})",
            *(f"# {line}" for comment in comments if comment for line in comment.splitlines()),
        ]
    )


def _settings(job: Job) -> dict[str, Any]:
    """The settings as plain data, as `emit_trl` gives them."""
    config, env, setup = trl_config(job), vllm_env(job.setup), job.setup
    served = config["vllm_mode"] == "server"
    ours = _is_ours(config["vllm_mode"], setup)
    notes = []
    if served:
        env |= _SERVER_ENV
        where = f"on {setup.limits.tensor_parallel_size} GPU(s) that do not train, where fp8plan is installed"
        problems = "; ".join(_colocate_problems(job))
        notes += [f"TRL's colocated engine cannot keep this plan: {problems}", f"start the command first, {where}"]
    else:
        notes += [replicas_note(setup, "the number of training processes decides it"), shared_gpu_note(setup)]
    if ours:
        notes.insert(0, f"{job.plan_note}; TRL's own GRPOTrainer may run another engine")
    plan, choice = map(json.dumps, (job.plan, job.choice))
    return {
        "grpo_config": config,
        "trainer": f"GRPOTrainer(..., plan={plan}, choice={choice})  {_IMPORT}" if ours else None,
        "command": server_command(setup) if served else None,
        "env": env,
        "notes": notes + rollout_notes(job),
    }


def _is_ours(mode: str, setup: EngineSetup) -> bool:
    """True if fp8plan's trainer runs the plan, whose C tightens from its start. TRL's own keeps its C.

    Inside the trainer's process fp8plan runs engines with one GPU.
    """
    return mode == "server" or setup.limits.tensor_parallel_size == 1


def _resolve(job: Job, mode: str) -> str:
    """The vllm_mode that keeps the plan."""
    if mode not in MODES:
        raise ConfigError(f"unknown TRL mode {mode!r}; allowed: {', '.join(MODES)}")
    replicas = job.setup.limits.data_parallel_size
    # vLLM refuses --data-parallel-size above 1 for a dense model (trl/scripts/vllm_serve.py says so too).
    server_problems = [] if replicas == 1 else [f"it is one replica, the plan has {replicas}"]
    if job.setup.remedies.router_replay:
        server_problems.append("its route returns no experts")
    problems = {"colocate": _colocate_problems(job), "server": server_problems}
    for candidate in MODES[1:] if mode == "auto" else (mode,):
        if not problems[candidate]:
            return candidate
    tried = [f"{m}: {'; '.join(p)}" for m, p in problems.items() if mode in ("auto", m)]
    raise ConfigError(f"TRL cannot run this plan ({' | '.join(tried)}); plan again with limits that it can keep")


def _colocate_problems(job: Job) -> list[str]:
    limits = job.setup.limits
    if _is_ours("colocate", job.setup):
        return []
    problems = ["it takes no FP8 weights"] if job.setup.precision.weights != "bf16" else []
    problems += [
        f"{name} is {value!r} there, the plan has {getattr(limits, name)!r}"
        for name, value in _COLOCATED.items()
        if getattr(limits, name) != value
    ]
    if job.setup.precision.kv == "fp8":
        problems.append("it has no kv_cache_dtype")
    # TRL sets max_num_seqs to the responses of one replica (GRPOTrainer: batch size x TP x steps per generation).
    responses = ceil(job.tokens("prompts") * job.tokens("samples") / limits.data_parallel_size)
    if limits.max_num_seqs < responses:
        problems.append(
            f"it runs all {responses} responses of a replica at once, the plan at most {limits.max_num_seqs}"
        )
    return problems


def _correction(tis: float | None) -> dict[str, Any]:
    """TRL's vllm_importance_sampling_* arguments; its ratio is pi_train / pi_rollout, as ours."""
    if tis is None:
        return {"vllm_importance_sampling_correction": False}
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": tis,
    }
