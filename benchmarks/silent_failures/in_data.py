"""Failures that happen between engine and loss: tokens, masks, log-probs and the trainer's forward pass.

They need nothing new from an engine: each damages a batch of the healthy run, or how it is scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

import fp8plan

from .lab import Failure, Lab
from .policy import EOS, PADDING, Example, Logprobs, Policy, Rollout, token_logprobs

TOOL: Final = [(11 * n) % 1000 for n in range(16)]  # tokens of a tool's answer


def changed(change: Callable[[Example], Example]) -> Callable[[Lab], None]:
    """A run of a changed batch."""
    return lambda lab: lab.last(change(lab.healthy))


def both(act: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Lab], None]:
    """The same done to both sides, padding apart."""
    return changed(
        lambda seen: seen._replace(
            train=torch.where(seen.mask, act(seen.train), 0), rollout=torch.where(seen.mask, act(seen.rollout), 0)
        )
    )


def rollout_side(act: Callable[[Example], torch.Tensor]) -> Callable[[Lab], None]:
    return changed(lambda seen: seen._replace(rollout=act(seen)))


# Tokens and masks


def retokenised(lab: Lab) -> None:
    """Tokens 10 and 11 of each response become one: what follows is one place off."""
    seen = [
        one._replace(
            response=[*one.response[:10], (one.response[10] * 3) % 1000, *one.response[12:]], logprobs=one.logprobs[:-1]
        )
        for one in lab.healthy.rollouts
    ]
    lab.last(seen)


def with_prompts(change: Callable[[list[int]], list[int]]) -> Callable[[Lab], None]:
    """The trainer scores responses after other prompts than the engine had."""

    def inject(lab: Lab) -> None:
        shown = [one._replace(prompt=change(one.prompt)) for one in lab.healthy.rollouts]
        lab.last(lab.example(lab.healthy.rollouts, lab.policy.scores(shown)))

    return inject


def eos_synthetic(lab: Lab) -> None:
    """By token, and then by sequence."""
    seen = [one._replace(response=[*one.response, EOS], logprobs=[*one.logprobs, 0.0]) for one in lab.healthy.rollouts]
    lab.last(seen)
    lab.watch(settings=fp8plan.CorrectionSettings(level="sequence"))
    lab.last(seen)


def zero_from(start: int) -> Callable[[Lab], None]:
    """Log-probs from a place on are 0.0, counted from the end where it is below 0."""

    def inject(lab: Lab) -> None:
        seen = [
            one._replace(logprobs=[*one.logprobs[:start], *[0.0] * len(one.logprobs[start:])])
            for one in lab.healthy.rollouts
        ]
        lab.last(seen)

    return inject


def nan_as_zero(lab: Lab) -> None:
    chance = torch.Generator().manual_seed(0)
    lost = torch.rand(lab.healthy.rollout.shape, generator=chance) < 0.1
    lab.last(lab.healthy._replace(rollout=lab.healthy.rollout.masked_fill(lost, 0.0)))


def with_observations(counted: Callable[[bool], bool]) -> Callable[[Lab], None]:
    """16 tokens of a tool's answer after the 12th token. counted: whether a token counts, by whether it was sampled"""

    def inject(lab: Lab) -> None:
        seen = [
            one._replace(
                response=[*one.response[:12], *TOOL, *one.response[12:]],
                logprobs=[*one.logprobs[:12], *[0.0] * len(TOOL), *one.logprobs[12:]],
            )
            for one in lab.healthy.rollouts
        ]
        batch = lab.example(seen)
        sampled = torch.ones_like(batch.mask)
        sampled[:, 12 : 12 + len(TOOL)] = False
        mask = batch.mask & torch.where(sampled, counted(True), counted(False))
        lab.last(batch._replace(mask=mask))

    return inject


def mask_shifted(seen: Example) -> Example:
    return seen._replace(mask=torch.nn.functional.pad(seen.mask, (1, 0))[:, :-1])


