"""The parts of TRL that the integration leans on: its versions, the names that it overrides, and the one that it swaps.

TRL builds its engine with a class that it finds by name, and has no argument for another. So that name is another class
while a trainer is made, and only then. All else is overridden.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import patch

import trl
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from fp8plan.errors import ConfigError

# Minor versions of TRL whose inside is known, first and last. The tests run 1.16.0.
OLDEST, NEWEST = (1, 16), (1, 16)

# Methods that are overridden or called, and arguments that the engine's class must be given by name.
METHODS: Final = {
    trl.GRPOTrainer: (
        "_generate_and_score_completions",
        "_load_optimizer_and_scheduler",
        "_save_checkpoint",
        "_tokenize_prompts",
    ),
    VLLMClient: (
        "_finish_weight_update",
        "_post",
        "_start_weight_update",
        "generate",
        "get_server_info",
        "get_world_size",
        "init_communicator",
        "update_named_params",
    ),
    VLLMGeneration: ("_init_vllm", "_iter_named_params", "generate", "sync_weights"),
}
ARGUMENTS: Final = (
    "accelerator", "enable_sleep_mode", "gpu_memory_utilization", "max_model_length", "max_num_seqs", "mode", "model",
    "model_impl", "server_base_url", "tensor_parallel_size", "trust_remote_code",
)  # fmt: skip


def check_trl() -> None:
    """Raise ConfigError if this TRL is not one whose inside is known, or if a name in it has changed all the same."""
    found = version("trl")
    minor = tuple(int(part) if part.isdigit() else -1 for part in found.split(".")[:2])
    allowed = ".".join(map(str, NEWEST))
    if not OLDEST <= minor <= NEWEST:
        raise ConfigError(
            f"TRL {found} with a plan is not supported; allowed: {allowed}; type: pip install 'trl=={allowed}.*', or "
            "plan=None, which needs nothing of TRL's inside"
        )
    gone = [f"{kind.__name__}.{name}" for kind, names in METHODS.items() for name in names if not hasattr(kind, name)]
    known = inspect.signature(VLLMGeneration).parameters
    gone += [f"VLLMGeneration({name}=)" for name in ARGUMENTS if name not in known]
    if getattr(grpo_trainer, "VLLMGeneration", None) is not VLLMGeneration:
        gone.append("trl.trainer.grpo_trainer.VLLMGeneration")
    if gone:
        raise ConfigError(
            f"TRL {found} lacks what a plan needs of it: {', '.join(gone)}; type: pip install --force-reinstall "
            f"'trl=={allowed}.*', or plan=None"
        )


@contextmanager
def generating_with(made: Any) -> Iterator[None]:
    """Let TRL call `made` where it would make a VLLMGeneration."""
    with patch.object(grpo_trainer, "VLLMGeneration", made):
        yield
