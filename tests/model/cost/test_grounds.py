"""The grounds of a predicted time: measured, imported, extrapolated and theory add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.base import StepBatch, zero
from fp8plan.model.cost.grounds import GROUNDS, UNSEEN
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.anchor import Anchor
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.model.profile.library import datasheet_profile, load_profile
from fp8plan.model.profile.profile import GPU_PACE, HOST_PACE, Profile, layout_pace, precision_pace

H200 = find_gpu("h200")
DENSE, EXPERTS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
MEASURED, _ = load_profile(H200)
SHEET = datasheet_profile(H200)


def decoding(requests: list[int], context: int = 1000) -> StepBatch:
    """Steps that decode so many requests each."""
    count, none = np.array(requests, dtype=np.int64), np.zeros(len(requests), dtype=np.int64)
    return StepBatch(count, count * context, none, none, none, none, count)


def grounds(
    batch: StepBatch,
    profile: Profile = MEASURED,
    name: str = DENSE,
    preset: str = "bf16",
    gpu: str = "h200",
    **more: Any,
) -> dict[str, dict[str, Any]]:
    model = StepModel(ModelShape.from_hf(name), find_gpu(gpu), find_precision(preset), EngineLimits(**more), profile)
    weights = np.arange(1.0, 1 + batch.decode_requests.size)
    steps = model.timed(batch)
    seconds = {name: part * weights for name, part in steps.breakdown().items()}
    return steps.rests_on(batch, seconds, start_cost(8, 8000, profile), zero(weights))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([DENSE, EXPERTS, "google/gemma-3-12b-it"]),
    st.sampled_from([1, 2]),
    st.sampled_from(["h200", "h100"]),
)
def test_the_shares_of_all_kernels_add_up_to_the_whole(
    requests: list[int], preset: str, name: str, size: int, gpu: str
) -> None:
    profile = load_profile(find_gpu(gpu))[0]
    found = grounds(decoding(requests), profile, name, preset, gpu, tensor_parallel_size=size)
    of_kernels = [(ground, x) for part in found["kernels"].values() for ground, x in part.items()]
    assert sum(x for _, x in of_kernels) == pytest.approx(1)
    assert all(x >= 0 for _, x in of_kernels)
    for ground, share in found["shares"].items():
        assert ground in GROUNDS
        assert share == pytest.approx(sum(x for other, x in of_kernels if other == ground))


def test_a_datasheet_is_theory_alone_and_a_measured_range_is_not() -> None:
    assert grounds(decoding([8]), SHEET)["shares"] == pytest.approx({"theory": 1})
    assert grounds(decoding([8]))["shares"] == pytest.approx({"measured": 1})
    relabelled = replace(SHEET, kind="calibrated", hull={"gemm": {"m": (1, 512)}})
    assert grounds(decoding([8]), relabelled)["shares"] == pytest.approx({"theory": 1})  # its notes say so


def test_only_the_steps_beyond_the_range_are_extrapolated_and_only_in_the_kernel_that_it_is_of() -> None:
    narrow = replace(MEASURED, hull={"attention_decode.bf16": {"decode_requests": (1.0, 64.0)}})
    first = grounds(decoding([32, 64]), narrow)
    assert "extrapolated" not in first["shares"]
    both = grounds(decoding([32, 65]), narrow)
    alone = grounds(decoding([65]), narrow)["kernels"]
    assert set(both["kernels"]["attention"]) == {"measured", "extrapolated"}
    assert set(alone["attention"]) == {"extrapolated"}
    assert all("extrapolated" not in part for name, part in alone.items() if name != "attention")
    everything = replace(MEASURED, hull={"engine steps": {"decode_requests": (1.0, 64.0)}})
    of_all = grounds(decoding([65]), everything)["kernels"]
    assert all(set(part) == {"extrapolated"} for name, part in of_all.items() if name != "host")  # which also starts


def test_layers_count_by_their_weights() -> None:
    """Qwen3-8B's widest layer, gate_up_proj with 24,576 columns, has half the weights of a layer."""
    narrow = replace(MEASURED, hull={"gemm.bf16": {"n": (1.0, 20000.0)}})
    linears = ModelShape.from_hf(DENSE).linears(1)
    sizes = {x.name: x.n * x.k for x in linears if x.name != "lm_head"}
    gemm = grounds(decoding([8]), narrow)["kernels"]["gemm"]
    assert gemm["extrapolated"] / sum(gemm.values()) == pytest.approx(sizes["gate_up_proj"] / sum(sizes.values()))


def test_an_import_knows_its_kernels_and_takes_the_rest_from_the_datasheet() -> None:
    card = find_gpu("h100")
    imported = load_profile(card, "0.24.0")[0]
    found = grounds(decoding([8]), imported, gpu="h100")["kernels"]
    assert set(found["gemm"]) == {"imported"}
    assert set(found["sampling"]) == set(found["host"]) == {"theory"}
    model = StepModel(ModelShape.from_hf(DENSE), card, find_precision("bf16"), EngineLimits(), imported)
    assert model.outside_hull(decoding([8])) == []


def test_a_kernel_that_the_datasheet_lends_is_theory() -> None:
    card = find_gpu("a100")
    found = grounds(decoding([64], 8000), load_profile(card)[0], preset="fp8_kv", gpu="a100")
    assert set(found["kernels"]["attention"]) == {"theory"}


def test_an_unmeasured_layout_leaves_all_reduces_and_experts_that_are_shared_out() -> None:
    limits = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    found = grounds(decoding([64]), name=EXPERTS, **limits)["kernels"]
    assert set(found["moe"]) == {"extrapolated"}
    assert set(found["collective"]) <= set(UNSEEN)
    assert set(found["attention"]) == {"measured"}
    sliced = grounds(decoding([64]), name=EXPERTS, tensor_parallel_size=2)["kernels"]
    assert set(sliced["moe"]) == {"measured"}


@pytest.mark.parametrize(("gpu", "size"), [("h200", 1), ("h200", 2), ("h100", 1), ("a100", 2), ("b300", 1)])
def test_observed_rollouts_do_not_change_the_grounds(gpu: str, size: int) -> None:
    """A layout's pace covers its all-reduces and its host as a whole, but nobody measured them."""
    profile = load_profile(find_gpu(gpu))[0]

    def known(corrected: Profile) -> dict[str, dict[str, Any]]:
        return grounds(decoding([8, 64]), corrected, gpu=gpu, tensor_parallel_size=size)

    before = known(profile)
    paces = dict.fromkeys((GPU_PACE, HOST_PACE, precision_pace("bf16"), layout_pace(size)), 0.3)
    paced = known(Anchor(paces, (), ()).applied(profile))
    assert paced["shares"] == pytest.approx(before["shares"])
    assert paced["kernels"].keys() == before["kernels"].keys()
    for name, part in paced["kernels"].items():
        assert part == pytest.approx(before["kernels"][name])
    every = known(Anchor(paces | dict.fromkeys(profile.log_covariance, -0.1), (), ()).applied(profile))
    assert {name: set(part) for name, part in every["kernels"].items()} == {
        name: set(part) for name, part in before["kernels"].items()
    }


def test_an_assumed_network_is_theory() -> None:
    found = grounds(decoding([64]), load_profile(find_gpu("h100"))[0], gpu="h100", tensor_parallel_size=16)
    assert found["kernels"]["collective"]["theory"] > 0