def masked_as_one(seen: Example) -> Example:
    return Example(seen.rollouts, seen.train, seen.rollout.masked_fill(~seen.mask, 1.0), torch.ones_like(seen.mask))


# Log-probs


def top_instead_of_sampled(lab: Lab) -> None:
    """The likeliest token's log-prob, as the policy gives it."""

    def likeliest(rows: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(rows, -1).amax(-1, keepdim=True).expand_as(rows)

    best = lab.policy.scores(lab.healthy.rollouts, softmax=likeliest)
    lab.last([one._replace(logprobs=row.tolist()) for one, row in zip(lab.healthy.rollouts, best, strict=True)])


def minus_inf(seen: Example) -> torch.Tensor:
    found = seen.rollout.clone()
    found[:4] = -torch.inf
    return found


def negated_row(lab: Lab) -> None:
    seen, signs = lab.healthy, torch.ones(len(lab.healthy.mask), 1)
    signs[::8] = -1
    lab.last(seen._replace(train=seen.train * signs, rollout=seen.rollout * signs))


def same_tensor(seen: Example) -> torch.Tensor:
    return seen.train


def sequence_weights_collapse(lab: Lab) -> None:
    """Every 8 responses are one trajectory, as of an agent: 288 tokens on average, weighted as a sequence."""
    seen = lab.healthy
    rows = [[x[row : row + 8][seen.mask[row : row + 8]] for x in seen[1:3]] for row in range(0, len(seen.mask), 8)]
    width = max(len(train) for train, _ in rows)
    train, rollout = (
        torch.stack([torch.nn.functional.pad(r[k], (0, width - len(r[k]))) for r in rows]) for k in (0, 1)
    )
    mask = torch.stack([torch.arange(width) < len(one) for one, _ in rows])
    thresholds = fp8plan.Thresholds(tis=None, band=(0.5, 2.0))
    lab.watch(settings=fp8plan.CorrectionSettings("sequence", "icepop", thresholds))
    lab.last(Example([], train, rollout, mask))


# The trainer


def bf16_softmax(lab: Lab) -> None:
    def softmax(rows: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(rows.bfloat16(), -1).float()

    scored_otherwise(lab, lambda rollouts: lab.policy.scores(rollouts, softmax=softmax))


def dropout_on(lab: Lab) -> None:
    def scores(rollouts: list[Rollout]) -> Logprobs:
        torch.manual_seed(0)
        lab.policy.model.train()
        try:
            return lab.policy.scores(rollouts)
        finally:
            lab.policy.model.eval()

    scored_otherwise(lab, scores)


def padding_attended(lab: Lab) -> None:
    """All prompts are padded on the left to the longest, and nobody masks that."""

    def scores(rollouts: list[Rollout]) -> Logprobs:
        longest = max(len(one.prompt) for one in rollouts)
        padded = [one._replace(prompt=[*[PADDING] * (longest - len(one.prompt)), *one.prompt]) for one in rollouts]
        return lab.policy.scores(padded)

    scored_otherwise(lab, scores)


def packing_leaks(lab: Lab) -> None:
    """Four sequences in a row, which attend to those before them."""

    def scores(rollouts: list[Rollout]) -> Logprobs:
        found: Logprobs = []
        for start in range(0, len(rollouts), 4):
            pack = rollouts[start : start + 4]
            tokens = [token for one in pack for token in (*one.prompt, *one.response)]
            with torch.no_grad():
                logits = lab.policy.model(torch.tensor([tokens]), use_cache=False).logits[0]
            at = 0
            for one in pack:
                found.append(token_logprobs(logits[at + len(one.prompt) - 1 :], one.response))
                at += len(one.prompt) + len(one.response)
        return found

    scored_otherwise(lab, scores)


def rope_differs(lab: Lab) -> None:
    """The trainer's RoPE has another base: 500,000 in the place of 10,000."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    config = deepcopy(lab.policy.model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500_000.0}
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    Policy.like_vllms(other)
    other.load_state_dict(lab.policy.model.state_dict())
    scored_otherwise(lab, lambda rollouts: lab.policy.scores(rollouts, model=other))


def scored_otherwise(lab: Lab, scores: Callable[[list[Rollout]], Logprobs]) -> None:
    """A run with other scores of the trainer's, and the doctor with such scores of whole sequences."""
    lab.last(lab.example(lab.healthy.rollouts, scores(lab.healthy.rollouts)))
    lab.doctor(scores)


def nothing(lab: Lab) -> None:
    """Log-probs are what they should be."""
    lab.last(lab.healthy)


def shifted(seen: Example) -> torch.Tensor:
    return torch.where(seen.mask, torch.roll(seen.rollout, 1, 1), 0)


def reordered(lab: Lab) -> None:
    """The engine's log-probs of the response before."""
    seen, turned = lab.healthy, torch.roll(lab.healthy.rollout, 1, 0)
    fits = seen.mask & torch.roll(seen.mask, 1, 0)
    lab.last(seen._replace(rollout=turned, mask=fits))


def of(name: str, how: str, inject: Callable[[Any], None]) -> Failure:
    return Failure(name, how, inject)


FAILURES: Final = (
    of("retokenised", "two tokens of each response become one for the trainer", retokenised),
    of("thinking_stripped", "20 tokens are missing from the trainer's prompts", with_prompts(lambda p: p[:6] + p[26:])),
    of("prompt_truncated", "the trainer sees the last 24 tokens of each prompt", with_prompts(lambda p: p[-24:])),
    of("eos_synthetic", "an EOS with log-prob 0.0 at each end; weights by token, then by sequence", eos_synthetic),
    of("missing_logprobs_as_zero", "the last 6 log-probs of each response are 0.0", zero_from(-6)),
    of("certain_logprobs", "all of the engine's log-probs are 0.0", zero_from(0)),
    of("nan_as_zero", "one of ten log-probs is 0.0", nan_as_zero),
    of("observations_counted", "16 tokens of a tool's answer count", with_observations(lambda sampled: True)),
    of("mask_inverted", "only a tool's tokens count", with_observations(lambda sampled: not sampled)),
    of("mask_shifted", "the mask is one place later", changed(mask_shifted)),
    of("padding_counted", "the mask is 1 everywhere", changed(lambda x: x._replace(mask=torch.ones_like(x.mask)))),
    of("masked_as_one", "padding counts, and is 1.0 on the engine's side", changed(masked_as_one)),
    of("empty_mask", "the mask is 0 everywhere", changed(lambda x: x._replace(mask=torch.zeros_like(x.mask)))),
    of("logprobs_shifted", "the engine's log-probs are one place later", rollout_side(shifted)),
    of("responses_reordered", "each response has the log-probs of the one before", reordered),
    of("rewards_reordered", "log-probs are right; only rewards are not", nothing),
    of("top_instead_of_sampled", "the likeliest token's log-prob", top_instead_of_sampled),
    of("minus_inf", "4 of 32 responses have -inf", rollout_side(minus_inf)),
    of(
        "bf16_logprobs",
        "the engine's log-probs are rounded to BF16",
        rollout_side(lambda x: x.rollout.bfloat16().float()),
    ),
    of("bf16_softmax", "the trainer's log_softmax is in BF16", bf16_softmax),
    of("nll", "both sides are negated", both(torch.neg)),
    of("negated_row", "one row of eight is negated on both sides", negated_row),
    of("probabilities", "both sides are probabilities", both(torch.exp)),
    of("same_tensor", "the trainer's log-probs on both sides", rollout_side(same_tensor)),
    of("sequence_weights_collapse", "rows of 288 tokens, sequence weights kept in 0.5-2", sequence_weights_collapse),
    of("micro_batch_weighting", "log-probs are right; only the loss is not", nothing),
    of("dropout_on", "the trainer scores with dropout of 0.1 in attention", dropout_on),
    of("padding_attended", "the trainer attends to left padding", padding_attended),
    of("packing_leaks", "four sequences in a row attend to each other", packing_leaks),
    of("rope_differs", "the trainer's RoPE has another base", rope_differs),
)
