"""The KL of a real engine's rollout with an FP8 KV cache, split by cause: its parts are what separate sums say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, checkpoint, started

from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.monitor.monitor import Monitor

pytestmark = pytest.mark.vllm

SAMPLES, TOKENS = 24, 48
Rollout = tuple[list[tuple[list[int], list[int]]], torch.Tensor]  # (prompt, response) of each row; log-probs


def rolled_out(engine: Any, seed: int, **sampling: Any) -> Rollout:
    from vllm import SamplingParams

    params = SamplingParams(n=SAMPLES, seed=seed, max_tokens=TOKENS, ignore_eos=True, logprobs=0, **sampling)
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS[:2]], params)
    rows = [(list(x.prompt_token_ids), one) for x in outputs for one in x.outputs]
    logprobs = [[at[t].logprob for t, at in zip(one.token_ids, one.logprobs, strict=True)] for _, one in rows]
    return [(prompt, list(one.token_ids)) for prompt, one in rows], torch.tensor(logprobs)


@torch.inference_mode()
def distributions(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs over the vocabulary at each token of the response, [tokens, vocabulary]."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def scores(model: Any, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    return torch.stack([distributions(model, p, r).gather(1, torch.tensor(r)[:, None]).squeeze(1) for p, r in rows])


def nucleus_mass(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probability [tokens] of the likeliest tokens that reach top_p, of log-probs [tokens, vocabulary]."""
    order = logprobs.exp().sort(-1, descending=True).values
    return (order * (order.cumsum(-1) - order < top_p)).sum(-1)


def k3(train: torch.Tensor, rollout: torch.Tensor) -> float:
    return measure(pack(train, rollout, torch.ones(train.shape))).metrics().k3


@pytest.mark.slow
def test_parts_of_a_real_rollout_are_those_that_separate_sums_say(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # The engine's weights, which are BF16; in float32, as CPUs without AVX-512 multiply BF16 many times slower.
    synced = AutoModelForCausalLM.from_pretrained(checkpoint("dense", "a"), dtype=torch.float32).eval()
    trained = copy.deepcopy(synced)  # as after some optimiser steps
    with torch.no_grad():
        for tensor in trained.parameters():
            tensor.add_(0.02 * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    with started("dense", "a", "fp8_kv") as engine:
        rows, rollout = rolled_out(engine, seed=1)
        other_rows, other = rolled_out(engine, seed=2)
        cut_rows, cut = rolled_out(engine, seed=3, top_p=0.9)
        monitor = Monitor(engine=engine)
        mask = torch.ones(rollout.shape)
        step = monitor.step(
            scores(trained, rows), rollout, mask, synced_logprobs=scores(synced, rows), sampling={"top_p": 1.0}
        )
    parts = {part.causes: part.kl for part in step.attribution}
    stale = torch.stack(
        [
            (old.exp() * (old - distributions(trained, *row))).sum(-1)
            for row in rows
            for old in [distributions(synced, *row)]
        ]
    ).mean()
    assert parts["staleness",] == pytest.approx(float(stale), rel=0.2)
    # The engine's own share, from another rollout of the same weights.
    assert parts["precision", "rest"] == pytest.approx(k3(scores(synced, other_rows), other), rel=0.2)
    assert sum(parts.values()) == pytest.approx(step.mismatch.k3)
    cut_step = Monitor(sampling={"top_p": 0.9}).step(scores(synced, cut_rows), cut, mask, fresh=True)
    mass = torch.cat([nucleus_mass(distributions(synced, *row), 0.9) for row in cut_rows])
    (sampling, *_) = cut_step.attribution
    assert sampling.causes == ("sampling",)
    assert sampling.kl == pytest.approx(float((mass - 1 - mass.log()).mean()), rel=0.2)
