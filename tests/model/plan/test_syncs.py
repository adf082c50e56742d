"""The sentences of a plan on its weight sync, for each program that sends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.model.cost.front import HTTP, INSIDE, OWN
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.risk.expected import LEAST_GAIN
from fp8plan.model.rl_step import SENDERS, Mode, StepTimes
from fp8plan.model.weight_changes import TopK
from fp8plan.model.workload import Workload

WORK = Workload(16, 8, Fixed(200), LogNormal(600, 0.9, 3000))


def test_the_weights_of_a_local_checkpoint_are_measured(tmp_path: Path) -> None:
    """A wide spread makes fewer changes, so a delta is smaller."""
    config = {"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 512, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))

    def delta() -> tuple[float, str]:
        made = predict(PlanRequest(str(tmp_path), "h200", WORK, precisions=["fp8_block"], learning_rate=1e-6))
        (reason,) = [reason for reason in made.plan.reasons if "weight sync over" in reason]
        return next(cost.bytes for cost in made.chosen.syncs if cost.mode == "delta"), reason

    without, assumed = delta()
    wide = np.random.default_rng(1).normal(0, 0.5, (512, 256)).astype(np.float32)
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight")
    save_file(dict.fromkeys(names, wide), tmp_path / "model.safetensors")
    measured, told = delta()
    assert measured < without / 3
    assert "a spread of 0.02, assumed" in assumed
    assert "a spread of 0.5, measured in the checkpoint" in told


@pytest.mark.parametrize(
    ("setting", "waits"), [("1e-5", "grows while a step changes more"), ("residual=1e-2", "of a long run")]
)
def test_a_step_takes_top_k_only_where_it_is_asked_for_and_the_plan_says_what_is_lost(setting: str, waits: str) -> None:
    arguments = {"precisions": ["bf16"], "learning_rate": 1e-6, "link": "1Gb/s"}
    arguments |= {"trainer": StepTimes(train_s=1, logprob_s=1)}
    exact = predict(PlanRequest("Qwen/Qwen3-8B", "h200", WORK, **arguments))
    sparse = predict(PlanRequest("Qwen/Qwen3-8B", "h200", WORK, top_k=TopK.parse(setting), **arguments))
    delta, top_k = exact.chosen.syncs[0], sparse.chosen.syncs[0]
    assert (delta.mode, top_k.mode) == (Mode.DELTA, Mode.TOP_K)
    assert exact.chosen.step_s - sparse.chosen.step_s == pytest.approx(delta.seconds - top_k.seconds)
    fastest, lost, *_ = (reason for reason in sparse.plan.reasons if "top-k" in reason.lower())
    assert "bf16 top-k of " in fastest
    assert "against a delta; a delta of " in fastest
    assert f"Top-k of {TopK.parse(setting)} is not lossless" in lost
    assert waits in lost
    assert not any("top-k" in reason.lower() for reason in exact.plan.reasons)


def test_top_k_that_nothing_uses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k is 20MB without a learning rate; give --learning-rate 1e-6"):
        predict(PlanRequest("Qwen/Qwen3-8B", "h200", WORK, top_k=TopK(nbytes=2e7)))
    with pytest.raises(ConfigError, match=r"top_k is 0.5, and verl's own sync sends no patches"):
        predict(PlanRequest("Qwen/Qwen3-8B", "h200", WORK, top_k=TopK(share=0.5), learning_rate=1e-6, target="verl"))
    with pytest.raises(ConfigError, match=r"top_k is '20MB'; allowed: TopK or None"):
        predict(PlanRequest("Qwen/Qwen3-8B", "h200", WORK, top_k="20MB", learning_rate=1e-6))  # type: ignore[arg-type]


def predicted(link: str, rate: float | None = None, target: str = "vllm", inside: str | None = None) -> Prediction:
    times = StepTimes(train_s=52, logprob_s=14)
    return predict(
        PlanRequest(
            "Qwen/Qwen3-8B", "h200", WORK, trainer=times, link=link, learning_rate=rate, target=target, inside=inside
        )
    )


def on_syncs(made: Prediction) -> list[str]:
    return [reason for reason in made.plan.reasons if "eight sync" in reason and "Mismatch" not in reason]


def test_a_slow_sync_is_said_with_its_share_and_what_to_type() -> None:
    (told,) = on_syncs(predicted("1Gb/s"))
    chosen = predicted("1Gb/s").chosen
    (dense,) = chosen.syncs
    assert dense.mode is Mode.DENSE_BF16
    assert f"takes {dense.seconds:.3g} s, {dense.seconds / chosen.step_s:.0%} of the RL step: dense BF16 of " in told
    assert "type your --learning-rate 1e-6 --optimizer adamw" in told


@pytest.mark.parametrize("link", ["100Mb/s", "1Gb/s", "10Gb/s", "100Gb/s", "400Gb/s", "99Tb/s"])
@pytest.mark.parametrize("rate", [None, 1e-6, 1.0])
def test_no_sync_that_counts_in_a_step_is_silent(link: str, rate: float | None) -> None:
    made = predicted(link, rate)
    share = made.chosen.syncs[0].seconds / made.chosen.step_s
    assert any("of the RL step: " in reason for reason in on_syncs(made)) == (share >= LEAST_GAIN)


def test_every_caller_of_an_engine_has_a_sender() -> None:
    assert set(SENDERS) == set(INSIDE)
    assert {caller for caller, sender in SENDERS.items() if sender is None} == {OWN, HTTP}


@pytest.mark.parametrize(("target", "inside"), [*(("vllm", caller) for caller in INSIDE), ("verl", OWN), ("trl", OWN)])
def test_a_plan_promises_only_syncs_that_its_sender_can_make(target: str, inside: str) -> None:
    made = predicted("1Gb/s", 1e-6, target, inside)
    modes = {cost.mode for candidate in made.tried for cost in candidate.syncs}
    own = target == "vllm" and SENDERS[inside] is None
    assert modes == ({Mode.DENSE_BF16, Mode.DENSE_FP8, Mode.DELTA} if own else {Mode.DENSE_BF16})
    text = " ".join(on_syncs(made))
    assert ("delta" in text, "dense FP8" in text) == (own, own)
    if not own:
        sender = "verl" if "verl" in (target, inside.removesuffix("-stock")) else "TRL"
        assert f"{sender}'s own sync sends all weights in BF16, at any learning rate" in text


@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_an_integration_sets_no_sync_of_its_own(trainer: str) -> None:
    """With SyncSettings it could send FP8 or deltas, and SENDERS would be wrong."""
    sources = (Path(fp8plan.__file__).parent / "integrations" / trainer).rglob("*.py")
    assert not [path.name for path in sources if "SyncSettings" in path.read_text()]
