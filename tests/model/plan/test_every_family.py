"""Every family in transformers' default size, planned: whatever its layers are made of."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from family_configs import INSIDE, WRAPPED, config_of, shape_of

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture.families import FAMILIES, REFUSED, WRAPPERS
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.workload import Workload

H200 = find_gpu("h200")
WORKLOAD = Workload(8, 2, 200, 100)
# Planned without prefix caching only: with it, vLLM's look-up in groups of several block sizes is not modelled.
NOT_PLANNED = dict.fromkeys(("gemma4_text", "gemma4_unified_text", "gemma4", "mimo_v2_flash"), "block sizes [16, 32]")
MULTIMODAL = ("gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe")  # others have the layers of their text model, too
NAMES = [*(name for name in FAMILIES if name not in INSIDE), *WRAPPED, *MULTIMODAL]


def planned(name: str, prefix_caching: bool = True) -> Plan:
    """On the fewest GPUs that hold it in BF16."""
    shape = shape_of(config_of(name, {}), name)
    limits = EngineLimits.for_gpu(H200, shape.recurrent or not prefix_caching)
    for size in shape.allowed_tensor_parallel(16):
        with suppress(CapacityError):
            found = plan(shape, H200, WORKLOAD, limits=replace(limits, tensor_parallel_size=size))
            if found.choices[0].available:
                return found
    raise AssertionError(f"{name} fits no layout")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_PLANNED])
def test_a_default_config_is_planned(name: str) -> None:
    found = planned(name)
    assert found.choices[0].precision == "bf16"
    for choice in (x for x in found.choices if x.available):
        assert 0 < choice.makespan_low_s < choice.makespan_s < choice.makespan_high_s
        assert choice.kv_cache_tokens > 300
    assert all(x.reason for x in found.choices if not x.available)
    assert any("The text model alone" in x for x in found.reasons) == (name in WRAPPERS)


@pytest.mark.parametrize("name", NOT_PLANNED)
def test_what_is_planned_without_prefix_caching_only_says_so(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(name)
    assert NOT_PLANNED[name] in str(error.value)
    assert "enable_prefix_caching=False" in str(error.value)
    assert planned(name, prefix_caching=False).choices[0].makespan_s > 0


def test_most_families_are_planned() -> None:
    """At least 45 of those beyond Qwen 2 and 3, Llama, Mistral and Mixtral, the first that were."""
    first = {"qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral"}
    assert len({*FAMILIES} - first - {*NOT_PLANNED}) >= 45
    assert not {*NAMES} & {*REFUSED}
