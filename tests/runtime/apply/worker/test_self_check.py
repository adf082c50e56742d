"""The self-check passes what the quantiser writes, whatever the weights, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from block_weights import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.runtime.apply.quantize.block_fp8 import BLOCK
from fp8plan.runtime.apply.weight_sync.manifest import Entry
from fp8plan.runtime.apply.worker.binding import Binding, Move

torch = pytest.importorskip("torch")

from fp8plan.runtime.apply.worker.comparison import MATRIX, Samples  # noqa: E402

E4M3 = torch.float8_e4m3fn


def move(tensor: Any, target: Any, scale: Any = None) -> Move:
    return Move(tuple((0, size) for size in tensor.shape), target, scale)


def quantised(weight: Any) -> Move:
    return move(weight, *quantize(weight))


def checked(sent: dict[str, Any], moves: dict[str, tuple[Move, ...]], count: int = 8, seed: int = 0) -> dict[str, Any]:
    """Return the check's findings on a sync that wrote `moves`, sent in chunks of 3 tensors."""
    manifest = [
        Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in sent.items()
    ]
    samples = Samples(manifest, Binding(moves, {}, frozenset()), count, seed)
    tensors = list(sent.values())
    for at in range(0, len(tensors), 3):
        chunk = tensors[at : at + 3]
        copies = [tensor.clone() for tensor in chunk]
        samples.take({at + i: i for i in range(len(chunk))}, copies)
        for copy in copies:
            copy.zero_()  # the trainer may: what was sent must have been kept
    return samples.compare()


def gaussian(*shape: int) -> Any:
    return (torch.randn(shape) * 0.02).bfloat16()


# --- what the quantiser writes passes -------------------------------------------------------------------------------


def ragged(seed: int, low: int, high: int) -> Any:
    """Weights of very different magnitudes, zeros among them, in blocks that are not whole."""
    chance = torch.Generator().manual_seed(seed)
    powers = torch.randint(low, high + 1, (200, 700), generator=chance).float()
    signs = torch.randint(-1, 2, powers.shape, generator=chance)
    return (signs * torch.rand(powers.shape, generator=chance).add(1) * powers.exp2()).bfloat16()


@given(seed=st.integers(0, 2**32 - 1), low=st.integers(-60, 10), span=st.integers(0, 30))
@settings(max_examples=40)
def test_right_weights_pass_whatever_they_are(seed: int, low: int, span: int) -> None:
    weight = ragged(seed, low, low + span)
    found = checked({"w": weight}, {"w": (quantised(weight),)}, seed=seed)
    assert (found["compared"], found["differ"]) == (1, [])


HALFWAY = 1 + 1 / 16  # between 1 and 1 + 1 / 8


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_reached_within_a_seventeenth(sign: int) -> None:
    """All halfway between two values of E4M3, but for one that sets a block's scale to 1."""
    weight = torch.full((BLOCK, BLOCK), sign * HALFWAY)
    weight[0, 0] = 448.0
    found = checked({"w": weight.bfloat16()}, {"w": (quantised(weight.bfloat16()),)})
    assert found["differ"] == []
    weight[0, 0] = 0  # without it, what the others are off by
    error = found["weight_error"] * math.hypot(448.0, weight.norm()) / weight.norm()
    assert error == pytest.approx(1 / 17, rel=1e-4)


def test_what_is_too_small_for_its_block_may_be_lost() -> None:
    weight = gaussian(BLOCK, BLOCK)
    weight[0, 0] = 1e4  # the others are far below the smallest value that its scale leaves
    assert (quantised(weight).target.float() == 0).sum() > weight.numel() / 2
    assert checked({"w": weight}, {"w": (quantised(weight),)})["differ"] == []


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1.0, 1e4])
def test_zeros_and_weights_below_the_floor(scale: float) -> None:
    for weight in (torch.zeros(BLOCK, 2 * BLOCK).bfloat16(), gaussian(BLOCK, 2 * BLOCK) * scale):
        assert checked({"w": weight}, {"w": (quantised(weight),)})["differ"] == []


