"""Stand-ins for slime, prime-rl and SkyRL: the signatures and the few lines around a hook that their sources have.

Read in the commits that fp8plan/integrations names, and written anew: none of the three is installed here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor


def install(patch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Put a module, and empty packages around it that are not imported so far, where `import` finds it."""
    parts = name.split(".")
    packages = [".".join(parts[:end]) for end in range(1, len(parts))]
    made = {package: ModuleType(package) for package in packages if package not in sys.modules}
    for package in made.values():
        package.__path__ = []
    made[name] = ModuleType(name)
    vars(made[name]).update(contents)
    for place, module in made.items():
        patch.setitem(sys.modules, place, module)
    return made[name]


def vanilla_tis_function(
    args,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The signature of slime's own function, in slime/backends/megatron_utils/loss.py."""
    raise NotImplementedError("hooks are called in its place: tests compare their parameters with these")


def slime_call(tis_func: Callable[..., Any], args: Any, pg_loss: Tensor, batch: dict[str, Any]) -> Any:
    """The call in slime's policy_loss_function: everything by keyword."""
    tis_kwargs = {
        "args": args,
        "pg_loss": pg_loss,
        "train_log_probs": batch["log_probs"],
        "rollout_log_probs": batch["rollout_log_probs"],
        "loss_masks": batch["loss_masks"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    return tis_func(**tis_kwargs)


@dataclass
class LossInputs:
    """The dataclass of prime_rl/trainer/rl/loss.py."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)


@dataclass
class LossOutputs:
    """The dataclass of prime_rl/trainer/rl/loss.py."""

    loss: Tensor
    metrics: dict[str, Tensor]


def prime_rl_step(loss_fn: Callable[..., Any], kwargs: dict[str, Any], sequences: list[LossInputs]) -> Any:
    """Do as prime-rl's compute_loss with the rl component: call once for each sequence, and stack figures by name."""
    total, figures = sequences[0].trainer_logprobs.sum() * 0.0, {}
    for inputs in sequences:
        result = loss_fn(inputs, **kwargs)
        assert isinstance(result, LossOutputs)
        total = total + result.loss
        for name, value in result.metrics.items():
            figures.setdefault(name, []).append(value)
    scale = sum(int(inputs.loss_mask.sum()) for inputs in sequences)
    return total / scale, {name: torch.stack(values) for name, values in figures.items()}


class PolicyLossRegistry:
    """SkyRL's registry, without Ray."""

    _functions: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def register(cls, name: str, func: Callable[..., Any]) -> None:
        if name in cls._functions:
            raise ValueError(f"policy loss '{name}' already registered")
        cls._functions[name] = func

    @classmethod
    def get(cls, name: str) -> Callable[..., Any]:
        return cls._functions[name]


def ppo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """SkyRL's PPO loss: clipped, summed over the mask; `rollout_logprobs` would switch SkyRL's own correction on."""
    assert config.policy_loss_type in ("regular", "dual_clip")
    assert rollout_logprobs is None
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if config.policy_loss_type == "dual_clip":
        loss = torch.where(advantages < 0, torch.minimum(-advantages * config.clip_ratio_c, loss), loss)
    return (loss if loss_mask is None else loss * loss_mask).sum(), {"clip_ratio": 0.0}


@dataclass
class OffPolicyCorrectionConfig:
    """The dataclass of skyrl/train/config/config.py."""

    tis_ratio_type: str | None = None
    token_tis_ratio_clip_high: float = 2.0
    sequence_tis_ratio_clip_high: float = 5.0
    sequence_mask_metric: str | None = None
    geo_mask_high: float = 1.01
    geo_mask_low: float = 0.99
    product_mask_high: float = 2.0
    product_mask_low: float = 0.5
    outlier_token_is_threshold_low: float | None = None
    outlier_token_is_threshold_high: float | None = None
    token_mask_is_threshold_low: float | None = None
    token_mask_is_threshold_high: float | None = None


def algorithm_config(loss_type: str, **correction: Any) -> SimpleNamespace:
    """The fields of SkyRL's AlgorithmConfig that its PPO loss reads. correction: of off_policy_correction"""
    return SimpleNamespace(
        policy_loss_type=loss_type, eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0,
        off_policy_correction=OffPolicyCorrectionConfig(**correction),
    )  # fmt: skip


def skyrl_call(loss_fn: Callable[..., Any], config: Any, batch: dict[str, Tensor | None]) -> Any:
    """The call in SkyRL's `_forward_backward_micro`: three by place, three by keyword, under autocast."""
    with torch.autocast(dtype=torch.bfloat16, device_type="cpu"):
        return loss_fn(
            batch["action_log_probs"],
            batch["old_action_log_probs"],
            batch["advantages"],
            config=config,
            loss_mask=batch["loss_mask"],
            rollout_logprobs=batch["rollout_action_logprobs"],
        )
