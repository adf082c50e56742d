"""A loop without an engine: rollouts are sampled in torch, by the policy with FP8 weights. Seconds, for tests.

Both sides of every pair come from a forward pass, as with an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8plan.runtime.quantize.block_fp8 import BLOCK, quantize

from .lab import Lab, cut
from .own_loop import RESPONSE
from .policy import PADDING, Policy, Rollout


class ForwardLab(Lab):
    """The lab without an engine: there is a Monitor, and no doctor."""

    def __init__(self) -> None:
        self._sampler = Policy("dense").model
        with torch.no_grad():
            for name, parameter in self._sampler.named_parameters():
                if name.endswith("proj.weight"):
                    parameter.copy_(through_fp8(parameter))
        super().__init__(Policy("dense"), None, self._rolled)

    def _rolled(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Rollout]:
        torch.set_num_threads(1)
        torch.manual_seed(sampling.get("seed", 0))
        longest = max(map(len, prompts))
        rows = torch.tensor([[PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        how = {"max_new_tokens": RESPONSE, "do_sample": True, "top_k": 0, "pad_token_id": PADDING, "eos_token_id": None}
        found = self._sampler.generate(
            rows,
            attention_mask=(rows != PADDING).long(),
            output_logits=True,
            return_dict_in_generate=True,
            **how,
        )
        tokens = found.sequences[:, longest:]
        every = torch.log_softmax(torch.stack(found.logits, 1).float(), -1)
        logprobs = every.gather(-1, tokens[..., None])[..., 0].tolist()
        seen = zip(prompts, tokens.tolist(), logprobs, strict=True)
        return cut(Rollout(list(prompt), response, row) for prompt, response, row in seen)


@contextmanager
def lab() -> Iterator[ForwardLab]:
    """A lab, calm."""
    made = ForwardLab()
    made.calm()
    yield made


def through_fp8(weight: torch.Tensor) -> torch.Tensor:
    """A weight as an engine with blockwise FP8 has it."""
    codes, scales = quantize(weight.detach().bfloat16())
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * wide[: weight.shape[0], : weight.shape[1]]
