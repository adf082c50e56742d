"""The parts of a GRPO step that talk to nobody: batches, advantages, log-probs and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning.policies.tasks import Problem
from fp8plan.runtime.routes import padded_routes

SPREAD_FLOOR = 1e-6  # of a group's rewards


class Sample(NamedTuple):
    """One response: its problem, tokens and the engine's log-prob of each, in nats.

    routes: the experts of each token (tokens, layers, experts per token), if the engine returned them
    """

    problem: Problem
    tokens: list[int]
    logprobs: list[float]
    routes: Any = None


class Batch(NamedTuple):
    """A rollout, padded on the right.

    tokens:           [rows, length], prompt and response
    first:            [rows], where the response begins
    mask:             [rows, longest response], true where there is a token
    rollout_logprobs: [rows, longest response]
    advantages:       [rows, 1]
    routes:           [rows, length, layers, experts per token], which the trainer replays; None: it picks its own
    """

    tokens: Tensor
    first: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    routes: Tensor | None = None

    def to(self, device: str) -> Batch:
        return Batch(*(None if part is None else part.to(device) for part in self))

    def rows(self, part: slice) -> Batch:
        """Some rows, as long as their longest."""
        few = Batch(*(None if x is None else x[part] for x in self))
        longest = int(few.mask.sum(1).max()) if few.mask.numel() else 0
        length = int((few.first + few.mask.sum(1)).max()) if few.mask.numel() else 0
        cut = few._replace(mask=few.mask[:, :longest], rollout_logprobs=few.rollout_logprobs[:, :longest])
        routes = None if few.routes is None else few.routes[:, :length]
        return cut._replace(tokens=few.tokens[:, :length], routes=routes)


def samples_of(problems: Sequence[Problem], outputs: Sequence[Any]) -> list[Sample]:
    """vLLM's outputs, in the order of the problems, with the log-prob of each sampled token."""
    samples = []
    for problem, output in zip(problems, outputs, strict=True):
        (response,) = output.outputs
        logprobs = [at[token].logprob for token, at in zip(response.token_ids, response.logprobs, strict=True)]
        samples.append(Sample(problem, list(response.token_ids), logprobs, response.routed_experts))
    return samples


def advantages(rewards: Tensor) -> Tensor:
    """Rewards [prompts, samples] less their group's mean, over its standard deviation: 0 where all are equal.

    GRPO, arXiv 2402.03300.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    spread = rewards.std(1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(centred[:, :1])
    return torch.where(spread > SPREAD_FLOOR, centred / spread.clamp(min=SPREAD_FLOOR), torch.zeros_like(centred))


def batch_of(samples: Sequence[Sample], rewards: Sequence[float], group: int) -> Batch:
    """The padded batch; samples of one prompt, `group` of them, follow each other. It has the samples' routes."""
    rows, longest = len(samples), max(len(sample.tokens) for sample in samples)
    length = max(len(sample.problem.prompt) + len(sample.tokens) for sample in samples)
    tokens, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, longest, dtype=torch.bool)
    logprobs, first = torch.zeros(rows, longest), torch.tensor([len(sample.problem.prompt) for sample in samples])
    for row, sample in enumerate(samples):
        both = [*sample.problem.prompt, *sample.tokens]
        tokens[row, : len(both)] = torch.tensor(both)
        mask[row, : len(sample.tokens)] = True
        logprobs[row, : len(sample.tokens)] = torch.tensor(sample.logprobs)
    gains = advantages(torch.tensor(rewards).view(-1, group)).view(-1, 1)
    batch = Batch(tokens, first, mask, logprobs, gains)
    if samples[0].routes is None:
        return batch
    lengths = first + mask.sum(1)
    return batch._replace(
        routes=padded_routes([sample.routes for sample in samples], torch.arange(length) < lengths[:, None])
    )


def micro_batches(batch: Batch, most_tokens: int) -> Iterator[slice]:
    """Consecutive rows of at most so many padded tokens together, and of at least one row."""
    rows = max(1, most_tokens // batch.tokens.shape[1])
    for start in range(0, len(batch.tokens), rows):
        yield slice(start, start + rows)


def train_logprobs(policy: Any, batch: Batch, temperature: float) -> Tensor:
    """The policy's log-prob of each response token, [rows, longest response]; 0 where there is none."""
    logits = policy(batch.tokens, use_cache=False).logits.float() / temperature
    steps = torch.arange(batch.mask.shape[1], device=batch.tokens.device)
    at = (batch.first[:, None] + steps).clamp(max=batch.tokens.shape[1] - 1)
    wanted = batch.tokens.gather(1, at)
    logprobs = logits.log_softmax(-1).gather(1, (at - 1)[..., None].expand(-1, -1, logits.shape[-1]))
    return logprobs.gather(-1, wanted[..., None]).squeeze(-1).masked_fill(~batch.mask, 0.0)


def token_losses(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped loss of each token (arXiv 1707.06347): -min(r A, clip(r, 1 - clip, 1 + clip) A).

    new, old: log-probs of the policy now, and before the first update on this rollout; the first has gradients
    """
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