def test_the_error_is_that_of_the_whole_weight() -> None:
    sent = {f"{i}": gaussian(*MATRIX) for i in range(4)}
    moves = {name: (quantised(weight),) for name, weight in sent.items()}
    found = checked(sent, moves)
    stacked = torch.cat(list(sent.values()))
    exact = stacked.float()
    error = (dequantize(*quantize(stacked), torch.float32) - exact).norm() / exact.norm()
    assert found["weight_error"] == pytest.approx(error.item(), rel=1e-4)
    assert found["weight_error"] == pytest.approx(0.0264, abs=3e-4)


# --- and nothing else -----------------------------------------------------------------------------------------------


def e8m0(weight: Any, q: Any, scale: Any) -> None:
    """Quantised again with scales that are powers of two, as DeepGEMM's weights are."""
    again = scale.log2().ceil().exp2()
    wide = again.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    q.copy_((dequantize(q, scale, torch.float32) / wide).to(E4M3))
    scale.copy_(again)


def truncated(weight: Any, q: Any, scale: Any) -> None:
    """A quantiser that rounds towards zero."""
    exact = weight.float() / scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    bits = q.view(torch.uint8)
    bits.sub_((q.float().abs() > exact.abs()).to(torch.uint8))


FAULTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "not written": lambda weight, q, scale: q.zero_(),
    "another tensor's": lambda weight, q, scale: q.copy_(quantize(gaussian(*weight.shape))[0]),
    "rows in another order": lambda weight, q, scale: q.copy_(q.clone().roll(1, 0)),
    "columns in another order": lambda weight, q, scale: q.copy_(q.clone().roll(1, 1)),
    "one row": lambda weight, q, scale: q[3].zero_(),
    "one element": lambda weight, q, scale: q.view(torch.uint8)[5, 7].bitwise_xor_(2),
    "a sign": lambda weight, q, scale: q.view(torch.uint8)[-1, -1].bitwise_xor_(0x80),
    "scales not written": lambda weight, q, scale: scale.fill_(1.0),
    "a scale too large by an eighth": lambda weight, q, scale: scale[0, -1:].mul_(1.125),
    "absurd scales of zeros": lambda weight, q, scale: (q.zero_(), scale.fill_(1e9)),
    "NaN": lambda weight, q, scale: q.view(torch.uint8)[0, 0].fill_(0x7F),
    "NaN scales": lambda weight, q, scale: scale.fill_(math.nan),
    "rounded twice (E8M0)": e8m0,
    "rounded towards zero": truncated,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_named(fault: str) -> None:
    torch.manual_seed(1)
    sent = {name: gaussian(*MATRIX) for name in "abc"}
    moves = {name: (quantised(weight),) for name, weight in sent.items()}
    FAULTS[fault](sent["b"], *moves["b"][0][1:])
    assert checked(sent, moves)["differ"] == ["b"]


