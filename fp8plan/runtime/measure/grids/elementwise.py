"""The small kernels that are measured: norm, activation, rotary embedding, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Mlp
from fp8plan.runtime.measure.kernels.sweep import Point

QUICK = ("Qwen/Qwen3-8B",)
MODELS = (
    *QUICK,
    "fp8plan/dense-50m",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-70B",
)
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
SAMPLED_ROWS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # at most MAX_SAMPLED_ROWS
MAX_SAMPLED_ROWS = 1024
VOCABULARIES = (32000, 128256, 151936)
RUNNERS = ("v1", "v2")  # vLLM 0.26: v2 runs dense models, v1 the others
MODES = ("graph", "eager")  # the GPU's time alone; launched from Python one by one, as the engine samples


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, in an order that can be cut anywhere: neighbours are unrelated."""
    if grid == "quick":
        every = [*_layers(QUICK, ROWS[1::2]), *_sampling(SAMPLED_ROWS[::5], VOCABULARIES[1:])]
    else:
        every = [*_layers(MODELS, ROWS), *_sampling(SAMPLED_ROWS, VOCABULARIES)]
    found = list({point.key: point for point in every}.values())
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def _layers(models: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[Point]:
    for name, m in product(models, rows):
        shape = ModelShape.from_hf(name)
        yield Point("norm", {"m": m, "hidden": shape.hidden_size})
        yield from (Point("activation", {"m": m, "inner": mlp.inner}) for mlp, _ in shape.parts_of(Mlp))
        yield from (Point("rotary", {"m": m} | heads_of(part)) for part, _ in shape.parts_of(Attention))


def heads_of(attention: Attention) -> dict[str, Any]:
    return {
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm != "none",
    }


def _sampling(rows: tuple[int, ...], vocabularies: tuple[int, ...]) -> Iterator[Point]:
    for runner, mode, m, vocabulary in product(RUNNERS, MODES, rows, vocabularies):
        yield Point(f"sampling.{runner}", {"m": m, "vocabulary": vocabulary, "mode": mode})
