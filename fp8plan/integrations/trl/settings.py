"""TRL's settings beside a plan: the version of TRL, sampling, and the checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import patch

from trl.trainer import grpo_trainer

from fp8plan.errors import ConfigError
from fp8plan.integrations.trl.request import check_engine
from fp8plan.model.hardware import find_gpu
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.watch.mismatch.sampling import Sampling

# ------------------------------------------------------------------------------------------------ this TRL's inside

TESTED: Final = "1.16"  # the minor version of TRL whose inside the integration uses


def check_trl() -> None:
    """Raise ConfigError for a TRL that was not tested."""
    installed = version("trl")
    if not f"{installed}.".startswith(f"{TESTED}."):
        raise ConfigError(
            f"TRL {installed} with a plan is not supported; allowed: {TESTED}; type: pip install 'trl=={TESTED}.*', or "
            "plan=None, which needs nothing of TRL's inside"
        )


@contextmanager
def generating_with(made: Any) -> Iterator[None]:
    """Let TRL call `made` to make a VLLMGeneration. TRL finds that class by name, and has no argument for it."""
    with patch.object(grpo_trainer, "VLLMGeneration", made):
        yield


# ------------------------------------------------------------------------------------------------------ settings

# Settings of a rollout that GRPOConfig has under vLLM's names.
SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_in(args: Any) -> Sampling:
    """The sampling of rollouts in a GRPOConfig. TRL divides the trainer's logits by args.temperature."""
    params = {name: getattr(args, name) for name in SAMPLED} | (args.generation_kwargs or {})
    params["structured_outputs_regex"] = args.vllm_structured_outputs_regex
    sampling = Sampling.of(params, trainer_temperature=args.temperature or None)
    assert sampling is not None
    return sampling


def check_args(args: Any, allow_biased_sampling: bool = False) -> None:
    """Raise ConfigError for TRL settings that no plan supports.

    allow_biased_sampling: allow a sampling that biases the correction's ratios
    """
    check_engine(args)
    if args.vllm_importance_sampling_correction and not allow_biased_sampling:
        sampling_in(args).refuse("GRPOConfig's sampling", "GRPOTrainer(..., allow_biased_sampling=True)")


def check_plan(plan: Plan, choice: int | str | None, args: Any, on_cpu: bool) -> None:
    """Raise ConfigError for a plan of another engine than that of TRL's settings; server.check_server checks a
    server's limits.

    on_cpu: true: the engine runs on a CPU
    """
    picked, limits = plan.select(choice), plan.setup(choice).limits
    if find_gpu(plan.gpu).is_cpu != on_cpu:
        where = "the CPU" if on_cpu else "a GPU"
        raise ConfigError(
            f"the plan is for {plan.gpu}, and this trainer's engine runs on {where}; allowed: plan='auto'"
        )
    longest = limits.max_model_len or 0
    if args.max_completion_length >= longest:
        raise ConfigError(
            f"max_completion_length is {args.max_completion_length}, and the plan's longest request has {longest} "
            "tokens; allowed: a plan for these responses (plan='auto'), or shorter ones"
        )
    if args.vllm_mode != "colocate":
        return
    if picked.tensor_parallel != 1:
        raise ConfigError(
            f"the plan's engine has {picked.tensor_parallel} GPUs; allowed: 1, as TRL's processes hold an engine each "
            "(plan with --tensor-parallel-size 1), or a server (vllm_mode='server')"
        )
    pairs: dict[str, tuple[Any, float]] = {"vllm_max_model_length": (args.vllm_max_model_length, longest)}
    if not on_cpu:
        pairs["vllm_gpu_memory_utilization"] = (args.vllm_gpu_memory_utilization, limits.gpu_memory_utilization)
    for name, (theirs, ours) in pairs.items():
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"{name} is {theirs}, and the plan has {ours}; type: GRPOConfig({name}={ours}), or plan again"
            )
