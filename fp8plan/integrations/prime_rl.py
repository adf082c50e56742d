"""A policy loss with fp8plan's correction for prime-rl.

    [trainer.loss]
    type = "custom"
    import_path = "fp8plan.integrations.prime_rl.loss"

    [trainer.loss.kwargs]
    settings = "/path/monitor.json"

Written for prime-rl at commit 559b44772 (v0.8.1.dev67): `setup_rl_loss_fn` in src/prime_rl/trainer/rl/loss.py.
prime-rl calls the function once for every sequence. Its trainer does not recompute log-probs before an update, so the
weights correct FP8 and staleness together. It does not see the orchestrator's sampling: give "sampling" in the
settings, as {"top_p": 0.95}.

Ranks share only with `"share": true` in the settings. Leave it out if a rank's first step may have no token of the rl
component (mixed with ce or ref_kl). Else the other ranks wait for ever. Leave it out also with an optimiser that steps
in the backward pass (CPU offload).
"""

from __future__ import annotations

from typing import Any

from fp8plan.checks import refuse_names
from fp8plan.integrations.hooks import running, settings_at, tensors


def loss(inputs: Any, settings: str | None = None, **others: Any) -> Any:
    """Importance-weighted policy gradient of one sequence: - sum over tokens of weight x advantage x log-prob.

    inputs:   prime-rl's LossInputs: trainer_logprobs (nats, with gradient), inference_logprobs, advantages, loss_mask
              and, or None, loss_weights, each [tokens]
    settings: path of the settings; None: the file that FP8PLAN_MONITOR names
    others:   none are allowed, such as those of prime-rl's own loss

    Weights are fp8plan's, detached. This replaces prime-rl's default loss: there is no DPPO mask and no KL term.
    Returns prime-rl's LossOutputs, with figures of sequences that have tokens. Raises ConfigError for bad settings.
    """
    import torch
    from prime_rl.trainer.rl.loss import LossOutputs

    refuse_names("trainer.loss.kwargs", others, ["settings"])
    batches = running(settings_at(settings), share=False)
    train = inputs.trainer_logprobs
    correction = batches.correct(train, inputs.inference_logprobs, inputs.loss_mask, lengths=[len(train)])
    weights, mask = tensors(correction)
    weights = weights * inputs.advantages
    if inputs.loss_weights is not None:
        weights = weights * inputs.loss_weights
    keep = mask.bool()
    figures = batches.figures(correction) if correction.sums["kept"].count else {}
    metrics = {name: torch.tensor(figure) for name, figure in figures.items()}
    return LossOutputs(loss=-(weights[keep] * train[keep]).sum(), metrics=metrics)
