"""TRL's settings beside a plan: the version of TRL, sampling, and the checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import patch

from trl.generation import vllm_generation

from fp8plan.errors import ConfigError
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
def generating_with(trainer: type[Any], made: Any) -> Iterator[None]:
    """Let a trainer of TRL's call `made` to make a VLLMGeneration.

    TRL has no argument for that class. A trainer finds it by name, in its own module or, if it imports it late, in that
    of the class.
    """
    modules = {vllm_generation, *(sys.modules[kind.__module__] for kind in trainer.__mro__)}
    with ExitStack() as patches:
        for module in modules:
            if hasattr(module, "VLLMGeneration"):
                patches.enter_context(patch.object(module, "VLLMGeneration", made))
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


def check_plan(plan: Plan, choice: int | str | None, generation: Any, on_cpu: bool) -> None:
    """Raise ConfigError for a plan of another engine than that of TRL's settings; server.check_server checks a
    server's limits.

    generation: a VLLMGeneration
    on_cpu:     true: the engine runs on a CPU
    """
    picked, limits = plan.select(choice), plan.setup(choice).limits
    if find_gpu(plan.gpu).is_cpu != on_cpu:
        where = "the CPU" if on_cpu else "a GPU"
        raise ConfigError(
            f"the plan is for {plan.gpu}, and this trainer's engine runs on {where}; allowed: plan='auto'"
        )
    longest = limits.max_model_len or 0
    response = generation.max_completion_length
    if response >= longest:
        raise ConfigError(
            f"max_completion_length is {response}, and the plan's longest request has {longest} "
            "tokens; allowed: a plan for these responses (plan='auto'), or shorter ones"
        )
    if generation.mode != "colocate":
        return
    if picked.tensor_parallel != 1:
        raise ConfigError(
            f"the plan's engine has {picked.tensor_parallel} GPUs; allowed: 1, as TRL's processes hold an engine each "
            "(plan with --tensor-parallel-size 1), or a server (vllm_mode='server')"
        )
    pairs: dict[str, tuple[Any, float]] = {"vllm_max_model_length": (generation.max_model_length, longest)}
    if not on_cpu:
        pairs["vllm_gpu_memory_utilization"] = (generation.gpu_memory_utilization, limits.gpu_memory_utilization)
    for name, (theirs, ours) in pairs.items():
        if theirs is not None and theirs != ours:
            raise ConfigError(f"{name} is {theirs}, and the plan has {ours}; type: {name}={ours}, or plan again")
