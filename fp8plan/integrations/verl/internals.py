"""The parts of verl that the integration leans on: its version, and the names that are overridden or called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final
from unittest.mock import patch

from fp8plan.errors import ConfigError

TESTED: Final = "0.9.1"

# Of a trainer's class, and of the module that it finds its correction in, by name.
TRAINER: Final = (
    "_compute_advantage", "_rollout_server_managers", "_save_checkpoint", "init", "on_sample_begin",
)  # fmt: skip
CORRECTION: Final = "compute_rollout_correction_and_add_to_batch"
SERVER: Final = (
    "_apply_quantization", "_get_worker_extension_cls", "_preprocess_engine_kwargs", "_validate_configs",
    "collective_rpc", "generate", "run_server",
)  # fmt: skip
REPLICA: Final = ("_get_server_name_prefix",)
WORKER: Final = ("_get_zmq_handle", "_iter_all_models", "monkey_patch_model", "update_weights_from_ipc")


def check_verl(needed: Mapping[Any, Sequence[str]]) -> None:
    """Raise ConfigError if this verl is not the one that was tested, or lacks a name.

    needed: object of verl's -> names that it must have
    """
    found = version("verl")
    hint = f"type: pip install 'verl[verl-core]=={TESTED}', or actor_rollout_ref.rollout.name=vllm"
    if found != TESTED:
        raise ConfigError(f"verl {found} with rollout.name=fp8plan is not supported; allowed: {TESTED}; {hint}")
    if gone := [
        f"{kind.__name__}.{name}" for kind, names in needed.items() for name in names if not hasattr(kind, name)
    ]:
        raise ConfigError(f"verl {found} lacks what rollout.name=fp8plan needs of it: {', '.join(gone)}; {hint}")


@contextmanager
def correcting_with(correct: Any) -> Iterator[None]:
    """Let verl call `correct` where it would correct a batch: it finds its function by name in the trainers' module."""
    from verl.trainer.ppo.v1 import trainer_base

    with patch.object(trainer_base, CORRECTION, correct):
        yield
