"""The trainer's side of a GRPO step: the policy in FP32, AdamW, micro-batches, and the tensors that an engine takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.grpo import Batch, micro_batches, token_losses, train_logprobs
from fp8plan.runtime.replay import replayed


class Trainer:
    """A policy that is trained.

    temperature:  of the log-probs, as the engine samples
    clip:         of PPO's ratio, which matters from the second update on a rollout on
    max_norm:     of the gradient
    micro_tokens: padded tokens of a micro-batch
    """

    def __init__(
        self,
        checkpoint: Path,
        device: str,
        rate: float,
        temperature: float,
        clip: float,
        max_norm: float,
        micro_tokens: int,
    ) -> None:
        import transformers

        self.device, self.temperature, self.clip = device, temperature, clip
        self.max_norm, self.micro_tokens = max_norm, micro_tokens
        self.policy = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.policy.to(device)
        self.optimiser = torch.optim.AdamW(self.policy.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """The policy's log-probs of the batch, [rows, longest response], with the routes that the batch has."""
        values = torch.zeros_like(batch.rollout_logprobs)
        for part in micro_batches(batch, self.micro_tokens):
            few = batch.rows(part)
            values[part, : few.mask.shape[1]] = self._forward(few)
        return values

    @torch.no_grad()
    def routing_differs(self, batch: Batch) -> float:
        """The share of the scored tokens for which policy and engine pick another expert in at least one layer.

        The experts of a token are those of its input, the token before. Only the first micro-batch is looked at.
        """
        few = batch.rows(next(micro_batches(batch, self.micro_tokens)))
        with replayed(self.policy, few.routes) as replay:
            self._own(few)
        inputs = torch.arange(few.tokens.shape[1], device=few.tokens.device)
        first = few.first[:, None] - 1
        return replay.differing((inputs >= first) & (inputs < first + few.mask.sum(1, keepdim=True))).tokens

    def update(self, batch: Batch, old: Tensor, mask: Tensor, weights: Tensor | None) -> None:
        """One optimiser step.

        old, mask, weights: [rows, longest response]; log-probs before the first update, the tokens that count, and what
        each weighs (None: 1)
        """
        self._gradients(batch, old, mask, weights)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def timed(self, batch: Batch) -> tuple[float, float]:
        """Seconds of the log-probs of a batch, and of gradients on it, which change nothing."""
        begun = self.clock()
        old = self.logprobs(batch)
        between = self.clock()
        self._gradients(batch, old, batch.mask, None)
        self.optimiser.zero_grad(set_to_none=True)
        return between - begun, self.clock() - between

    def tensors(self, noise: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
        """The policy as its checkpoint has it, in BF16. noise: on each matrix, as a share of its RMS"""
        from transformers.core_model_loading import revert_weight_conversion

        sent = {name: x.detach().bfloat16() for name, x in self.policy.named_parameters()}
        sent = dict(revert_weight_conversion(self.policy, sent))  # transformers holds all experts in one tensor
        if noise:
            chance = torch.Generator(self.device).manual_seed(seed)
            for name, x in sent.items():
                if x.dim() == 2:
                    drawn = torch.randn(x.shape, generator=chance, device=x.device)
                    sent[name] = (x.float() + noise * x.float().square().mean().sqrt() * drawn).bfloat16()
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])

    def clock(self) -> float:
        """The time when the device has done what it was given."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _forward(self, few: Batch) -> Tensor:
        if few.routes is None:
            return self._own(few)
        with replayed(self.policy, few.routes):
            return self._own(few)

    def _own(self, few: Batch) -> Tensor:
        """The log-probs, with the routing that the policy's modules have."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            return train_logprobs(self.policy, few, self.temperature)

    def _gradients(self, batch: Batch, old: Tensor, mask: Tensor, weights: Tensor | None) -> None:
        """Gradients of the mean loss over the tokens that count."""
        tokens = float(mask.sum().clamp(min=1))
        for part in micro_batches(batch, self.micro_tokens):
            few = batch.rows(part)
            kept = mask[part, : few.mask.shape[1]]
            losses = token_losses(self._forward(few), old[part, : kept.shape[1]], few.advantages, self.clip) * kept
            losses = losses if weights is None else losses * weights[part, : kept.shape[1]]
            (losses.sum() / tokens).backward()
