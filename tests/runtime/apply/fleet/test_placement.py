"""Places for replicas: what is said where they cannot be had."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import cpu_plan

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.fleet.fleet import RolloutFleet
from fp8plan.runtime.apply.fleet.placement import await_places, bundle, refuse_too_few

CONFIG = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}'


def test_a_bundle_holds_all_gpus_of_a_replica() -> None:
    assert bundle(2, 1.0) == {"CPU": 1.0, "GPU": 2}
    assert bundle(0, 4.0) == {"CPU": 4.0}


def test_what_fits_is_let_through() -> None:
    refuse_too_few({"CPU": 1.0, "GPU": 2}, 4, {"CPU": 64.0, "GPU": 8.0})


@pytest.mark.parametrize(
    ("replicas", "have", "says"),
    [
        (4, {"CPU": 64.0, "GPU": 6.0}, r"4 replicas of 2 GPU\(s\) .* has 6 GPU\(s\) .*allowed: replicas=3, or add"),
        (1, {"CPU": 64.0, "GPU": 1.0}, r"allowed: a replica on fewer GPUs, or add hosts"),
        (2, {"CPU": 64.0}, r"has 0 GPU\(s\) and 64 CPU\(s\)"),
    ],
)
def test_too_few_gpus_are_named_with_what_fits(replicas: int, have: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_too_few({"CPU": 1.0, "GPU": 2}, replicas, have)


@pytest.mark.ray
def test_only_a_place_that_has_lost_its_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []  # append returns None: it did not get free
    group = SimpleNamespace(bundle_specs=[{"CPU": 2.0}] * 2, wait=waited.append)
    table = {"bundles_to_node_id": {0: "a host", 1: ""}}
    monkeypatch.setattr(import_module("ray.util.placement_group"), "placement_group_table", lambda group: table)
    monkeypatch.setattr(import_module("ray"), "available_resources", lambda: {"CPU": 1.0})
    await_places(group, [0], 0.5)
    assert waited == []
    with pytest.raises(ConfigError, match=r"1 replicas of 2 CPU\(s\) .* in 0.5 s; free now, on all hosts: 1 CPU"):
        await_places(group, [0, 1], 0.5)
    assert waited == [0.5]


@pytest.mark.vllm
def test_without_ray_one_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "config.json").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"^a fleet needs ray; type: pip install 'fp8plan\[ray\]'"):
        RolloutFleet.from_plan(cpu_plan("bf16"), str(tmp_path), replicas=2)


@pytest.mark.vllm
@pytest.mark.parametrize("replicas", [0, -1, 1.5, "two"])
def test_a_number_of_replicas_is_a_whole_one(replicas: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    with pytest.raises(ConfigError, match="replicas"):
        RolloutFleet.from_plan(cpu_plan("bf16"), str(tmp_path), replicas=replicas)
