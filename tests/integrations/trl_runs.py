"""Small GRPO runs with the real TRL: a tiny random model with a tokenizer of numbered words, and a reward that it
learns in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from frozen_imports import freeze_imports
from tiny_models import VOCABULARY, checkpoint, forget_groups

PROMPT, COMPLETION = 8, 16  # tokens
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 256,
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": COMPLETION,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@cache
def model(kind: str = "dense") -> str:
    """The folder of a tiny checkpoint with a tokenizer: the word "w7" is token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = checkpoint(kind, "a")
    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return str(path)


def dataset() -> Any:
    """Prompts of PROMPT words."""
    from datasets import Dataset

    rows = [" ".join(f"w{(7 * row + word) % 1000}" for word in range(PROMPT)) for row in range(64)]
    return Dataset.from_dict({"prompt": rows})


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of a completion's tokens that are even."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def trainer_of(kind: type[Any], folder: Path, *, policy: str | None = None, **settings: Any) -> Any:
    """A trainer. kind: TRL's GRPOTrainer or ours; settings: of GRPOConfig, and of ours"""
    from trl import GRPOConfig

    names = (
        "plan",
        "choice",
        "controller",
        "sinks",
        "router_replay",
        "allow_biased_sampling",
        "peft_config",
        "rollout_func",
    )
    ours = {name: settings.pop(name) for name in names if name in settings}
    args = GRPOConfig(output_dir=str(folder), **(SETTINGS | settings))
    return kind(policy or model(), share_of_even, args, dataset(), **ours)


@contextmanager
def started(folder: Path, **settings: Any) -> Iterator[Any]:
    """Our trainer with a plan, whose engine is shut down at the end."""
    from fp8plan.integrations.trl import GRPOTrainer

    freeze_imports()
    torch.set_num_threads(1)
    forget_groups()
    with ended(trainer_of(GRPOTrainer, folder, **settings)) as trainer:
        yield trainer


@contextmanager
def ended(trainer: Any) -> Iterator[Any]:
    """A trainer with a plan, whose engine is shut down at the end."""
    try:
        yield trainer
    finally:
        if trainer.monitor is not None:
            trainer.monitor.close()
        trainer.rollout_engine.shutdown()


def logged(trainer: Any, name: str) -> list[float]:
    """A figure of each step that was logged."""
    return [row[name] for row in trainer.state.log_history if name in row]
