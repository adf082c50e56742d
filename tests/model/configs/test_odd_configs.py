"""Odd values in every known config: a sane shape, or one line that names the field. Never another exception."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from family_configs import config_of
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.families import FAMILIES
from fp8plan.model.configs import bundled_configs
from fp8plan.model.precision import BF16, FP8_BLOCK

NAN, INF = math.nan, math.inf
# Fields that readers look for and many configs leave out.
OPTIONAL = (
    "attention_bias", "decoder_sparse_step", "full_attn_idxs", "head_dim", "hidden_act", "hybrid_layer_pattern",
    "hybrid_override_pattern", "index_topk_freq", "index_topk_pattern", "indexer_types", "layer_types",
    "layers_block_type", "linear_attn_config", "max_window_layers", "mlp_layer_types", "mlp_only_layers", "model_type",
    "moe_layer_freq", "moe_layers", "no_rope_layers", "num_kv_shared_layers", "per_layer_config", "rope_parameters",
    "rope_scaling", "seq_length", "sliding_window", "sliding_window_pattern", "text_config", "tie_word_embeddings",
    "use_sliding_window", "v_head_dim",
)  # fmt: skip


def nested(kind: type, depth: int) -> Any:
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"text_config": value}
    return value


SINGLE = [
    None, True, False, -1, 0, 1, 2, 3, 5, 7, 1000, 2**31, 10**12, 10**13, 10**400, 10**5000, 0.0, 0.5, 1.5, -0.5, 1e300,
    NAN, INF, -INF, "", "0", "1", "true", "auto", "LLLG", "M*-E", "full_attention", "a\nb", "x" * 5000,
]  # fmt: skip
ODD = st.one_of(
    st.sampled_from(SINGLE),
    st.lists(st.sampled_from(SINGLE), max_size=4),
    st.builds(lambda x, n: [x] * n, st.sampled_from(SINGLE), st.sampled_from([1, 24, 28, 32, 36, 48, 61, 64, 10_001])),
    st.dictionaries(st.sampled_from(["0", "99", "-1", "factor", "rope_type", "head_dim"]), st.sampled_from(SINGLE)),
    st.sampled_from([nested(list, 2_000), nested(dict, 2_000), {"full_attention": {"rope_type": "linear"}}]),
)


@cache
def config(name: str) -> dict[str, Any]:
    return bundled_configs()[name] if name in bundled_configs() else dict(config_of(name, {}).to_dict())


def changed(whole: Mapping[str, Any], changes: Mapping[str, Any], inner: bool) -> dict[str, Any]:
    """The config with other fields, of its text model if it has one and `inner` says so."""
    text = whole.get("text_config")
    if inner and isinstance(text, Mapping):
        return {**whole, "text_config": {**text, **changes}}
    return {**whole, **changes}


def numbers(value: Any) -> Iterator[float]:
    """Yield every number in a shape."""
    if is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name))
    elif isinstance(value, tuple):
        for x in value:
            yield from numbers(x)
    elif isinstance(value, int | float):
        yield value


def assert_sane(shape: ModelShape) -> None:
    assert all(0 <= x <= 10**25 for x in numbers(shape))  # a product of two sizes that are each allowed
    assert min(shape.hidden_size, shape.vocab_size, shape.num_layers, shape.context.longest("0.30.0")[0]) >= 1
    assert shape.num_parameters > 0
    assert all(linear.n > 0 and linear.k > 0 for linear in shape.linears())
    for cache_ in shape.caches():
        assert cache_.elements_per_token > 0 or cache_.state_bytes >= 0
    assert 1 in shape.allowed_tensor_parallel(8)
    assert min(shape.weight_bytes(BF16), shape.weight_bytes(FP8_BLOCK)) > 0


def assert_read_or_named(whole: dict[str, Any]) -> None:
    try:
        shape = ModelShape.from_config(whole, "test", "test/config.json")
    except ConfigError as error:
        line = str(error)
        assert "\n" not in line
        assert len(line) < 2500
        assert line.startswith("test/config.json: ")
        assert any(x in line for x in ("field '", "is not modelled", "already quantised", "quantization"))
    else:
        assert_sane(shape)


@st.composite
def odd_configs(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Any]:
    whole = config(draw(st.sampled_from(names)))
    text = whole.get("text_config")
    keys = st.sampled_from(sorted({*whole, *(text if isinstance(text, Mapping) else ()), *OPTIONAL}))
    return changed(whole, draw(st.dictionaries(keys, ODD, min_size=1, max_size=2)), draw(st.booleans()))


@given(odd_configs(tuple(bundled_configs())))
def test_an_odd_value_in_a_bundled_config(whole: dict[str, Any]) -> None:
    assert_read_or_named(whole)


@given(odd_configs(tuple(FAMILIES)))
def test_an_odd_value_in_a_config_of_any_family(whole: dict[str, Any]) -> None:
    assert_read_or_named(whole)
