"""The engine that planner, guard and launch share: what is vLLM's default for it."""

from __future__ import annotations

import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup, default_limits


@pytest.mark.parametrize(
    ("model", "caching"),
    [("Qwen/Qwen3-8B", True), ("Olmo-3-1025-7B", True), ("Qwen/Qwen3.5-9B", False), ("Nemotron-H-8B-Base-8K", False)],
)
def test_prefix_caching_is_off_by_default_where_layers_keep_a_state(model: str, caching: bool) -> None:
    assert EngineSetup(model, "h200").limits == default_limits(find_gpu("h200"), ModelShape.from_hf(model))
    assert EngineSetup(model, "h200").limits.enable_prefix_caching == caching


def test_limits_that_are_given_stay_and_an_unreadable_model_has_the_gpus(tmp_path) -> None:
    limits = EngineLimits(max_num_seqs=8)
    assert EngineSetup("Qwen/Qwen3.5-9B", "h200", limits=limits).limits == limits
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    assert EngineSetup(tmp_path, "h200").limits == EngineLimits.for_gpu(find_gpu("h200"))
