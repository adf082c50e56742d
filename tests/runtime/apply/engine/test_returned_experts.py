"""A BF16 engine returns its experts, and a trainer in transformers replays them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tiny_models import BLOCK_SIZE, EXPERTS, LAYERS, VOCABULARY, checkpoint, cpu_plan, started, weights
from torch import Tensor

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.runtime.apply.engine.async_engine import AsyncRolloutEngine
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import launch
from fp8plan.runtime.apply.engine.returned_experts import refuse_dense, refuse_request
from fp8plan.runtime.replay import replayed
from fp8plan.runtime.routes import padded_routes, share_differing

pytestmark = pytest.mark.vllm
TOP_K = 2
TOKENS = 48  # of each response: enough for some whose experts are nearly tied
DRAWN = np.random.default_rng(0)
PROMPTS = [DRAWN.integers(1, VOCABULARY, 6 + number).tolist() for number in range(8)]


class Rollout(NamedTuple):
    """Sequences as a trainer's padded batch.

    ids, mask, responses: (sequences, length)
    routes:               (sequences, length, layers, experts per token)
    logprobs:             the engine's, of all tokens in `responses` in order
    """

    ids: Tensor
    mask: Tensor
    responses: Tensor
    routes: Tensor
    logprobs: Tensor


def rollout(engine: RolloutEngine) -> Rollout:
    from vllm import SamplingParams

    how = SamplingParams(temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how, routed_experts=True)
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask, responses = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (sequence, prompt) in enumerate(zip(sequences, PROMPTS, strict=True)):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
        responses[row, len(prompt) : len(sequence)] = 1
    routes = [output.outputs[0].routed_experts for output in outputs]
    entries = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    logprobs = [entry[token].logprob for tokens, each in entries for token, entry in zip(tokens, each, strict=True)]
    return Rollout(ids, mask, responses, padded_routes(routes, mask), torch.tensor(logprobs))


def k3(batch: Rollout, logits: Tensor) -> float:
    of_tokens = logits.float().log_softmax(-1)[:, :-1].gather(-1, batch.ids[:, 1:, None])[..., 0]
    log_ratio = of_tokens[batch.responses[:, 1:].bool()] - batch.logprobs
    return (log_ratio.exp() - 1 - log_ratio).mean().item()


def trainer(which: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint("moe", which), dtype=dtype, attn_implementation="eager")


def used_by_experts(model: Any, batch: Rollout) -> tuple[Tensor, Tensor]:
    """The experts that each layer computed, taken from what its module of experts was given; and the logits."""
    used: list[Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: used.append(inputs[1]))
        for layer in model.model.layers
    ]
    logits = model(batch.ids, attention_mask=batch.mask).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(used, dim=1).reshape(batch.routes.shape), logits


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    with started("moe", "a", "bf16", enable_return_routed_experts=True) as running:
        yield running


@pytest.fixture(scope="module")
def batch(engine: RolloutEngine) -> Rollout:
    return rollout(engine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_a_trainer_that_replays_routes_all_tokens_as_the_engine_did(batch: Rollout, dtype: torch.dtype) -> None:
    """The trainer's kernels are others (transformers' eager attention and experts), and its dtype is the engine's or
    FP32. On its own it picks other experts for some tokens."""
    model = trainer("a", dtype)
    with replayed(model, None) as record:
        alone = model(batch.ids, attention_mask=batch.mask).logits
    own = record.own_choice.reshape(batch.routes.shape)
    without = share_differing(batch.routes, own, batch.mask)
    assert 0.005 < without.tokens < 0.2
    assert without.choices < without.tokens
    with replayed(model, batch.routes) as replay:
        used, logits = used_by_experts(model, batch)
    assert share_differing(batch.routes, used.to(torch.int16), batch.mask) == (0, 0)
    assert 0 < replay.differing(batch.mask).choices <= without.choices
    assert k3(batch, logits) < k3(batch, alone) / 5


@torch.no_grad()
def test_routes_stand_at_their_tokens(batch: Rollout) -> None:
    """All but the last token of each sequence have routes, and those of the next token are others."""
    known = (batch.routes[..., 0] >= 0).all(-1)
    lengths = batch.mask.sum(-1)
    assert torch.equal(known.sum(-1), lengths - 1)
    assert not known[torch.arange(len(lengths)), lengths - 1].any()
    model = trainer("a", torch.bfloat16)
    with replayed(model, None) as record:
        model(batch.ids, attention_mask=batch.mask)
    own = record.own_choice.reshape(batch.routes.shape)
    shifted = share_differing(batch.routes[:, 1:], own[:, :-1], batch.mask[:, 1:])
    assert shifted.choices > 0.5


def test_an_output_has_routes_of_prompt_and_response_also_from_the_prefix_cache(engine: RolloutEngine) -> None:
    from vllm import SamplingParams

    prompt = [(7 * number) % VOCABULARY for number in range(BLOCK_SIZE + 40)]
    how = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=3, ignore_eos=True)
    found = []
    for _ in range(2):
        (output,) = engine.generate([{"prompt_token_ids": prompt}], how, routed_experts=True)
        found.append([response.routed_experts for response in output.outputs])
    assert output.num_cached_tokens == BLOCK_SIZE
    for first, second in zip(*found, strict=True):
        assert first.shape == second.shape == (len(prompt) + 3 - 1, LAYERS, TOP_K)
        assert first.dtype == np.uint8
        assert first.max() < EXPERTS
        assert (first[:BLOCK_SIZE] == second[:BLOCK_SIZE]).all()
    how.routed_experts_prompt_start = len(prompt)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], how, routed_experts=True)
    assert [len(response.routed_experts) for response in output.outputs] == [2, 2]
    stop = output.outputs[0].token_ids[0]
    stopped = SamplingParams(temperature=1.0, seed=1, max_tokens=3, stop_token_ids=[stop], ignore_eos=True)
    response = engine.generate([{"prompt_token_ids": prompt}], stopped, routed_experts=True)[0].outputs[0]
    assert len(response.routed_experts) == len(prompt) + len(response.token_ids) - 1


@torch.no_grad()
def test_routes_after_a_sync_are_those_of_the_new_weights(engine: RolloutEngine) -> None:
    engine.sync_weights(weights("moe", "b"))
    batch = rollout(engine)
    for which, least, most in (("b", 0, 0.2), ("a", 0.9, 1)):
        model = trainer(which, torch.bfloat16)
        with replayed(model, batch.routes) as replay:
            model(batch.ids, attention_mask=batch.mask)
        assert least <= replay.differing(batch.mask).tokens <= most


def test_an_engine_that_returns_none_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"started without; type: .*enable_return_routed_experts=True"):
        refuse_request(True, {"experts": True, "routed_experts": False})
    with started("dense", "a", "bf16") as engine:
        with pytest.raises(ConfigError, match="the model has no experts; leave it out"):
            engine.generate([{"prompt_token_ids": [1, 2, 3]}], routed_experts=True)
        assert engine.serving


def test_a_start_that_vllm_would_refuse_says_what_to_type() -> None:
    setup = cpu_plan("bf16").setup()
    more = {"enable_return_routed_experts": True}
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        launch(setup, str(checkpoint("dense", "a")), more=more)
    with pytest.raises(ConfigError, match=r"requires prefix caching.*enable_prefix_caching=True"):
        launch(setup, str(checkpoint("moe", "a")), more=more | {"enable_prefix_caching": False})
    assert launch(setup, str(checkpoint("moe", "a")), more=more).kwargs["enable_return_routed_experts"]
    asked = EngineLimits(enable_return_routed_experts=True)
    refuse_dense(asked, {"text_config": {"num_local_experts": 8}}, "a model of images and text")


@pytest.mark.slow
def test_an_engine_under_asyncio_returns_them_with_the_last_output() -> None:
    import warm_processes  # noqa: F401 -- it imports vLLM
    from vllm import SamplingParams

    async def asked() -> list[Any]:
        engine = await AsyncRolloutEngine.from_plan(
            cpu_plan("bf16"), str(checkpoint("moe", "a")), skip_tokenizer_init=True, enable_return_routed_experts=True
        )
        try:
            how = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
            prompt = {"prompt_token_ids": PROMPTS[0]}
            return [output async for output in engine.generate(prompt, how, routed_experts=True)]
        finally:
            engine.shutdown()

    *others, last = asyncio.run(asked())
    assert last.outputs[0].routed_experts.shape == (len(PROMPTS[0]) + 4 - 1, LAYERS, TOP_K)
    assert all(output.outputs[0].routed_experts is None for output in others)
