"""Fake quantisation of a trainer's linears: its values are those of fp8plan's own quantisation and of vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from block_weights import dequantize, quantize

from fp8plan.model.risk.remedies import BF16, TRAINER_PRECISIONS
from fp8plan.runtime.measure.probe.fp8_linears import linear, rounded_activations, rounded_weight

torch = pytest.importorskip("torch")

SHAPES = [(128, 128), (256, 384), (130, 260), (1, 1)]
FP8 = [name for name in TRAINER_PRECISIONS if name != BF16]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., : shape[-1] // 2] *= 100
    return values.to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_in_blocks_are_those_of_a_sync(shape: tuple[int, int]) -> None:
    weight = normal(*shape)
    assert torch.equal(rounded_weight(weight, "fp8_block"), dequantize(*quantize(weight), torch.float32))


@pytest.mark.vllm
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_with_powers_of_two_are_vllms(shape: tuple[int, int]) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = normal(*shape)
    q, scale = per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=True)
    assert torch.equal(scale.log2(), scale.log2().round())
    assert torch.equal(rounded_weight(weight, "fp8_block_pow2"), dequantize(q, scale, torch.float32))


@pytest.mark.vllm
@pytest.mark.parametrize(("precision", "e8m0"), [("fp8_block", False), ("fp8_block_pow2", True)])
@pytest.mark.parametrize("width", [128, 384, 200])
def test_activations_are_vllms(precision: str, e8m0: bool, width: int) -> None:
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    tokens = normal(7, width)
    operation = SimpleNamespace(group_size=128, use_ue8m0=e8m0, column_major_scales=False, tma_aligned_scales=False)
    q, scale = QuantFP8._quantize_group_native(operation, tokens)
    theirs = q.float() * scale.repeat_interleave(128, -1)[:, :width]
    assert torch.equal(rounded_activations(tokens, precision), theirs)
    assert torch.equal(rounded_activations(tokens[None], precision), theirs[None])  # any leading dimensions


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize(("precision", "e8m0"), [("fp8_block", False), ("fp8_block_pow2", True)])
def test_activations_on_a_gpu_are_those_of_vllms_kernel(precision: str, e8m0: bool) -> None:
    """A kernel may round a scale's last bit otherwise, which moves few numbers to a neighbour."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    tokens = normal(64, 512).cuda()
    q, scale = per_token_group_quant_fp8(tokens, 128, use_ue8m0=e8m0)
    theirs = q.float() * scale.repeat_interleave(128, -1)
    ours = rounded_activations(tokens, precision)
    assert torch.allclose(ours, theirs, rtol=0.13, atol=0)  # two neighbours are at most an eighth apart
    assert ((ours - theirs).abs() > 1e-5 * theirs.abs()).float().mean() < 1e-3


def test_one_scale_for_a_tensor_serves_its_largest_value() -> None:
    values = torch.tensor([[448.0, 0.0009], [-20.7, 17.9]])
    for rounded in (rounded_weight(values, "fp8_tensor"), rounded_activations(values, "fp8_tensor")):
        assert rounded.tolist() == [[448.0, 0.0], [-20.0, 18.0]]


@pytest.mark.parametrize("precision", FP8)
def test_zeros_stay_zeros(precision: str) -> None:
    zeros = torch.zeros(3, 200)
    assert torch.equal(rounded_weight(zeros, precision), zeros)
    assert torch.equal(rounded_activations(zeros, precision), zeros)


@pytest.mark.parametrize("precision", FP8)
def test_a_linear_is_rounded_once_after_its_sum(precision: str) -> None:
    tokens, weight, bias = normal(2, 5, 256), normal(130, 256, seed=1), normal(130, seed=2)
    factors = rounded_activations(tokens, precision).double(), rounded_weight(weight, precision).double()
    exact = factors[0] @ factors[1].t() + bias.double()
    found = linear(tokens, weight, bias, precision)
    assert found.dtype == torch.bfloat16
    apart = (found.double() - exact).abs()
    assert (apart <= exact.abs() * 2.0**-8 + 1e-3 * exact.abs().mean()).all()
    assert not torch.equal(found, torch.nn.functional.linear(tokens, weight, bias))
