"""SkyRL's PPO losses with fp8plan's correction, registered beside its own.

    from fp8plan.integrations import skyrl

    skyrl.register("/path/monitor.json", cfg)  # in main(), before validate_cfg(cfg)

and trainer.algorithm.policy_loss_type=fp8plan_regular, or fp8plan_dual_clip.

Written for SkyRL at commit a9564572e (August 2026): skyrl/backends/skyrl_train/utils/ppo_utils.py. The registry sends
the function, with its settings, to all Ray processes, where fp8plan must be installed. SkyRL calls it once for every
micro-batch. integrations.hooks says which ranks share.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fp8plan.errors import ConfigError
from fp8plan.integrations.hooks import HookSettings, running, settings_at
from fp8plan.runtime.watch.mismatch.sampling import RAW, Sampling

if TYPE_CHECKING:
    import torch

PREFIX: Final = "fp8plan_"
BASES: Final = ("regular", "dual_clip")  # losses that scale with a token's advantage, if its factor is above 0


def register(settings: str | os.PathLike[str] | None = None, config: Any = None) -> None:
    """Register "fp8plan_regular" and "fp8plan_dual_clip" with SkyRL.

    settings: path of the settings, which the driver reads here; None: the file that FP8PLAN_MONITOR names
    config:   SkyRL's configuration, for the sampling of rollouts; None: the settings' own, if they have one

    Raises ConfigError for bad settings.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    hook = settings_at(settings)
    if hook.sampling is None and config is not None:
        hook = msgspec.structs.replace(hook, sampling=sampling_in(config.generator))
    for base in BASES:
        PolicyLossRegistry.register(PREFIX + base, partial(policy_loss, settings=hook, base=base))


def sampling_in(generator: Any) -> Sampling | None:
    """The sampling of rollouts in SkyRL's `generator` configuration. SkyRL scores at the same temperature.

    SkyRL leaves logprobs_mode at vLLM's default, unless the engine's arguments name one. Its min_tokens of 1, which
    only forbids an empty response, is left out.
    """
    params = generator.sampling_params
    named = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    engine = getattr(getattr(generator, "inference_engine", None), "engine_init_kwargs", None) or {}
    more = dict(getattr(params, "additional_kwargs", None) or {})
    return Sampling.of(more | named, engine.get("logprobs_mode", RAW), trainer_temperature=params.temperature or None)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Any,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    *,
    settings: HookSettings | None = None,
    base: str = "regular",
) -> tuple[torch.Tensor, dict[str, float]]:
    """SkyRL's own PPO loss of a micro-batch, with fp8plan's weights on its advantages and fp8plan's mask.

    log_probs, old_log_probs, advantages, loss_mask, rollout_logprobs: [batch, response length], log-probs in nats
    config:   SkyRL's AlgorithmConfig; its off_policy_correction is not applied
    settings: as `register` read them; None: those of FP8PLAN_MONITOR
    base:     SkyRL's loss, one of BASES

    Weights compare old_log_probs with rollout_logprobs. Returns (loss, figures). Raises ConfigError without
    rollout_logprobs, and for bad settings.
    """
    import torch
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    if rollout_logprobs is None:
        raise ConfigError(f"SkyRL gave {PREFIX}{base} no rollout_logprobs; type generator.sampling_params.logprobs=1")
    batches = running(settings_at() if settings is None else settings)
    correction = batches.correct(old_log_probs, rollout_logprobs, loss_mask)
    weights, mask = torch.as_tensor(correction.weights), torch.as_tensor(correction.mask)
    if loss_mask is not None:
        mask = mask * loss_mask
    named = copy.copy(config)
    named.policy_loss_type = base
    # rollout_logprobs are left out: with them SkyRL's loss would correct a second time.
    loss, metrics = PolicyLossRegistry.get(base)(
        log_probs, old_log_probs, advantages * weights, config=named, loss_mask=mask
    )
    return loss, {**metrics, **batches.figures(correction)}
