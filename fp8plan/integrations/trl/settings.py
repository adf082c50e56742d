"""TRL's settings, as a plan needs them: the version of TRL, sampling, the checks, and the engine's limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from math import ceil
from typing import Any, Final
from unittest.mock import patch

from trl.generation import vllm_generation

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.distributions import Trace
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits, Lowerable
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
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

MOST_PROMPTS: Final = 256  # rows of the dataset whose lengths are read, spread evenly
BATCHED_TOKENS: Final = 4096  # TRL's token budget of a step, which leaves memory to the trainer
# Settings of a rollout that GRPOConfig has under vLLM's names.
SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_in(args: Any) -> Sampling:
    """The sampling of rollouts in a GRPOConfig. TRL divides the trainer's logits by args.temperature."""
    params = {name: getattr(args, name) for name in SAMPLED} | (args.generation_kwargs or {})
    params["structured_outputs_regex"] = args.vllm_structured_outputs_regex
    sampling = Sampling.of(params, trainer_temperature=args.temperature or None)
    assert sampling is not None
    return sampling


def check_args(args: Any) -> None:
    """Raise ConfigError for TRL settings that no plan supports."""
    if args is None or not args.use_vllm:
        kind = "GRPOConfig" if args is None else type(args).__name__
        raise ConfigError(f"plan is given, and use_vllm is False; type: {kind}(use_vllm=True, vllm_mode='colocate')")
    if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size != 1:
        raise ConfigError(
            f"plan is given, and vllm_tensor_parallel_size is {args.vllm_tensor_parallel_size}; allowed: 1, an engine "
            "for each process, a server on as many GPUs (vllm_mode='server'), or plan=None"
        )
    if args.use_liger_kernel:
        raise ConfigError(
            "use_liger_kernel is True, with which no plan has run; type: use_liger_kernel=False, or plan=None"
        )


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


def responses_in(generation: Any, processes: int) -> int:
    """The responses of a rollout of all processes. generation: a VLLMGeneration"""
    return int(generation.max_num_seqs // generation.tensor_parallel_size * processes)


def colocated_limits(model: str, generation: Any, on_cpu: bool) -> EngineLimits:
    """The limits of the engine that TRL would start in this process. generation: a VLLMGeneration"""
    responses = generation.max_num_seqs
    shape, gpu = ModelShape.from_hf(model), find_gpu("cpu" if on_cpu else "auto")
    return EngineLimits.for_gpu(
        gpu,
        shape.recurrent,
        max_model_len=generation.max_model_length or shape.context.derived(check_vllm_version()),
        max_num_seqs=Lowerable(responses),
        max_num_batched_tokens=max(BATCHED_TOKENS, responses),
        gpu_memory_utilization=None if on_cpu else generation.gpu_memory_utilization,
    )


def spread(count: int, most: int = MOST_PROMPTS) -> range:
    """Indices of at most `most` rows of `count`, spread evenly."""
    return range(0, count, ceil(count / most)) if count else range(0)


def lengths_of(prompts: Sequence[Sequence[int]]) -> Trace:
    """The lengths of tokenised prompts."""
    return Trace(tuple(len(prompt) for prompt in prompts), "prompts of the dataset")
