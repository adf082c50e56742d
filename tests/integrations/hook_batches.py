"""Micro-batches as slime, prime-rl and SkyRL hand them over, and what the tests of all hooks need."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import pytest
import torch

from fp8plan.integrations import hooks as micro_batches

LENGTHS = [30, 7, 50, 13]
CALM, WILD = 0.02, 1.0  # spread of the log ratios: KL far below and far above the target of 0.01


ARGS = SimpleNamespace(use_tis=True)  # of slime


def settings_file(folder: Path, **settings: Any) -> str:
    path = folder / "monitor.json"
    path.write_text(json.dumps(settings))
    return str(path)


def optimiser_steps() -> None:
    """Take an optimiser's step, as every trainer does after its micro-batches."""
    some = torch.nn.Parameter(torch.ones(1))
    some.grad = torch.ones(1)
    torch.optim.AdamW([some]).step()


def responses(seed: int, sigma: float) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(train, rollout, mask) of each response."""
    chance = torch.Generator().manual_seed(seed)
    train = [-9 - torch.rand(n, generator=chance) for n in LENGTHS]
    rollout = [x + sigma * torch.randn(len(x), generator=chance) for x in train]
    masks = [(torch.rand(n, generator=chance) > 0.2).int() for n in LENGTHS]
    return train, rollout, masks


def both(seed: int, sigma: float) -> list[torch.Tensor]:
    """Two micro-batches, packed into one."""
    pairs = zip(responses(seed, sigma), responses(seed + 1, sigma), strict=True)
    return [torch.cat([*one, *other]) for one, other in pairs]


def padded(seed: int, sigma: float) -> dict[str, Any]:
    """A micro-batch of SkyRL."""
    train, rollout, masks = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in responses(seed, sigma))
    chance = torch.Generator().manual_seed(seed + 1)
    now = (train + 0.3 * torch.randn(train.shape, generator=chance)).requires_grad_()
    return {
        "action_log_probs": now, "old_action_log_probs": train, "rollout_action_logprobs": rollout,
        "advantages": torch.randn(train.shape, generator=chance), "loss_mask": masks,
    }  # fmt: skip


def slime_batch(seed: int, sigma: float) -> tuple[torch.Tensor, dict[str, Any]]:
    train, rollout, masks = responses(seed, sigma)
    pg_loss = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed)).requires_grad_()
    batch = {"log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}
    return pg_loss, batch | {"total_lengths": [n + 5 for n in LENGTHS], "response_lengths": LENGTHS}


def sequences(seed: int, sigma: float, weighted: bool = False) -> list[frameworks.LossInputs]:
    chance = torch.Generator().manual_seed(seed)
    found = []
    for train, rollout, mask in zip(*responses(seed, sigma), strict=True):
        weight = torch.rand(len(train), generator=chance) if weighted else None
        advantage = torch.randn(len(train), generator=chance)
        inputs = frameworks.LossInputs(train.requires_grad_(), rollout, None, advantage, mask.bool(), weight)
        found.append(inputs)
    return found


def megatron(patch: pytest.MonkeyPatch, cp: int = 1, tp_rank: int = 0) -> None:
    """Megatron's parallel state, as far as it is asked for."""
    frameworks.install(
        patch, micro_batches.MEGATRON,
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda with_context_parallel=False: None,
        get_tensor_model_parallel_rank=lambda: tp_rank,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_world_size=lambda: cp,
    )  # fmt: skip
