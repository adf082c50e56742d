"""The sampling of a real engine's rollouts: what it observes, what ratios show of it, and scores on the kept set."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, started

from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.watch.controller.alarms import Alarm
from fp8plan.runtime.watch.mismatch.sampling import Sampling, kept_logprobs
from fp8plan.runtime.watch.monitor.monitor import Monitor

pytestmark = pytest.mark.vllm

TOKENS, SAMPLES = 16, 6


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    told = {"temperature": 0.6, "top_k": 20}  # as many models' generation_config.json say
    with started("dense", "a", "bf16", max_logprobs=-1, override_generation_config=told) as found:
        yield found


def generated(engine: RolloutEngine, params: Any, prompts: int = 1) -> list[Any]:
    """The completions of the first prompts."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS[:prompts]]
    return [one for output in engine.generate(inputs, params) for one in output.outputs]


def seen(engine: RolloutEngine) -> Sampling | None:
    assert engine.observation is not None
    return engine.observation.sampling


def test_a_rollout_is_observed_with_its_sampling_and_one_that_names_none_with_the_models_own(
    engine: RolloutEngine,
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(top_p=0.9, temperature=0.7, repetition_penalty=1.1, max_tokens=2)
    generated(engine, params)
    assert seen(engine) == Sampling(top_p=0.9, temperature=0.7, repetition_penalty=1.1)
    generated(engine, [SamplingParams(top_p=0.9, max_tokens=2), SamplingParams(min_p=0.1, max_tokens=2)], prompts=2)
    assert seen(engine) == Sampling(top_p=0.9, min_p=0.1)
    generated(engine, None)
    assert seen(engine) == Sampling(temperature=0.6, top_k=20)


@pytest.mark.filterwarnings("ignore:fp8plan. alarm unit_mean")
def test_scores_on_the_kept_set_are_the_engines_log_probs_and_full_ones_are_named(engine: RolloutEngine) -> None:
    """A trainer with the engine's very weights: the engine itself, which scores what it has sampled as a prompt."""
    from vllm import SamplingParams

    how = SamplingParams(top_p=0.8, n=SAMPLES, seed=1, max_tokens=TOKENS, ignore_eos=True, logprobs=-1)
    completions = generated(engine, how)
    rollout, full, kept = (torch.zeros(SAMPLES, TOKENS) for _ in range(3))
    monitor = Monitor(engine=engine)
    for row, one in enumerate(completions):
        tokens = list(one.token_ids)
        rollout[row] = torch.tensor([entry[token].logprob for token, entry in zip(tokens, one.logprobs, strict=True)])
        sets = [[token for token, found in entry.items() if isfinite(found.logprob)] for entry in one.logprobs]
        logprobs = scored(engine, [*PROMPTS[0], *tokens])[-TOKENS:]
        full[row] = logprobs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        kept[row] = kept_logprobs(logprobs, torch.tensor(tokens), sets)
    torch.testing.assert_close(kept, rollout, rtol=0, atol=0.02)  # of BF16
    mass = (full - rollout).exp()
    assert mass.min() > 0.78
    assert mass.max() < 1.02
    with pytest.warns(RuntimeWarning, match="the ratios are biased: top_p 0.8"):
        step = monitor.step(full, rollout)
    assert Alarm.UNIT_MEAN in step.decided.alarms
    assert "top_p 0.8: vLLM renormalises" in step.decided.reason
    assert monitor.step(kept, rollout, sampling=Sampling(top_p=0.8, kept_set=True)).decided.alarms == ()


def scored(engine: RolloutEngine, tokens: list[int]) -> torch.Tensor:
    """Log-probs over the vocabulary of each token but the first, [tokens - 1, vocabulary], as the engine has them."""
    from vllm import SamplingParams

    (output,) = engine.llm.generate(
        [{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=-1), use_tqdm=False
    )
    rows = [[entry[token].logprob for token in range(len(entry))] for entry in output.prompt_logprobs[1:]]
    return torch.tensor(rows)
