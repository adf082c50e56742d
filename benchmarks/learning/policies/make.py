"""The checkpoints of policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.learning.policies import gguf_models
from benchmarks.learning.policies.table import policy_named
from benchmarks.learning.policies.tasks import Task
from benchmarks.learning.policies.teach import teach
from fp8plan.model.architecture import ModelShape


def make(name: str, folder: Path, device: str = "cpu", seed: int = 0, say: Callable[[str], Any] = print) -> None:
    """Write the policy's checkpoint, unless it is there. The same seed gives the same weights on a CPU.

    folder: FOLDER/NAME/model
    """
    policy = policy_named(name)
    if (folder / "config.json").is_file():
        return
    if policy.size is None:
        gguf_models.write(policy.kind, folder)
    else:
        facts = teach(policy, policy.size, folder, device, seed, say)
        say(f"{name}: {json.dumps(facts)}")


def task_of(name: str, folder: Path) -> Task:
    """The task of a policy whose checkpoint is in this folder."""
    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    return policy_named(name).task(tokenizer)


def fp8_linears(folder: Path) -> dict[str, bool]:
    """Each linear of the model -> whether blockwise FP8 takes it, on one GPU."""
    shape = ModelShape.from_hf(str(folder))
    return {linear.name: linear.quantised for linear in (*shape.linears(1), *shape.expert_linears())}
