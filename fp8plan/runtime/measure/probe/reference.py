"""The trainer's side of a mismatch: a model of transformers scores the tokens that an engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.risk.remedies import BF16
from fp8plan.runtime.measure.probe.fp8_linears import fp8_linears
from fp8plan.runtime.measure.probe.sampling import Sampled
from fp8plan.runtime.replay import has_routers, replayed
from fp8plan.runtime.routes import padded_routes, share_differing

if TYPE_CHECKING:
    import torch

# Tokens of one forward pass, padding included; a longer sequence goes alone.
TOKENS_AT_ONCE: Final = {"cpu": 2048, "cuda": 16_384}
# Bytes of logits at once. Each logit takes 2 in BF16, 4 in float32 and 4 for the exponentials of log-sum-exp.
LOGITS_BYTES, BYTES_PER_LOGIT = 1 << 30, 10


class Scores(NamedTuple):
    """The reference's side of some samples.

    logprobs:       of every response token of each sample: [tokens of its response] float32 on the CPU
    experts_differ: as in Probed
    """

    logprobs: list[torch.Tensor]
    experts_differ: float | None


class Reference:
    """A BF16 model of transformers that scores responses.

    It holds at most LOGITS_BYTES of logits: one response of 20k tokens alone would take 12 GB in float32 with a
    vocabulary of 150k.
    """

    def __init__(self, model_path: str, device: str = "cpu") -> None:
        """Load the model on `device`, "cpu" or "cuda".

        Raises ConfigError for a model whose logits are not lm_head(last hidden state).
        """
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).to(device).eval()
        self.device, self._body, self._head = device, model.get_decoder(), model.get_output_embeddings()
        self._recordable = has_routers(self._body)
        self._refuse_other_heads(model, model_path)

    def computing_in(self, precision: str, ignored: Sequence[str]) -> AbstractContextManager[None]:
        """Return a context in which the model computes its linears in one of TRAINER_PRECISIONS, as `fp8_linears`."""
        return nullcontext() if precision == BF16 else fp8_linears(self._body, precision, ignored)

    def score(
        self,
        samples: Sequence[Sampled],
        temperature: float = 1.0,
        tokens_at_once: int | None = None,
        router_replay: bool = False,
    ) -> Scores:
        """Score the response tokens of each sample.

        router_replay: use the engine's experts, which the samples must have

        Rows of a batch are padded on the right: under causal attention no token sees the padding, so no mask is needed.
        Raises ConfigError as `replayed`.
        """
        import torch

        scores: list[Any] = [torch.empty(0)] * len(samples)
        shares, counts = [], []
        budget = tokens_at_once or TOKENS_AT_ONCE[self.device]
        for rows in batches([len(s.prompt) + len(s.response) for s in samples], budget):
            scored, share = self._batch([samples[i] for i in rows], temperature, router_replay)
            for i, values in zip(rows, scored, strict=True):
                scores[i] = values
            if share is not None:
                shares.append(share)
                counts.append(sum(map(len, scored)))
        return Scores(scores, float(np.average(shares, weights=counts)) if shares else None)

    def _batch(
        self, samples: Sequence[Sampled], temperature: float, router_replay: bool
    ) -> tuple[list[torch.Tensor], float | None]:
        """Return the log-probs of one batch, and the share of tokens with other experts."""
        import torch

        texts = [torch.tensor([*s.prompt, *s.response]) for s in samples]
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(self.device)
        before = torch.zeros(tokens.shape, dtype=torch.bool)  # positions just before a token of the response
        for row, s in enumerate(samples):
            before[row, len(s.prompt) - 1 : len(s.prompt) + len(s.response) - 1] = True
        targets = torch.tensor([token for s in samples for token in s.response], device=self.device)
        with torch.inference_mode():
            states, share = self._hidden(samples, tokens, before, router_replay)
            scored = self._logprobs(states[before.to(self.device)], targets, temperature)
        return list(scored.cpu().split([len(s.response) for s in samples])), share

    def _hidden(
        self, samples: Sequence[Sampled], tokens: torch.Tensor, before: torch.Tensor, router_replay: bool
    ) -> tuple[torch.Tensor, float | None]:
        """Return the last hidden states of tokens [batch, length], and the share of `before` with other experts."""
        import torch

        routes = [s.experts for s in samples if s.experts is not None]
        if router_replay and not routes:
            raise ConfigError("the samples have no experts of the engine to replay; sample with routed_experts")
        if not routes or not (router_replay or self._recordable):
            return self._body(input_ids=tokens, use_cache=False).last_hidden_state, None
        lengths = torch.tensor([len(s.prompt) + len(s.response) for s in samples])
        picked = padded_routes(routes, torch.arange(tokens.shape[1]) < lengths[:, None])
        with replayed(self._body, picked if router_replay else None) as seen:
            states = self._body(input_ids=tokens, use_cache=False).last_hidden_state
        return states, share_differing(picked, seen.own_choice.reshape(picked.shape), before).tokens

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probs of targets [tokens] from hidden states [tokens, width]: [tokens] float32."""
        import torch

        at_once = max(1, LOGITS_BYTES // (BYTES_PER_LOGIT * self._head.weight.shape[0]))
        parts = []
        for states, wanted in zip(hidden.split(at_once), targets.split(at_once), strict=True):
            logits = self._head(states).float().div_(temperature)
            parts.append(logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1))
        return torch.cat(parts) if parts else torch.empty(0)

    def _refuse_other_heads(self, model: Any, model_path: str) -> None:
        import torch

        tokens = torch.arange(8, device=self.device)[None] % self._head.weight.shape[0]
        with torch.inference_mode():
            whole = model(input_ids=tokens, use_cache=False).logits
            ours = self._head(self._body(input_ids=tokens, use_cache=False).last_hidden_state)
        if not torch.allclose(whole.float(), ours.float(), rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"{model_path} ({type(model).__name__}) does something to its logits after lm_head (a cap, a scale), "
                "which this reference would miss; allowed: models whose logits are lm_head(last hidden state)"
            )


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of sequences of similar lengths: together at most `budget` tokens with padding, or one alone."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
