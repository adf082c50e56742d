"""The trainer's side: a tiny Qwen3 that really learns, and that really scores what an engine has sampled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tiny_models import COMMON, MOE, VOCABULARY

# A random model made like a trained one: tokens of 1.7 nats, which depend on the last token more than on others, and a
# k3 of 6e-3 between the trainer and an engine with FP8 weights and KV cache.
PEAK: Final = 4.0  # times a random head
EMBED: Final = 120.0  # times random embeddings
RATE: Final = 3e-5  # of Adam
PADDING: Final = VOCABULARY - 2
EOS: Final = VOCABULARY - 1
Logprobs = list[torch.Tensor]  # of each response: [its tokens] float32


class Rollout(NamedTuple):
    """One response. logprobs: the engine's, of each of its tokens; version: of the weights that should have sampled"""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    version: int = 0


class Example(NamedTuple):
    """The data of a training step: rollouts, and both sides' log-probs, padded [responses, longest], with a mask."""

    rollouts: list[Rollout]
    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor


@cache
def checkpoint(kind: str) -> Path:
    """The folder of the first policy. kind: "dense", with biases of q, k and v; "plain", without; or "moe"."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = COMMON | {"attention_bias": kind != "plain", "attention_dropout": 0.1}
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **MOE)) if kind == "moe" else None
    model = made or Qwen3ForCausalLM(Qwen3Config(**settings))
    with torch.no_grad():
        model.lm_head.weight.mul_(PEAK)
        model.model.embed_tokens.weight.mul_(EMBED)
        Policy.like_vllms(model)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.5)
    path = Path(_folder().name) / kind
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fp8plan-failures-")


class Policy:
    """A policy in training. `model` has float32 weights, as a trainer's master copy; what is sent is BF16."""

    def __init__(self, kind: str) -> None:
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint(kind), dtype=torch.float32).eval()
        self.like_vllms(self.model)
        self.version = 0

    @staticmethod
    def like_vllms(model: Any) -> None:
        """Take away the output projection's bias, which transformers gives to such a model and vLLM does not."""
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_parameter("bias", None)

    def tensors(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """The tensors that a sync sends, under the checkpoint's names. They are copies that a caller may change."""
        found = {}
        for name, tensor in self.model.named_parameters():
            found |= {part: x.detach().to(dtype, copy=True) for part, x in of_checkpoint(name, tensor).items()}
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go back to weights that `tensors` gave."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                for part, view in of_checkpoint(name, parameter).items():
                    view.copy_(tensors[part])

    def learn(self, rollouts: Sequence[Rollout], steps: int = 1) -> None:
        """Take steps of policy gradient; the reward is the share of even tokens."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        rewards = torch.tensor([sum(t % 2 == 0 for t in one.response) / len(one.response) for one in rollouts])
        for _ in range(steps):
            scored = self.scores(rollouts, grad=True)
            means = torch.stack([row.mean() for row in scored])
            loss = -((rewards - rewards.mean()) / (rewards.std() + 1e-6) * means).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.version += 1

    def scores(
        self,
        rollouts: Sequence[Rollout],
        *,
        temperature: float = 1.0,
        grad: bool = False,
        model: Any = None,
        softmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Logprobs:
        """Log-probs of each response's tokens after its prompt, by one padded forward pass."""
        rows = [[*one.prompt, *one.response] for one in rollouts]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])
        with torch.set_grad_enabled(grad):
            logits = (model or self.model)(input_ids=tokens, use_cache=False).logits
            return [
                token_logprobs(logits[i, len(one.prompt) - 1 :], one.response, temperature, softmax)
                for i, one in enumerate(rollouts)
            ]


def of_checkpoint(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a parameter under the checkpoint's names: transformers holds all experts of a layer in one."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    layer = name.rpartition(".")[0]
    return {
        f"{layer}.{expert}.{part}.weight": view
        for expert, rows in enumerate(tensor)
        for part, view in zip(parts, rows.chunk(len(parts)), strict=True)
    }


def token_logprobs(
    logits: torch.Tensor,
    response: Sequence[int],
    temperature: float = 1.0,
    softmax: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Log-probs of a response: [its tokens]. logits: [from the prompt's last token on, vocabulary]"""
    rows = logits[: len(response)].float() / temperature
    every = torch.log_softmax(rows, -1) if softmax is None else softmax(rows)
    return every.gather(-1, torch.tensor(response)[:, None])[:, 0]


def example(rollouts: Sequence[Rollout], scores: Logprobs) -> Example:
    """Pad both sides with zeros, as trainers do."""
    width = max(len(one.response) for one in rollouts)
    train, rollout, mask = (torch.zeros(len(rollouts), width) for _ in range(3))
    for row, (one, scored) in enumerate(zip(rollouts, scores, strict=True)):
        size = len(one.response)
        train[row, :size], rollout[row, :size] = scored.detach(), torch.tensor(one.logprobs)
        mask[row, :size] = 1
    return Example(list(rollouts), train, rollout, mask.bool())
