"""Candidates of models with recurrent layers."""

from __future__ import annotations

from dataclasses import replace

from measured_families import shape_of

from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.candidates import candidates
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.workload import Workload

H200 = find_gpu("h200")
NEMOTRON = shape_of("nvidia/Nemotron-H-8B-Base-8K")


def test_a_precision_that_vllm_cannot_keep_is_no_candidate() -> None:
    mamba = replace(NEMOTRON, layers=tuple(layer for layer in NEMOTRON.layers if not _attends(layer)))
    found = candidates(PlanRequest(mamba, H200, Workload(8, 1, 2048, 2048)))
    assert {c.setup.precision.name for c in found if c.memory} == {"bf16", "fp8_block"}
    assert all("MambaDType" in (c.reason or "") for c in found if not c.memory)


def test_prefix_caching_is_off_where_vllm_leaves_it_off() -> None:
    assert NEMOTRON.recurrent
    assert not EngineLimits.for_gpu(H200, NEMOTRON.recurrent).enable_prefix_caching
    assert EngineLimits.for_gpu(H200).enable_prefix_caching


def _attends(layer) -> bool:
    return layer.mixer is not None and any(cache.kind == "full" for cache in layer.mixer.caches())
