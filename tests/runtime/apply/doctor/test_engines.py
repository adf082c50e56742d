"""The doctor on a real engine, on a CPU: faults are planted where they would happen, named, and gone once mended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import planted
import pytest
from tiny_models import BLOCK_SIZE, LONG_PROMPT, started, weights

import fp8plan
from fp8plan import Scored
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import rpc
from fp8plan.runtime.watch.guard.rollout_record import rollout_fields

pytestmark = pytest.mark.vllm

KIND = "dense"
MANY = [[(7 * n + 31 * row) % 1000 for n in range(BLOCK_SIZE + 20)] for row in range(6)]
LAYER = "model.layers.1.mlp.down_proj.weight"  # as vLLM and the checkpoint call it
TEMPERATURE = 0.6


def sampling(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0} | more)


def roll(engine: RolloutEngine) -> None:
    """A rollout of prompts that are longer than a block of the KV cache."""
    engine.generate([{"prompt_token_ids": prompt} for prompt in (*MANY, LONG_PROMPT)], sampling())


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    with started(KIND, "a", "fp8_block+fp8_kv") as engine:
        roll(engine)
        yield engine


@pytest.fixture
def healthy(engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """An engine with the weights a, synced, that has had a rollout; it is mended afterwards."""
    engine.sync_weights(weights(KIND, "a"))
    roll(engine)
    yield engine
    engine.recalibrate_kv()


def faults(target: Any, **given: Any) -> dict[str, str]:
    """Names of the faults that the doctor finds, with what it says of them."""
    return {str(one.fault): one.says for one in fp8plan.doctor(target, **given).faults}


def scored(engine: RolloutEngine, temperature: float) -> list[Scored]:
    """Sequences with a trainer's log-probs at a temperature, by transformers on the weights a."""
    import torch
    from tiny_models import checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint(KIND, "a"), dtype=torch.bfloat16)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt[:9]} for prompt in MANY], sampling(temperature=temperature, max_tokens=24, seed=3)
    )
    found = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found.append(Scored(tokens, chosen.tolist()))
    return found


def test_a_healthy_engine_has_no_fault(healthy: RolloutEngine) -> None:
    found = fp8plan.doctor(
        healthy, weights=weights(KIND, "a"), scored=scored(healthy, TEMPERATURE), temperature=TEMPERATURE
    )
    assert found.faults == (), str(found)
    states = {one.check: one.state.value for one in found.findings}
    assert {name for name, state in states.items() if state == "unknown"} == {"mismatch", "trainer"}
    assert faults(healthy, trainer_precision="fp8_block") == {}
    assert list(faults(healthy, trainer_precision="fp8_tensor")) == ["recipes_differ"]
    (compared,) = found.observed.weights or ()
    assert (compared.compared or 0) > 25


def test_the_doctor_changes_nothing(healthy: RolloutEngine) -> None:
    before = healthy.ask(rpc("fp8plan_digests")), healthy.kv_scales(), healthy.last_sequences, healthy.observation
    fp8plan.doctor(healthy, weights=weights(KIND, "b"))
    assert before == (
        healthy.ask(rpc("fp8plan_digests")),
        healthy.kv_scales(),
        healthy.last_sequences,
        healthy.observation,
    )


def test_scales_of_1(healthy: RolloutEngine) -> None:
    healthy.ask(rpc("fp8plan_set_kv_scales", {layer: [1.0, 1.0, 1.0] for layer in healthy.kv_scales()}))
    found = faults(healthy)
    assert found["kv_scales_unit"].startswith("1.0 in all 3 layers")
    healthy.recalibrate_kv()
    assert faults(healthy) == {}


def test_scales_that_clip(healthy: RolloutEngine) -> None:
    small = {layer: [scale / 4 for scale in (s["q"], s["k"], s["v"])] for layer, s in healthy.kv_scales().items()}
    healthy.ask(rpc("fp8plan_set_kv_scales", small))
    assert "times what its scale holds" in faults(healthy)["kv_scales_clip"]
    healthy.recalibrate_kv()
    assert faults(healthy) == {}


