"""A GRPOConfig as the rollouts of a plan, read without a trainer, an engine or a GPU.

Nothing here imports vLLM. TRL is imported where it tokenises a dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from fp8plan.errors import ConfigError, first_line
from fp8plan.integrations.request import Rollouts, printed_plan
from fp8plan.model.distributions import Trace
from fp8plan.model.plan.plan import Plan

MOST_PROMPTS: Final = 256  # rows of the dataset whose lengths are read, spread evenly
BATCHED_TOKENS: Final = 4096  # TRL's token budget of a step, which leaves memory to the trainer


def planned(
    args: Any, dataset: Any = None, *, model: str, gpu: str = "auto", processing_class: Any = None, **fields: Any
) -> Plan:
    """Print the table of the plan that a GRPOConfig asks for, and return the plan. Nothing is started.

    With the same dataset, model and GPU the trainer's plan="auto" chooses from the same table.

    args:    the GRPOConfig
    dataset: the training set, whose prompts are tokenised as TRL does; None, or one without a length: prompts are
             assumed to have 1,024 tokens
    model:   hub id or folder of the policy; gpu: its engine's; "auto": this machine's
    processing_class: the tokenizer; None: the model's
    fields:  of PlanRequest, as `fp8plan.plan` takes them, which go before the configuration, such as `limits` of a
             server, or `workload`

    Raises ConfigError for a configuration that no plan supports, and the errors of `fp8plan.plan`.
    """
    work = dataset_lengths(args, dataset, model, processing_class)
    return printed_plan(rollouts_of(args), {"model": model, "gpu": gpu, **fields}, work)


def check_args(args: Any) -> None:
    """Raise ConfigError for settings of a trainer of TRL's that no plan supports."""
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


def rollouts_of(args: Any) -> Rollouts:
    """The rollouts of a GRPOConfig: those of one process's engine if it is colocated, all of them with a server.

    Raises ConfigError as `check_args` does.
    """
    check_args(args)
    samples, longest = args.num_generations, args.max_completion_length
    if args.vllm_mode == "server":
        return of_server(args.generation_batch_size, samples, longest)
    # As TRL counts them (GRPOTrainer.__init__, max_num_seqs of its VLLMGeneration).
    responses = args.per_device_train_batch_size * args.steps_per_generation
    return of_engine(responses, samples, longest, args.vllm_max_model_length, args.vllm_gpu_memory_utilization)


def rollouts_with(generation: Any, samples: int, processes: int) -> Rollouts:
    """The same of a trainer that has another configuration.

    generation: its VLLMGeneration; samples: number for each prompt; processes: of the trainer
    """
    longest = generation.max_completion_length
    if generation.mode == "server":
        responses = generation.max_num_seqs // generation.tensor_parallel_size * processes
        return of_server(responses, samples, longest)
    return of_engine(
        generation.max_num_seqs, samples, longest, generation.max_model_length, generation.gpu_memory_utilization
    )


def of_server(responses: int, samples: int, longest: int) -> Rollouts:
    """The rollouts of a server, whose limits are not in the configuration. longest: tokens of a response"""
    return Rollouts(responses, samples, longest, own={"inside": "server"}, whole_context=False)


def of_engine(
    responses: int, samples: int, longest: int, max_model_len: int | None, gpu_memory_utilization: float
) -> Rollouts:
    """The rollouts of one process's colocated engine. longest: tokens of a response; the last two: its limits"""
    limits = {"max_model_len": max_model_len, "gpu_memory_utilization": gpu_memory_utilization}
    return Rollouts(responses, samples, longest, own={"inside": "trl"}, limits=limits, all_at_once=BATCHED_TOKENS)


def prompt_lengths(dataset: Any, tokenize: Callable[[list[Any]], Sequence[Sequence[int]]]) -> dict[str, Trace]:
    """The field of Workload with the lengths of a dataset's prompts; none for a dataset without a length.

    tokenize: prompts -> ids of their tokens
    """
    if not hasattr(dataset, "__len__"):
        return {}
    prompts = [dataset[index]["prompt"] for index in spread(len(dataset))]
    return {"prompt_lengths": Trace(tuple(len(ids) for ids in tokenize(prompts)), "prompts of the dataset")}


def spread(count: int, most: int = MOST_PROMPTS) -> range:
    """Indices of at most `most` rows of `count`, spread evenly."""
    return range(0, count, ceil(count / most)) if count else range(0)


def dataset_lengths(args: Any, dataset: Any, model: str, processing_class: Any = None) -> dict[str, Trace]:
    """The same, with the prompts tokenised as a GRPOTrainer without tools does. All but `dataset`: as in `planned`"""

    def tokenize(prompts: list[Any]) -> Sequence[Sequence[int]]:
        from transformers import AutoProcessor
        from trl.trainer.grpo_trainer import GRPOTrainer

        processor = processing_class
        if processor is None:
            try:
                processor = AutoProcessor.from_pretrained(model, truncation_side="left", padding_side="left")
            except Exception as error:  # from the hub, the file system, or the tokenizer's own format
                raise ConfigError(
                    f"the dataset's prompts need the tokenizer of {model!r}: {first_line(error)}; give a folder that "
                    "has it, or leave the dataset out and give --prompt-lengths"
                ) from None
        trainer: Any = SimpleNamespace(
            processing_class=processor,
            chat_template_kwargs=args.chat_template_kwargs or {},
            chat_template=None,
            environment_factories=None,
            tools=[],
            _is_vlm=False,
        )
        ids: Sequence[Sequence[int]] = GRPOTrainer._tokenize_prompts(trainer, prompts)[0]
        return ids

    return prompt_lengths(dataset, tokenize)


@contextmanager
def bf16_without_gpu() -> Iterator[None]:
    """Let a GRPOConfig ask for BF16, its default, on a machine without a GPU. It is only read."""
    from transformers import training_args

    with patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True):
        yield
