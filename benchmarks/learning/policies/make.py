"""The checkpoints of policies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.learning.policies import gguf_models
from benchmarks.learning.policies.table import POLICIES, policy_named
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


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    parser.add_argument("name", choices=POLICIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    make(given.name, given.folder, given.device, given.seed)
    print(json.dumps({"blockwise FP8 takes": fp8_linears(given.folder)}))