def test_zeros_must_be_zeros() -> None:
    weight = torch.zeros(MATRIX).bfloat16()
    live = quantised(weight)
    live.target[0, 9] = 2.0**-9
    assert checked({"w": weight}, {"w": (live,)})["differ"] == ["w"]
    live.scale.fill_(1e-30)
    assert checked({"w": weight}, {"w": (live,)})["differ"] == ["w"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize("shape", [(96,), (40, 50), MATRIX], ids=str)
def test_what_is_copied_is_compared_bit_for_bit(dtype: Any, shape: tuple[int, ...]) -> None:
    sent = {name: torch.randn(shape).to(dtype) for name in "abc"}
    live = {name: (move(tensor, tensor.clone()),) for name, tensor in sent.items()}
    assert checked(sent, live) == {"compared": 3, "differ": [], "weight_error": None}
    live["b"][0].target.view(torch.uint8)[..., 1] ^= 1  # the lowest bit of one byte
    assert checked(sent, live)["differ"] == ["b"]
    zeros = torch.zeros(shape).to(dtype)
    assert checked({"z": (zeros.float() * -1).to(dtype)}, {"z": (move(zeros, zeros),)})["differ"] == ["z"]


# --- which, and where -----------------------------------------------------------------------------------------------


def test_parts_of_fused_tensors_are_found_in_both() -> None:
    """Experts of one tensor, a tensor-parallel rank's columns, rows of a fused weight, a transposed tensor."""
    experts = gaussian(3, 256, 512)
    q, scale = quantize(torch.cat([gaussian(256, 256), experts[1, :, 256:]]))
    fused = Move(((1, 2), (0, 256), (256, 512)), q[256:], scale[2:])
    bias = torch.randn(1, 300).bfloat16()
    turned = gaussian(384, 256).t()
    sent = {"experts": experts, "bias": bias, "turned": turned}
    live = {
        "experts": (fused,),
        "bias": (Move(((0, 1), (100, 300)), bias[0, 100:].clone(), None),),
        "turned": (quantised(turned.contiguous()),),
    }
    for seed in range(8):
        assert checked(sent, live, seed=seed)["differ"] == []
        moved = {"experts": (fused._replace(source=((1, 2), (0, 256), (0, 256))),)}
        assert checked(sent, live | moved, seed=seed)["differ"] == ["experts"]


def test_all_blocks_of_a_weight_are_reached() -> None:
    """Those at an edge that is not whole, too."""
    weight = gaussian(300, 900)
    moves = {"w": (quantised(weight),)}
    found = []
    for row, column in [(0, 0), (299, 899), (150, 400), (0, 899), (299, 0)]:
        live = moves["w"][0]
        kept = live.target.clone()
        live.target.view(torch.uint8)[row, column] ^= 0x80
        found.append(any(checked({"w": weight}, moves, seed=seed)["differ"] for seed in range(60)))
        live.target.copy_(kept)
    assert all(found)


def test_only_what_is_written_in_place_can_be_compared() -> None:
    sent = {f"{i}": gaussian(128, 128) for i in range(40)}
    moves = {name: (quantised(weight),) for name, weight in list(sent.items())[::2]}
    for seed in range(5):
        assert checked(sent, moves, seed=seed) | {"weight_error": 0} == {"compared": 8, "differ": [], "weight_error": 0}
    assert checked(sent, {}) == {"compared": 0, "differ": [], "weight_error": None}
    assert checked(sent, moves, count=0)["compared"] == 0


def test_other_tensors_every_step() -> None:
    sent = {f"{i}": gaussian(128, 128) for i in range(40)}
    moves = {name: (move(weight, weight + 1),) for name, weight in sent.items()}
    chosen = {tuple(checked(sent, moves, seed=seed)["differ"]) for seed in range(5)}
    assert len(chosen) == 5
    assert {len(names) for names in chosen} == {8}


# --- what it costs --------------------------------------------------------------------------------------------------


def dispatched(work: Callable[[], Any]) -> int:
    """Operations that torch runs; on a GPU each takes 5 to 20 us, whatever its size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        work()
    return counting.count


def layers(sizes: Sequence[tuple[int, ...]]) -> tuple[dict[str, Any], dict[str, tuple[Move, ...]]]:
    sent = {f"{i}": gaussian(*size) for i, size in enumerate(sizes)}
    whole = {name: quantised(t) if t.dim() > 1 else move(t, t.clone()) for name, t in sent.items()}
    return sent, {name: (found,) for name, found in whole.items()}


def test_eight_samples_take_few_operations() -> None:
    """339 in a Qwen3-8B when windows were quantised anew. 24 of these only keep what was sent, in this many chunks."""
    sent, moves = layers([(1024, 512), (256, 768), (640, 640), (512, 2048), (128, 512), (1024,), (128,), (4096,)])
    manifest = [Entry(name, "bfloat16", tuple(tensor.shape)) for name, tensor in sent.items()]
    samples: list[Samples] = []

    def whole() -> None:
        samples.append(Samples(manifest, Binding(moves, {}, frozenset()), 8, 0))
        for number, tensor in enumerate(sent.values()):
            samples[0].take({number: 0}, [tensor])
        found = samples[0].compare()
        assert (found["compared"], found["differ"]) == (8, [])

    assert dispatched(whole) <= 60
