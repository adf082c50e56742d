"""Manifests: what a source will send, and everything that is wrong with it before a byte is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from block_weights import quantize
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.checkpoint import checkpoint_manifest
from fp8plan.runtime.apply.weight_sync.manifest import (
    FORMATS,
    SCALE_SUFFIX,
    Entry,
    as_held,
    dtype_named,
    entry_of,
    held_manifest,
    manifest_of,
    pairs_of,
    quantised_manifest,
    read_manifest,
    refuse,
)

torch = pytest.importorskip("torch")

TENSORS = {
    "model.embed.weight": torch.zeros(40, 8, dtype=torch.bfloat16),
    "model.layers.0.q.weight": torch.zeros(300, 130, dtype=torch.bfloat16),
    "model.layers.0.experts": torch.zeros(3, 256, 128, dtype=torch.bfloat16),
    "model.norm": torch.zeros(8, dtype=torch.bfloat16),
}
KNOWN = manifest_of(TENSORS) or ()
QUANTISED = ("model.layers.0.q.weight", "model.layers.0.experts")


class Meta(NamedTuple):
    name: str
    dtype: Any
    shape: tuple[int, ...]


class Source:
    def metadata(self) -> list[Meta]:
        return [Meta(name, tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()]


class NewSource:
    """A WeightSource of vLLM 0.33 (vllm/distributed/weight_transfer/base.py): it is no iterable any more."""

    @cached_property
    def metadata(self) -> list[Meta]:
        return Source().metadata()

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        yield from TENSORS.items()


def test_an_entry_knows_its_size() -> None:
    entry = entry_of("a", torch.zeros(3, 4, 5, dtype=torch.float16))
    assert entry == ("a", "float16", (3, 4, 5))
    assert (entry.numel, Entry("b", "bfloat16", ()).numel) == (60, 1)


def test_every_source_but_an_iterator_says_what_it_will_send() -> None:
    assert manifest_of(TENSORS) == manifest_of(list(TENSORS.items())) == manifest_of(Source()) == KNOWN
    assert manifest_of(NewSource()) == KNOWN
    assert manifest_of(iter(TENSORS.items())) is None
    assert [entry.name for entry in KNOWN] == list(TENSORS)


@pytest.mark.parametrize("items", [None, 3, [("a", "bfloat16", (2,))]])
def test_a_source_whose_metadata_are_none_is_refused(items: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"metadata\(\) of SimpleNamespace.*allowed: items with name, dtype and shape"
    ):
        manifest_of(SimpleNamespace(metadata=lambda: items))


def test_a_parameter_without_a_shape_is_refused() -> None:
    lazy = torch.nn.parameter.UninitializedParameter()
    with pytest.raises(ConfigError, match="a has no values yet, nor a shape; allowed"):
        manifest_of({"a": lazy})


def test_pairs_of_a_source_are_its_own() -> None:
    pairs = iter(TENSORS.items())
    assert pairs_of(pairs) is pairs  # not read
    assert list(pairs_of(TENSORS)) == list(pairs_of(NewSource())) == list(TENSORS.items())


def test_a_written_manifest_is_read_with_either_name_of_a_dtype() -> None:
    written = [
        [name, f"torch.{dtype}" if number % 2 else dtype, list(shape)]
        for number, (name, dtype, shape) in enumerate(KNOWN)
    ]
    assert read_manifest(written) == KNOWN
    assert read_manifest([(name, torch.bfloat16, shape) for name, _, shape in KNOWN]) == KNOWN
    assert read_manifest(iter(written)) == KNOWN


@pytest.mark.parametrize("wrong", [["a"], [("a", "bfloat16")], [("a", "bfloat16", 4)], [("a", "bfloat16", ["x"])], 3])
def test_what_is_no_manifest_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"not a list of \(name, dtype, shape\); allowed: e\.g\."):
        read_manifest(wrong)


def test_dtypes_are_torchs() -> None:
    assert dtype_named("float8_e4m3fn") is torch.float8_e4m3fn
    for wrong in ("bf16", "zeros", ""):
        with pytest.raises(ConfigError, match=f"'{wrong}' is no dtype of torch; allowed"):
            dtype_named(wrong)


def test_a_checkpoint_is_read_from_its_headers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    assert checkpoint_manifest(tmp_path) is None
    names = list(TENSORS)
    save_file({name: TENSORS[name] for name in names[:2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: TENSORS[name] for name in names[2:]}, tmp_path / "model-00002-of-00002.safetensors")
    found = checkpoint_manifest(tmp_path)
    assert found is not None
    assert sorted(found) == sorted(KNOWN)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(names[:2], "model-00001-of-00002.safetensors")}
    index["weight_map"] |= dict.fromkeys(names[2:], "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))  # as Mistral's, which vLLM goes by
    assert checkpoint_manifest(tmp_path) == found
    for broken in ({}, [], {"weight_map": {"a": 1}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"index\.json has no weight_map; allowed: name of a tensor -> file"):
            checkpoint_manifest(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-3.safetensors"}}')
    with pytest.raises(ConfigError, match=r"index\.json names model-3\.safetensors, which is not there"):
        checkpoint_manifest(tmp_path)


# --- what is refused ------------------------------------------------------------------------------------------------


def changed(**more: Any) -> tuple[Entry, ...]:
    """The manifest with another dtype or shape of its second entry."""
    return (KNOWN[0], KNOWN[1]._replace(**more), *KNOWN[2:])


WRONG: dict[str, tuple[tuple[Entry, ...], str]] = {
    "twice": (
        (*KNOWN, KNOWN[1], KNOWN[3]),
        "sent twice: model.layers.0.q.weight, model.norm; allowed: every tensor once",
    ),
    "empty": ((), "the manifest is empty"),
    "fp8": (changed(dtype="float8_e4m3fn"), "model.layers.0.q.weight is float8_e4m3fn, and this engine takes BF16"),
    "float16": (
        changed(dtype="float16"),
        r"model.layers.0.q.weight is float16; allowed: bfloat16 .*to\(torch.bfloat16\)",
    ),
    "unknown": (changed(name="other"), "unknown: other; allowed: .* as model.layers.0.q.weight"),
    "another shape": (
        changed(shape=(300, 129)),
        r"model.layers.0.q.weight has shape \[300, 129\]; allowed: \[300, 130\]",
    ),
    "another rank": (changed(shape=(39000,)), r"has shape \[39000\]; allowed: \[300, 130\], as in the checkpoint"),
    "missing": (KNOWN[:1] + KNOWN[2:], "missing: model.layers.0.q.weight; send every tensor of the model"),
    "all but one missing": (
        KNOWN[3:],
        "missing: model.embed.weight, model.layers.0.experts, model.layers.0.q.weight; ",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_named(fault: str) -> None:
    manifest, says = WRONG[fault]
    with pytest.raises(ConfigError, match=says):
        refuse(manifest, KNOWN, "bf16")


def test_without_a_checkpoint_only_what_needs_none_is_refused() -> None:
    for fault, (manifest, says) in WRONG.items():
        if fault in ("twice", "empty", "fp8", "float16"):
            with pytest.raises(ConfigError, match=says):
                refuse(manifest, None, "bf16")
        else:
            refuse(manifest, None, "bf16")


def test_what_vllm_may_leave_out_is_left_to_its_dry_run() -> None:
    head = Entry("lm_head.weight", "bfloat16", (300, 128))
    refuse((*KNOWN, head), KNOWN, "bf16")  # tied: in a state_dict, and in no checkpoint
    refuse(KNOWN, (*KNOWN, head, Entry("mtp.fc.weight", "bfloat16", (1, 1))), "bf16")
    with pytest.raises(ConfigError, match=r"unknown: model\.lm_head_norm"):
        refuse((*KNOWN, head._replace(name="model.lm_head_norm")), KNOWN, "bf16")


def test_float32_is_taken_and_rounded_where_an_engine_holds_bf16() -> None:
    wide, rounded = {"model.norm"}, list[str]()
    sent = {name: tensor.float() + 1 / 3 for name, tensor in TENSORS.items()} | {"model.bias": TENSORS["model.norm"]}
    refuse(manifest_of(sent) or (), (*KNOWN, Entry("model.bias", "bfloat16", (8,))), "bf16")
    held = dict(as_held(sent.items(), wide, rounded))
    assert held_manifest(manifest_of(sent) or (), (), wide) == manifest_of(held)
    assert rounded == [name for name in TENSORS if name not in wide]
    assert torch.equal(held["model.norm"], sent["model.norm"])
    assert all(torch.equal(held[name], sent[name].bfloat16()) for name in rounded)
    bf16 = {"model.norm": TENSORS["model.norm"], f"a{SCALE_SUFFIX}": torch.ones(1, 1)}
    assert dict(as_held(bf16.items(), wide, rounded))["model.norm"].dtype == torch.float32  # exact
    assert len(rounded) == 3


def test_the_checkpoints_own_dtype_is_taken() -> None:
    bias = Entry("model.layers.0.mlp.gate.e_score_correction_bias", "float32", (8,))
    refuse((*KNOWN, bias), (*KNOWN, bias), "bf16")
    with pytest.raises(ConfigError, match="e_score_correction_bias is float16; allowed"):
        refuse((*KNOWN, bias._replace(dtype="float16")), (*KNOWN, bias), "bf16")


def test_many_names_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"unknown: n0, n1, n2, n3 and 6 more;"):
        refuse(tuple(Entry(f"n{i}", "bfloat16", (1,)) for i in range(10)), KNOWN, "bf16")


@given(order=st.permutations(KNOWN))
def test_any_order_is_taken(order: list[Entry]) -> None:
    refuse(tuple(order), KNOWN, "bf16")
    assert FORMATS == ("bf16", "fp8_block")


# --- FP8 and scales -------------------------------------------------------------------------------------------------


def test_the_manifest_in_fp8_is_what_quantising_makes() -> None:
    made: dict[str, Any] = {}
    for name, tensor in TENSORS.items():
        if name in QUANTISED:
            made[name], made[name + SCALE_SUFFIX] = quantize(tensor)
        else:
            made[name] = tensor
    assert quantised_manifest(KNOWN, QUANTISED) == manifest_of(made)
    refuse(manifest_of(made) or (), quantised_manifest(KNOWN, QUANTISED), "fp8_block")
    with pytest.raises(ConfigError, match="this engine takes BF16 and quantises itself"):
        refuse(manifest_of(made) or (), KNOWN, "bf16")


@pytest.mark.parametrize("number", range(4))
def test_in_fp8_a_tensor_of_the_other_dtype_is_named(number: int) -> None:
    expected = quantised_manifest(KNOWN, QUANTISED)
    names = ["model.layers.0.q.weight", "model.layers.0.q.weight_scale_inv", "model.norm", "model.layers.0.experts"]
    others = {"float8_e4m3fn": "bfloat16", "float32": "bfloat16", "bfloat16": "float8_e4m3fn"}
    sent = tuple(x._replace(dtype=others[x.dtype]) if x.name == names[number] else x for x in expected)
    with pytest.raises(ConfigError, match=f"{names[number]} is (bfloat16|float8_e4m3fn)"):
        refuse(sent, expected, "fp8_block")
