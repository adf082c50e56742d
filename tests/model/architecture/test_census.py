"""The model types that vLLM 0.30 runs and transformers has a config class for: which are planned, and why others not.

Issue 38 counts 54 families' default configs, of which 12 were refused, and names those 12. `TWELVE` is what became of
them; the other 42 are rows of FAMILIES, which test_families reads one by one. The last test makes the whole list anew
from the two libraries: every type whose class for text (or for images or sound and text) is in vLLM's registry.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from family_configs import NEEDED, config_of, shape_of

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import REFUSED

# A default config -> "" if it is planned, or what its refusal names.
TWELVE = {
    "bamba": "no class for since 0.24",
    "deepseek_v2": "'num_experts_per_tok' is missing.*published deepseek_v2 configs have num_experts_per_tok 6: add it",
    "deepseek_v4": "hyper-connections and compressed attention",
    "dots1": "no class for since 0.24",
    "flex_olmo": "",
    "gemma4": "",
    "glm4_moe": "head_dim is absent.*published glm4_moe configs have head_dim 128: add it",
    "jamba": "state-space layers of Mamba 1",
    "longcat_flash": "",
    "minimax": "lightning attention and which vLLM has no class for since 0.24",
    "mistral4": "",
    "qwen2_5_vl": "",
}


def default(name: str) -> Any:
    """The config of transformers' class without any change."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES[name])()


@pytest.mark.parametrize("name", TWELVE)
def test_what_became_of_the_twelve(name: str) -> None:
    if not TWELVE[name]:
        assert shape_of(default(name), name).num_parameters > 10**9
        return
    with pytest.raises(ConfigError, match=TWELVE[name]):
        shape_of(default(name), name)


def test_at_least_46_of_54_are_planned() -> None:
    assert 54 - sum(map(bool, TWELVE.values())) >= 46


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe", "glm4v_moe", "qwen3_omni_moe"])
def test_with_the_fields_that_the_error_names_they_are_planned(name: str) -> None:
    assert NEEDED[name]
    assert shape_of(config_of(name, {}), name).num_parameters > 10**9


def registry() -> dict[str, dict[str, str]]:
    """The tables of vLLM's registry, read without an import of vLLM: table -> class -> what stands there."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vLLM")
    source = (Path(found.origin).parent / "model_executor/models/registry.py").read_text(encoding="utf-8")
    tables: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            items = zip(node.value.keys, node.value.values, strict=True)
            tables[node.targets[0].id] = {
                key.value: ast.unparse(value) for key, value in items if isinstance(key, ast.Constant)
            }
    return tables


def test_what_is_refused_as_dropped_was_dropped() -> None:
    """By 0.30 they have no class of their own. That they once had is why they are named."""
    tables = registry()
    classes = {"bamba": "BambaForCausalLM", "dots1": "Dots1ForCausalLM", "minimax": "MiniMaxForCausalLM"}
    dropped = {name for name, reason in REFUSED.items() if "no class for since 0.24" in reason}
    assert dropped == {*classes}
    for own in classes.values():
        assert tables["_PREVIOUSLY_SUPPORTED_MODELS"][own] == "'0.23.0'"
        assert own not in tables["_TEXT_GENERATION_MODELS"]


def test_every_type_that_vllm_runs_is_planned_or_named() -> None:
    transformers = pytest.importorskip("transformers")
    tables = registry()
    runs = {
        *tables["_TEXT_GENERATION_MODELS"],
        *tables["_MULTIMODAL_MODELS"],
        *tables["_TRANSFORMERS_SUPPORTED_MODELS"],
    }
    auto = transformers.models.auto.modeling_auto
    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    classes = [item for name in names for item in getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items()]
    types = {name for name, made in classes if {made} & runs or (not isinstance(made, str) and {*made} & runs)}
    refusals = {name: refusal(name) for name in sorted(types)}
    planned = {name for name, message in refusals.items() if not message}
    assert all("is not modelled" in message and "\n" not in message for message in refusals.values() if message)
    assert len(types) >= 150
    assert len(planned) >= 98, sorted(types - planned)


def refusal(name: str) -> str:
    """The error for a type's default config, with what its default lacks; "" if it is planned."""
    config = (config_of(name, {}) if name in NEEDED else default(name)).to_dict()
    try:
        ModelShape.from_config(config, name, f"{name}/config.json")
    except ConfigError as error:
        return str(error)
    return ""
