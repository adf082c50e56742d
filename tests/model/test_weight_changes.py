"""Shares of values that a step changes, as laws and against rounding itself; bytes of patches against the encoder's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from block_weights import quantize

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.jsonl import rows
from fp8plan.model.weight_changes import (
    BETA_1,
    KL_OF_RESIDUAL,
    SIGNAL,
    Changed,
    Step,
    TopK,
    changed,
    one_step,
    patch_bytes,
)
from fp8plan.model.weights import normal
from fp8plan.runtime.apply.weight_sync.delta.base import in_format
from fp8plan.runtime.apply.weight_sync.delta.patch import changes, packed
from fp8plan.runtime.apply.weight_sync.delta.tiles import bits
from fp8plan.runtime.apply.weight_sync.delta.top_k import Residual, thinned

RATES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0)


def shares(step: float, spread: float = 0.02) -> Changed:
    """The shares of a late step."""
    return changed(Step(step), normal(spread))


@pytest.mark.parametrize("what", Changed._fields)
def test_shares_rise_with_the_step_from_none_to_all(what: str) -> None:
    rising = [getattr(shares(step), what) for step in RATES]
    assert rising == sorted(rising)
    assert rising[0] == 0
    assert rising[-1] == 1


@pytest.mark.parametrize("step", RATES[1:-2])
def test_codes_change_less_often_than_bf16_values_and_wide_weights_less_than_narrow_ones(step: float) -> None:
    assert 0 < shares(step).codes < shares(step).bf16
    assert shares(step, 0.2).bf16 < shares(step).bf16
    assert shares(step, 0.2).codes < shares(step).codes


def rounded(before: torch.Tensor, after: torch.Tensor) -> Changed:
    """The shares of FP32 weights that differ once they are rounded."""
    old, new = before.bfloat16(), after.bfloat16()
    (codes, scales), (new_codes, new_scales) = quantize(old), quantize(new)
    moved, scaled = codes.view(torch.uint8) != new_codes.view(torch.uint8), scales != new_scales
    blocks = scaled.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return Changed(*(float(mask.double().mean()) for mask in (old != new, moved, scaled, moved & blocks)))


@pytest.mark.parametrize("step", [2e-6, 2e-5, 2e-4])
def test_shares_are_those_of_rounding_weights(step: float) -> None:
    """FP32 weights move by the step, up or down, and are rounded before and after."""
    chance = torch.Generator().manual_seed(1)
    weights = 0.02 * torch.randn(1024, 2048, generator=chance)
    signs = torch.randint(0, 2, weights.shape, generator=chance) * 2 - 1
    seen = rounded(weights, weights + step * signs)
    assert shares(step).bf16 == pytest.approx(seen.bf16, rel=0.05)
    assert shares(step).codes == pytest.approx(seen.codes, rel=0.15)
    if step > 1e-4:  # 128 scales
        assert shares(step).scales == pytest.approx(seen.scales, rel=0.35)
        assert shares(step).rescaled == pytest.approx(seen.rescaled, rel=0.35)


@pytest.mark.parametrize(("residual", "saves"), [(1e-5, False), (1e-2, True)])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_residual_sends_in_a_long_run_what_the_sparse_sync_does(fp8: bool, residual: float, saves: bool) -> None:
    """AdamW with the modelled share of signal, from weights anywhere between two rounding points."""
    rate, steps, names = 1e-5, 160, ("w",) if fp8 else ()
    chance = torch.Generator().manual_seed(7)
    weights = 0.02 * torch.randn(256, 256, generator=chance)
    signal = SIGNAL**0.5 * torch.randn(weights.shape, generator=chance)
    mean, held, sent = torch.zeros_like(weights), in_format({"w": weights.bfloat16()}, names)["w"], []
    for _ in range(steps):
        noise = (1 - SIGNAL) ** 0.5 * torch.randn(weights.shape, generator=chance)
        mean = BETA_1 * mean + (1 - BETA_1) * (signal + noise)
        weights = weights - rate * mean
        exact = weights.bfloat16()
        new = in_format({"w": exact}, names)["w"]
        thin = thinned(new, held, exact, TopK(residual=residual), Residual())
        sent.append(float((bits(thin) != bits(held["w"])).double().mean()))
        held = new | {"w": thin}
    late = float(np.mean(sent[-40:]))
    made, every = (changed(one_step("adamw").times(rate), normal(), left) for left in (residual, 0.0))
    assert 0.5 < (made.codes / late if fp8 else made.bf16 / late) < 2
    assert (late < (every.codes if fp8 else every.bf16) / 2) == saves


def test_a_limited_sync_sends_no_more_than_its_share_and_blocks_with_new_scales() -> None:
    every = changed(Step(1e-5), normal())
    for share in (1e-6, 1e-3, 0.5):
        limited = every.limited(share)
        assert limited.bf16 == min(every.bf16, share)
        assert limited.codes == min(every.codes, share + every.rescaled)
        assert (limited.scales, limited.rescaled) == (every.scales, every.rescaled)


SETTINGS = {
    "1e-4": TopK(share=1e-4),
    "0.5": TopK(share=0.5),
    "20MB": TopK(nbytes=2e7),
    "1.5 GB": TopK(nbytes=1.5e9),
    "residual=1e-3": TopK(residual=1e-3),
    "residual=2E-05": TopK(residual=2e-5),
}
OTHERS = ("", "x", "-1", "1e", "1.2.3", ".", "20mb", "share=1e-4", "residual=20MB", "residual=", "1e999")


@pytest.mark.parametrize("text", SETTINGS)
def test_settings_of_top_k_are_read_and_written(text: str) -> None:
    made = TopK.parse(text)
    assert made == SETTINGS[text]
    assert TopK.parse(str(made)) == made


@pytest.mark.parametrize("text", OTHERS)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: (1e-4 \(a share of the values\), 20MB or residual=1e-3|a number)"):
        TopK.parse(text)


def test_the_kl_of_a_residual_is_as_measured() -> None:
    logged = rows(Path(fp8plan.__file__).parents[1] / "benchmarks/results/slow_links_steps.jsonl")
    for budget, kl in KL_OF_RESIDUAL.items():
        measured = [row["kl"] / row["residual"] ** 2 for row in logged if "kl" in row and row["budget"] == budget]
        assert (min(measured), max(measured)) == pytest.approx(kl, rel=0.03)


def test_the_kl_of_a_bounded_residual_does_not_grow() -> None:
    logged = rows(Path(fp8plan.__file__).parents[1] / "benchmarks/results/slow_links_steps.jsonl")
    kl = [row["kl"] for row in logged if "kl" in row and row["budget"] == "residual"]
    assert kl[-1] <= kl[0]
    assert len(kl) == 5


@pytest.mark.parametrize(("moved", "step"), [(1e-5, 1e-6), (1e-4, 1e-5), (1e-3, 1e-4)])
def test_weights_that_began_in_bf16_change_less_often(moved: float, step: float) -> None:
    chance = torch.Generator().manual_seed(2)
    weights = (0.05 * torch.randn(1024, 2048, generator=chance)).bfloat16().float()
    middle = weights + moved * torch.randn(weights.shape, generator=chance)
    half = step / 2 * (torch.randint(0, 2, weights.shape, generator=chance) * 2 - 1)
    seen, made = rounded(middle - half, middle + half), changed(Step(step, moved), normal(0.05))
    assert made.bf16 == pytest.approx(seen.bf16, rel=0.05)
    assert made.codes == pytest.approx(seen.codes, rel=0.15)
    assert made.bf16 < shares(step, 0.05).bf16
    assert tuple(changed(Step(step, 1.0), normal(0.05))) == pytest.approx(tuple(shares(step, 0.05)), rel=0.01)


@pytest.mark.parametrize("beta_2", [0.95, 0.999])
def test_steps_of_adamw_are_those_of_torch(beta_2: float) -> None:
    """Gradients of noise and of a signal with the modelled share of the power, in the first step and in late ones."""
    chance = torch.Generator().manual_seed(2)
    weights = torch.zeros(20_000, requires_grad=True)
    signal = SIGNAL**0.5 * torch.randn(weights.shape, generator=chance)
    optimiser = torch.optim.AdamW([weights], lr=1.0, betas=(0.9, beta_2), weight_decay=0.0)
    steps, ways = [], []
    for _ in range(200):
        before = weights.detach().clone()
        weights.grad = signal + (1 - SIGNAL) ** 0.5 * torch.randn(weights.shape, generator=chance)
        optimiser.step()
        steps.append(float((weights.detach() - before).abs().mean()))
        ways.append(float(((weights.detach() + before) / 2).square().mean().sqrt()))
    for number in (1, 8, 40):
        made = one_step("adamw", number=number)
        assert made.mean == pytest.approx(steps[number - 1], rel=0.15)
        assert made.moved == pytest.approx(ways[number - 1], rel=0.4)
    assert one_step("adamw").mean == pytest.approx(float(np.mean(steps[100:])), rel=0.15)


def test_steps_of_muon_are_those_of_torch() -> None:
    chance = torch.Generator().manual_seed(3)
    weights = torch.zeros(256, 512, requires_grad=True)
    optimiser = torch.optim.Muon([weights], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        before = weights.detach().clone()
        weights.grad = torch.randn(weights.shape, generator=chance)
        optimiser.step()
    assert one_step("muon").mean == pytest.approx(float((weights.detach() - before).abs().mean()), rel=0.2)
    assert one_step("muon", hidden=False) == one_step("adamw")


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer is 'sgd'; allowed: adamw, muon"):
        one_step("sgd")


def sent(new: torch.Tensor) -> int:
    """Bytes that the encoder makes of a tensor that was all zeros."""
    (made,) = changes([(torch.zeros_like(new), new)])
    return 0 if made is None else packed(["w"], [made], [new])[0].numel()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("shape", [(768, 1024), (100, 3000)])
@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.95])
def test_bytes_of_a_patch_are_those_of_the_encoder(dtype: torch.dtype, shape: tuple[int, int], share: float) -> None:
    new = torch.zeros(shape, dtype=dtype)
    places = torch.randperm(new.numel(), generator=torch.Generator().manual_seed(4))[: round(share * new.numel())]
    new.view(-1)[places] = 1
    assert patch_bytes(*shape, new.element_size(), share) == pytest.approx(sent(new), rel=0.1)


def test_a_small_tensor_is_often_not_sent() -> None:
    chance = torch.Generator().manual_seed(5)
    sizes = [sent((torch.rand(16, 32, generator=chance) < 1 / 512).float()) for _ in range(1000)]
    assert 0.5 < np.count_nonzero(sizes) / 1000 < 0.8
    assert patch_bytes(16, 32, 4, 1 / 512) == pytest.approx(np.mean(sizes), rel=0.1)


def test_nothing_is_sent_where_nothing_changes() -> None:
    assert patch_bytes(1024, 1024, 1, 0.0) == 0
