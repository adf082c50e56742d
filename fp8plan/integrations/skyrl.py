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
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec

from fp8plan.errors import ConfigError
from fp8plan.integrations.hooks import HookSettings, errors_of, running, settings_at, tensors
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Over, Rejection, Thresholds
from fp8plan.runtime.watch.mismatch.sampling import RAW, Sampling

if TYPE_CHECKING:
    import torch

PREFIX: Final = "fp8plan_"
WHERE: Final = "trainer.algorithm.off_policy_correction"
# SkyRL's sequence masks: fp8plan's ratio of a sequence, and the beginning of the names of their bounds.
MASKS: Final[dict[str | None, tuple[Over, str]]] = {"geometric": ("seq_mean", "geo"), "product": ("seq_sum", "product")}
BASES: Final = ("regular", "dual_clip")  # losses that scale with a token's advantage, if its factor is above 0


def register(settings: str | os.PathLike[str] | None = None, config: Any = None) -> None:
    """Register "fp8plan_regular" and "fp8plan_dual_clip" with SkyRL.

    settings: path of the settings, which the driver reads here; None: the file that FP8PLAN_MONITOR names
    config:   SkyRL's configuration, for the sampling of rollouts and a check of its correction; None: neither

    Raises ConfigError for bad settings, and for a correction of SkyRL's that fp8plan does not have.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    hook = settings_at(settings)
    if config is not None:
        hook.begun(correction_in(config.trainer.algorithm), WHERE)
        if hook.sampling is None:
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


@errors_of(WHERE)
def correction_in(algorithm: Any) -> CorrectionSettings | None:
    """SkyRL's off_policy_correction; None if it corrects nothing.

    SkyRL's bounds are on pi_train / pi_rollout, too (skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py).

    algorithm: SkyRL's AlgorithmConfig. Raises ConfigError for what fp8plan does not have
    """
    off_policy = getattr(algorithm, "off_policy_correction", None)
    if off_policy is None:
        return None
    ratio, metric = off_policy.tis_ratio_type, off_policy.sequence_mask_metric
    for name, value, allowed in (
        ("tis_ratio_type", ratio, (None, "token", "sequence")),
        ("sequence_mask_metric", metric, (None, *MASKS)),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
    veto, rules = None, list[Rejection]()
    least, most = off_policy.outlier_token_is_threshold_low, off_policy.outlier_token_is_threshold_high
    if least is not None or most is not None:
        veto = least or 0.0, inf if most is None else most
    low, high = off_policy.token_mask_is_threshold_low, off_policy.token_mask_is_threshold_high
    if low is not None and high is not None:
        if ratio == "sequence" or metric is not None:
            raise ConfigError(
                "token_mask_is_threshold_low with a ratio of whole sequences, which SkyRL takes over the tokens that "
                "the mask leaves, and fp8plan over all; allowed: one of the two"
            )
        rules.append(Rejection("token", "k1", high, low))
    if metric is not None:
        over, name = MASKS[metric]
        rules.append(
            Rejection(over, "k1", getattr(off_policy, f"{name}_mask_high"), getattr(off_policy, f"{name}_mask_low"))
        )
    if ratio is None and veto is None and not rules:
        return None
    c = None if ratio is None else getattr(off_policy, f"{ratio}_tis_ratio_clip_high")
    return CorrectionSettings(ratio, thresholds=Thresholds(c), reject=tuple(rules), veto=veto)


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
    config:   SkyRL's AlgorithmConfig; fp8plan applies its off_policy_correction, if it has one
    settings: as `register` read them; None: those of FP8PLAN_MONITOR
    base:     SkyRL's loss, one of BASES

    Weights compare old_log_probs with rollout_logprobs. Returns (loss, figures). Raises ConfigError without
    rollout_logprobs, and for bad settings.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    if rollout_logprobs is None:
        raise ConfigError(f"SkyRL gave {PREFIX}{base} no rollout_logprobs; type generator.sampling_params.logprobs=1")
    hook = settings_at() if settings is None else settings
    batches = running(hook, own=correction_in(config), where=WHERE)
    correction = batches.correct(old_log_probs, rollout_logprobs, loss_mask)
    weights, mask = tensors(correction)
    if loss_mask is not None:
        mask = mask * loss_mask
    named = copy.copy(config)
    named.policy_loss_type = base
    # rollout_logprobs are left out: with them SkyRL's loss would correct a second time.
    loss, metrics = PolicyLossRegistry.get(base)(
        log_probs, old_log_probs, advantages * weights, config=named, loss_mask=mask
    )
    return loss, {**metrics, **batches.figures(correction)}