def test_one_corrupted_layer(healthy: RolloutEngine) -> None:
    """Noticed three ways: beside the trainer's weights, beside an earlier look, and by itself where it is no number."""
    fp8plan.doctor(healthy)
    healthy.llm.collective_rpc(planted.overwrite, args=(LAYER,))
    assert faults(healthy)["corrupted_layer"] == (
        f"changed since they were last looked at, though no sync has come between: {LAYER}"
    )
    assert faults(healthy, weights=weights(KIND, "a"))["corrupted_layer"] == f"not what the trainer has: {LAYER}"
    healthy.llm.collective_rpc(planted.overwrite, args=(LAYER, float("nan")))
    assert faults(healthy)["corrupted_layer"] == f"{LAYER}: NaN or Inf"
    healthy.sync_weights(weights(KIND, "a"))
    assert faults(healthy, weights=weights(KIND, "a")) == {}


def test_stale_weights(healthy: RolloutEngine) -> None:
    found = faults(healthy, weights=weights(KIND, "b"))
    assert "the engine serves other weights than the trainer's" in found["stale_weights"]


def test_a_turn_finds_the_blocks_of_the_turn_before(healthy: RolloutEngine) -> None:
    first = [(3 * n + 1) % 1000 for n in range(BLOCK_SIZE - 2)]
    ((answer,),) = [output.outputs for output in healthy.generate([{"prompt_token_ids": first}], sampling())]
    second = [*first, *answer.token_ids, *range(50)]  # a block and 52 tokens, 50 of them a tool's
    healthy.generate([{"prompt_token_ids": second}], sampling())
    seen = healthy.observation
    assert seen is not None
    assert (seen.prefix_cache_queries, seen.prefix_cache_hits) == (len(second), BLOCK_SIZE)
    record = rollout_fields(seen, healthy.engine_facts())
    assert (record["prefix_cache_queries"], record["prefix_cache_hits"]) == (len(second), BLOCK_SIZE)
    (found,) = [one for one in fp8plan.doctor(healthy).findings if one.check == "prefix_hits"]
    assert found.says == f"71.1% of {len(second)} tokens since the last rollout began were in the prefix cache"


def test_a_prefix_cache_that_was_not_emptied(healthy: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthy, "_reset_prefix_cache", lambda: None)
    healthy.sync_weights(weights(KIND, "b"))
    monkeypatch.undo()
    assert "keys and values of other weights" in faults(healthy)["prefix_cache_stale"]
    healthy.sync_weights(weights(KIND, "a"))
    roll(healthy)
    assert "prefix_cache_stale" not in faults(healthy)


def test_a_trainer_that_forgets_the_temperature(healthy: RolloutEngine) -> None:
    right = scored(healthy, TEMPERATURE)
    assert "rollouts are sampled at 1:" in faults(healthy, scored=right, temperature=1.0)["trainer_temperature"]
    found = fp8plan.doctor(healthy, scored=right, temperature=1.0).observed.temperatures
    assert found is not None
    assert found.fitted == pytest.approx(TEMPERATURE, abs=0.05)  # 0.58 to 0.59 by CPU; 1.0 would be the fault


def test_a_trainer_with_other_weights_is_not_taken_for_another_temperature(healthy: RolloutEngine) -> None:
    right = scored(healthy, 1.0)
    healthy.sync_weights(weights(KIND, "b"))
    assert set(faults(healthy, scored=right[0])) == {"trainer_differs"}


def test_an_engine_that_refuses_to_generate(healthy: RolloutEngine) -> None:
    torn = {**weights(KIND, "a"), "model.norm.weight": weights(KIND, "a")["model.norm.weight"] * float("nan")}
    with pytest.raises(fp8plan.Fp8PlanError):
        healthy.sync_weights(torn)
    assert "refuses to generate" in faults(healthy)["not_serving"]
    healthy.sync_weights(weights(KIND, "a"))
    assert "not_serving" not in faults(healthy)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": 0}, "temperature is 0; allowed: a number above 0"),
        ({"precision": "fp9"}, "unknown precision 'fp9'"),
        ({"gpu": "h300"}, "h300"),
        ({"prompts": [[-1]]}, "prompts: prompt 0, token 0 is id -1"),
        ({"prompts": [3]}, "prompts: no list of token ids"),
    ],
)
def test_what_cannot_be_asked(engine: RolloutEngine, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fp8plan.doctor(engine, **given)


def test_a_target_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"the target is a dict; allowed: a RolloutEngine, a vllm.LLM, the URL"):
        fp8plan.doctor({})
