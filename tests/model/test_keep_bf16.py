"""Layers that stay in BF16 beside FP8 weights: memory, time and mismatch of an engine follow from its shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.kept import Kept, kept_layers
from fp8plan.model.architecture.parts import Layer, Mamba2
from fp8plan.model.plan.planner import plan
from fp8plan.model.profile.library import load_profile
from fp8plan.model.risk.expected import mismatch_risk
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.rollout import simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import read_records
from fp8plan.model.workload import Batch, Workload
from fp8plan.runtime.watch.guard.observation import EngineFacts
from fp8plan.runtime.watch.guard.rollout_record import rollout_fields

DENSE, EXPERTS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"


OUTPUTS: Kept = (0, 0, "o_proj")


def engine(model: str, first: int, last: int, precision: str = "fp8_block") -> EngineSetup:
    return keeping(model, (first, last), precision)


def keeping(model: str, kept: Kept, precision: str = "fp8_block") -> EngineSetup:
    return EngineSetup(model, "h200", precision, engine_version="0.33.0", remedies=Remedies(keep_bf16=kept))


def weights(setup: EngineSetup) -> int:
    return setup.shape.weight_bytes(setup.precision)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_each_kept_layer_adds_a_layer_s_share_of_what_fp8_saves(model: str) -> None:
    whole, bf16 = weights(engine(model, 0, 0)), weights(engine(model, 0, 0, "bf16"))
    layers = engine(model, 0, 0).shape.num_layers
    for ends in ((1, 0), (0, 1), (2, 3)):
        saved = (bf16 - whole) * (1 - sum(ends) / layers)
        assert weights(engine(model, *ends)) == pytest.approx(bf16 - saved, abs=1)
    assert weights(engine(model, 2, 3, "bf16")) == bf16


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_time_and_pool_move_from_those_of_fp8_towards_those_of_bf16(model: str) -> None:
    count = 256
    batch = Batch(np.full(count, 128), np.full(count, 256), np.arange(count))
    profile, _ = load_profile(engine(model, 0, 0).gpu, "0.33.0")

    def run(precision: str, kept: int) -> tuple[float, int]:
        timed = simulate(engine(model, kept, kept, precision).holding(512), batch, profile)
        return timed.rollout.makespan_s, timed.memory.kv_cache_tokens

    times, pools = zip(run("fp8_block", 0), run("fp8_block", 4), run("fp8_block", 12), run("bf16", 0), strict=True)
    assert list(times) == sorted(times)
    assert list(pools) == sorted(pools, reverse=True)
    assert len(set(times)) == len(set(pools)) == 4


@pytest.mark.parametrize(
    ("model", "outputs"),
    [(DENSE, 36), (EXPERTS, 48), ("deepseek-ai/DeepSeek-V2-Lite", 27), ("fp8plan/qwen3-next-16-layers", 4)],
)
def test_attention_outputs_of_all_layers_are_kept_and_nothing_else(model: str, outputs: int) -> None:
    """Of Qwen3-Next's layers a quarter has attention; the others' out_proj stays in FP8."""
    whole, kept = keeping(model, (0, 0)), keeping(model, OUTPUTS)
    added = [x for x in kept.shape.left_in_bf16() if x not in whole.shape.left_in_bf16()]
    assert {x.name for x in added} == {"o_proj"}
    assert sum(x.layers for x in added) == outputs
    precision = whole.precision
    more = sum(x.layers * (2 * x.elements - precision.linear_bytes(x.n, x.k, quantised=True)) for x in added)
    assert weights(kept) - weights(whole) == more
    assert keeping(model, OUTPUTS, "bf16").shape == keeping(model, (0, 0), "bf16").shape


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_attention_outputs_take_time_and_pool_and_add_up_with_layers(model: str) -> None:
    batch = Batch(np.full(256, 128), np.full(256, 256), np.arange(256))
    profile, _ = load_profile(engine(model, 0, 0).gpu, "0.33.0")
    every: list[Kept] = [(0, 0), OUTPUTS, (4, 4, "o_proj")]
    timed = [simulate(keeping(model, kept).holding(512), batch, profile) for kept in every]
    times, pools = zip(*((x.rollout.makespan_s, x.memory.kv_cache_tokens) for x in timed), strict=True)
    assert times[0] < times[1] < times[2]
    assert pools[0] > pools[1] > pools[2]
    both, layers = (weights(keeping(model, kept)) - weights(engine(model, 0, 0)) for kept in (every[2], (4, 4)))
    alone = weights(keeping(model, OUTPUTS)) - weights(engine(model, 0, 0))
    number = engine(model, 0, 0).shape.num_layers
    assert both == pytest.approx(layers + alone * (number - 8) / number)


def test_kept_layers_lower_the_mismatch_by_their_share_of_the_quantised_ones() -> None:
    risks = [
        mismatch_risk(engine(DENSE, *ends).shape, engine(DENSE, 0, 0).precision, [1024]).kl_k3
        for ends in ((0, 0), (3, 6), (9, 9))
    ]
    assert risks[0] > risks[1] > risks[2]
    assert (risks[0] - risks[1]) * 2 == pytest.approx(risks[0] - risks[2])


def test_a_record_of_an_engine_that_keeps_layers_is_predicted_so(tmp_path: Path) -> None:
    fields = {
        "model": DENSE, "gpu": "h200_sxm", "engine_version": "0.33.0", "precision": "fp8_block", "seconds": 1.0,
        "prompt_lengths": [64, 64], "response_lengths": [32, 32],
    }  # fmt: skip
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(fields | more) + "\n" for more in ({}, {"keep_bf16": [2, 1]})))
    whole, kept = read_records(file)
    assert whole.setup.shape.left_in_bf16() == ()
    assert kept.setup.remedies.keep_bf16 == (2, 1)
    assert sum(x.layers for x in kept.setup.shape.left_in_bf16() if x.name == "qkv_proj") == 3
    assert whole.group == kept.group  # speed-ups of both are over the group's bf16 record, which keeps no layers
    facts = EngineFacts(DENSE, "h200_sxm", "0.33.0", "fp8_block", kept.limits, remedies=Remedies(keep_bf16=(2, 1)))
    assert facts.setup.shape == kept.setup.shape
    assert rollout_fields(None, facts)["keep_bf16"] == [2, 1]
    outputs = replace(facts, remedies=Remedies(keep_bf16=(2, 1, "o_proj")))
    file.write_text(json.dumps(fields | json.loads(json.dumps(rollout_fields(None, outputs) | fields))) + "\n")
    (again,) = read_records(file)
    assert again.setup.shape == outputs.setup.shape == keeping(DENSE, (2, 1, "o_proj")).shape
    file.write_text(json.dumps(fields | {"keep_bf16": [2, 1, "qkv_proj"]}) + "\n")
    with pytest.raises(ConfigError, match=r"keep_bf16 is \[2, 1, 'qkv_proj'\]; allowed: two counts of layers"):
        _ = read_records(file)[0].setup


@pytest.mark.parametrize(
    ("model", "kept", "says"),
    [
        (DENSE, (18, 18), r"keep_bf16 is \(18, 18\), and the model has 36 layers; allowed: fewer in all, or bf16"),
        ("Qwen/Qwen3-8B-FP8", (1, 1), r"keep_bf16 is \(1, 1\), and the checkpoint holds its weights in FP8 \(fp8"),
        (DENSE, (1, -1), r"keep_bf16 is \(1, -1\); allowed: two counts of layers"),
        (DENSE, (1,), r"keep_bf16 is \(1,\); allowed: two counts of layers"),
        (DENSE, (1, 1, "out_proj"), r"keep_bf16 is \(1, 1, 'out_proj'\); allowed: two .* \(1, 1, \"o_proj\"\), typed"),
        ("Qwen/Qwen3-8B-FP8", OUTPUTS, r"keep_bf16 is \(0, 0, 'o_proj'\), and the checkpoint holds"),
    ],
)
def test_linears_that_cannot_be_kept_are_refused(model: str, kept: Kept, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _ = keeping(model, kept).shape
    with pytest.raises(ConfigError, match=says):
        mismatch_risk(
            ModelShape.from_hf(model), keeping(DENSE, (0, 0)).precision, [9], remedies=Remedies(keep_bf16=kept)
        )


@pytest.mark.parametrize(("gpu", "precisions"), [("h200", ["bf16", "fp8_kv"]), ("a100-80gb", None), ("cpu", None)])
def test_kept_layers_without_fp8_weights_are_refused(gpu: str, precisions: list[str] | None) -> None:
    """They change nothing there, unless the trainer has FP8 linears beside them."""
    work, model = Workload(4, 1, 16, 16), "fp8plan/dense-50m"
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(1, 1\), and no planned engine has FP8 weights; leave"):
        plan(model, gpu, work, precisions=precisions, remedies=Remedies(keep_bf16=(1, 1)))
    made = [
        plan(model, gpu, work, precisions=precisions, remedies=Remedies(trainer_precision="fp8_block", keep_bf16=kept))
        for kept in ((0, 0), (1, 1))
    ]
    assert made[0].choices[0].kl_k3 > made[1].choices[0].kl_k3


def test_attention_outputs_of_a_model_without_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_bf16 is \(0, 0, 'o_proj'\), and the model has no o_proj; leave"):
        kept_layers([Layer(Mamba2(8, 64, 1, 64, 4), None)], OUTPUTS, 512)
