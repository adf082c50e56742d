"""Weights over verl's own transport into a live engine on the CPU: what is written, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import planted
import pytest
import torch
from native_client import digests_of, digests_of_fresh
from tiny_models import weights
from verl_parts import engine_of, update

pytestmark = [pytest.mark.verl, pytest.mark.vllm]


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with all experts of a layer in one tensor, as Transformers names it."""
    whole, parts = {}, dict[str, list[torch.Tensor]]()
    for name, tensor in tensors.items():
        layer, found, rest = name.partition(".mlp.experts.")
        if not found:
            whole[name] = tensor
            continue
        parts.setdefault(f"{layer}.mlp.experts.{rest.split('.')[1]}", []).append(tensor)
    stacked = {name: torch.stack(experts) for name, experts in parts.items()}
    for name in [name for name in stacked if name.endswith(".gate_proj")]:
        layer = name.removesuffix(".gate_proj")
        whole[f"{layer}.gate_up_proj"] = torch.cat([stacked[name], stacked[f"{layer}.up_proj"]], dim=1)
        whole[f"{layer}.down_proj"] = stacked[f"{layer}.down_proj"]
    return whole


def fused_pairs(which: str) -> Any:
    return fused(weights("moe", which)).items()


def test_experts_are_synced_too() -> None:
    """First, as a process holds one engine at a time. As verl sends a policy, and one whose LoRA it has merged."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    with engine_of("b", "moe") as found:
        reference = digests_of(found)
        for sent in (lambda which: unfuse_moe_params(fused_pairs(which)), fused_pairs):
            for which in "ab":
                assert update(found, sent(which)) == {"ok": None}
                assert (digests_of(found) == reference) == (which == "b")


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, int]]:
    return digests_of_fresh("dense", "fp8_block")


@pytest.fixture(scope="module")
def llm(references: Any) -> Iterator[Any]:
    """An engine with blockwise FP8 weights that begins with dummy ones, as verl's does."""
    with engine_of(load_format="dummy") as found:
        yield found


def status(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = llm.collective_rpc("fp8plan_status")[0]["ok"]
    return found


def test_an_update_leaves_the_bits_of_a_fresh_engine(llm: Any, references: Any) -> None:
    """The first one waits on the host until it is whole; the next are written as they come."""
    for number, which in enumerate("bab", 1):
        assert update(llm, weights("dense", which).items()) == {"ok": None}
        assert digests_of(llm) == references[which]
        found = status(llm)
        assert (found["version"], found["refusal"]) == (number, None)
        report = found["last_update"]
        assert report["tensors"] == len(weights("dense", which))
        assert report["chunks"] > 3  # buckets: fused groups are cut in two by some
        assert report["compared"] > 0
        assert report["weight_error"] == pytest.approx(0.0265, abs=0.0015)


def test_master_weights_in_fp32_are_rounded_as_vllm_rounds_them(llm: Any, references: Any) -> None:
    assert update(llm, ((name, x.float()) for name, x in weights("dense", "a").items())) == {"ok": None}
    assert digests_of(llm) == references["a"]


def test_a_sync_that_lacks_a_tensor_or_is_another_models_leaves_the_old_weights(llm: Any, references: Any) -> None:
    update(llm, weights("dense", "a").items())
    before = status(llm)["version"]
    stale = weights("dense", "b")
    del stale["model.layers.1.self_attn.q_proj.weight"]
    assert "was not expected here" in update(llm, stale.items())["error"]  # of the update before it was there
    assert "not expected" in status(llm)["refusal"]  # it had begun to be written
    assert "missing: " in update(llm, stale.items())["error"]
    update(llm, weights("dense", "a").items())
    assert digests_of(llm) == references["a"]
    assert status(llm)["version"] == before + 1


def test_nan_is_named_and_the_weights_must_not_be_used(llm: Any, references: Any) -> None:
    sent = weights("dense", "b")
    sent["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
    assert "not finite: model.layers.2.mlp.down_proj.weight" in update(llm, sent.items())["error"]
    assert "not finite" in status(llm)["refusal"]
    assert update(llm, weights("dense", "b").items()) == {"ok": None}
    assert status(llm)["refusal"] is None
    assert digests_of(llm) == references["b"]


def test_weights_that_are_not_what_was_sent_must_not_be_used(llm: Any, references: Any) -> None:
    llm.collective_rpc(planted.corrupt_the_next_update)
    assert "the live weights differ from what was sent" in update(llm, weights("dense", "a").items())["error"]
    assert "differ from what was sent" in status(llm)["refusal"]
    assert update(llm, weights("dense", "b").items()) == {"ok": None}
    assert digests_of(llm) == references["b"]


def test_a_lora_adapter_is_refused_and_taken_off_the_wire(llm: Any) -> None:
    answer = update(llm, weights("dense", "b").items(), peft_config={"r": 8})
    assert "a LoRA adapter; allowed: whole weights" in answer["error"]
    assert update(llm, weights("dense", "b").items()) == {"ok": None}
