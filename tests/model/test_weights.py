"""Samples of a checkpoint's weights: what the files hold, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8plan.model.weights import EMBEDDING, KEPT, LAYERS, LM_HEAD, SIDE, normal, sampled

SPREADS = {"model.embed_tokens.weight": 0.1, "model.layers.0.mlp.up_proj.weight": 0.03, "lm_head.weight": 0.2}


def checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, **own: torch.Tensor) -> Path:
    chance = torch.Generator().manual_seed(1)
    tensors = {name: (spread * torch.randn(512, 384, generator=chance)).to(dtype) for name, spread in SPREADS.items()}
    save_file(tensors | {"model.norm.weight": torch.ones(384), **own}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_kind_has_its_own_spread(tmp_path: Path, dtype: torch.dtype) -> None:
    samples = sampled(checkpoint(tmp_path, dtype))
    spreads = {kind: weights.spread for kind, weights in samples.items()}
    assert spreads == pytest.approx({EMBEDDING: 0.1, LAYERS: 0.03, LM_HEAD: 0.2}, rel=0.03)
    assert all(weights.measured for weights in samples.values())


def test_a_block_has_the_values_and_the_largest_of_the_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE).bfloat16()
    checkpoint(tmp_path, **{"model.layers.1.mlp.down_proj.weight": tensor})
    (weights,) = sampled(tmp_path, {LAYERS: "down_proj"}).values()
    assert np.array_equal(weights.values[0], tensor.float().numpy().ravel()[::KEPT])
    assert set(weights.largest) == {float(tensor.max())}


def test_a_small_matrix_and_experts_in_one_tensor_are_sampled(tmp_path: Path) -> None:
    own = {
        "model.layers.0.mlp.gate.weight": torch.full((4, 32), 0.5),
        "model.layers.0.mlp.experts.gate_up_proj": torch.full((8, 64, 200), -0.25),
    }
    checkpoint(tmp_path, **own)
    samples = sampled(tmp_path, {"router": "gate.weight", "experts": "experts"})
    assert {kind: weights.spread for kind, weights in samples.items()} == {"router": 0.5, "experts": 0.25}


def test_a_tied_head_has_the_weights_of_the_embedding(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.full((256, 128), 0.5)}, tmp_path / "model.safetensors")
    samples = sampled(tmp_path)
    assert samples[LM_HEAD] is samples[EMBEDDING]
    assert LAYERS not in samples


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (100).to_bytes(8, "little")
        + b'{"model.layers.0.a.weight": {"dtype": "BF16", "shape": [128, 128], "data_offsets": [0, 32768]}}'.ljust(60),
    ],
    ids=["empty", "pointer", "no tensor", "cut off"],
)
def test_a_file_that_is_no_checkpoint_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert sampled(tmp_path) == {}


def test_zeros_fp8_and_what_is_not_finite_are_left_out(tmp_path: Path) -> None:
    own = {
        "model.layers.0.a.weight": torch.zeros(128, 128),
        "model.layers.0.b.weight": torch.full((128, 128), float("nan")),
        "model.layers.0.c.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
    }
    save_file(own, tmp_path / "model.safetensors")
    assert sampled(tmp_path) == {}


def test_normal_weights_have_the_spread_and_the_largest_of_a_block() -> None:
    weights = normal(0.02)
    assert weights.spread == pytest.approx(0.02, rel=0.01)
    chance = np.random.default_rng(1)
    seen = np.median([np.abs(0.02 * chance.standard_normal(SIDE**2)).max() for _ in range(99)])
    assert float(weights.largest[0]) == pytest.approx(seen, rel=0.03)
    assert not weights.measured


def test_layers_of_an_fp8_checkpoint_are_not_judged_by_their_routers(tmp_path: Path) -> None:
    own = {
        "model.layers.0.mlp.gate.weight": torch.full((4, 32), 0.5),
        "model.layers.0.mlp.down_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn),
    }
    assert LAYERS not in sampled(checkpoint(tmp_path, **own))
