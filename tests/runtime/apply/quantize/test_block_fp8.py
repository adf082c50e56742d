"""Blockwise FP8 against vLLM's own function, bit for bit; groups and Triton's kernels against that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from block_weights import dequantize, quantize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantise_cases import CASES, by_triton, case_weight, vllm_function

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.quantize.block_fp8 import (
    AMAX_FLOOR,
    quantize_into,
    scale_shape,
    stands_alone,
)
from fp8plan.runtime.apply.quantize.targets import CopyTargets, QuantizeTargets

torch = pytest.importorskip("torch")

INTERPRETER = pytest.param("triton_interpreter", marks=pytest.mark.triton)

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
DTYPES = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(128, 128), (256, 384), (1, 1), (127, 129), (300, 260), (64, 512), (130, 16)]
Quantised = tuple[torch.Tensor, torch.Tensor]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(q: torch.Tensor) -> torch.Tensor:
    """The bytes, but every NaN as 0x7f: its sign is the compiler's."""
    found = q.contiguous().view(torch.uint8)
    return torch.where(found & 0x7F == 0x7F, 0x7F, found)


def assert_equal(ours: Quantised, reference: Quantised) -> None:
    for values in (ours, reference):
        assert [x.dtype for x in values] == [E4M3, torch.float32]
    assert torch.equal(bits(ours[0]), bits(reference[0]))
    scales = [values[1].contiguous().nan_to_num(nan=-1, posinf=INF).view(torch.int32) for values in (ours, reference)]
    assert torch.equal(*scales)


def empty(weight: torch.Tensor) -> Quantised:
    """A place for a quantised weight, filled with other bytes than it will get."""
    scale = torch.full(scale_shape(*weight.shape), -7.0, device=weight.device)
    return torch.full(weight.shape, 3.0, device=weight.device).to(E4M3), scale


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    """A weight of less than one block to a few, of any magnitude, with up to four special numbers."""
    rows, columns = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    dtype = draw(st.sampled_from(DTYPES))
    weight = normal(rows, columns, seed=draw(st.integers(0, 2**32)), dtype=torch.float32)
    weight *= 10.0 ** draw(st.integers(-45, 38))
    if draw(st.booleans()):
        weight[:, columns // 2 :] *= 10.0 ** draw(st.integers(-8, 0))
    special = st.sampled_from([0.0, -0.0, NAN, -NAN, INF, -INF, AMAX_FLOOR, 1e-45, -1e-40, 3e38, 448.0, 224.0])
    for row, column, value in draw(
        st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1), special), max_size=4)
    ):
        weight[row, column] = value
    return weight.to(dtype)


@pytest.mark.vllm
@given(weights())
@settings(max_examples=200)
@example(torch.zeros(130, 130))
@example(torch.full((128, 128), AMAX_FLOOR / 2, dtype=torch.bfloat16))
@example(torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 256))
@example(torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(256, 256))
def test_equals_vllms_function_bit_for_bit(weight: torch.Tensor) -> None:
    assert_equal(quantize(weight), vllm_function("eager")(weight))


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES)
def test_equals_vllms_function_as_vllm_compiles_it(case: str) -> None:
    weight = case_weight(case, "cpu")[:700, :900]
    assert_equal(quantize(weight), vllm_function("compiled")(weight))


def test_what_becomes_of_blocks_without_a_finite_maximum() -> None:
    weight = torch.ones(384, 128)
    weight[0, 0], weight[129, 1], weight[130, 2], weight[131, 3] = NAN, INF, -INF, -1.0
    weight[256:] = 0
    q, scale = quantize(weight)
    assert bits(q[:128]).eq(0x7F).all()
    infinite = bits(q[128:256])
    assert (infinite == 0x7F).nonzero().tolist() == [[1, 1], [2, 2]]
    assert (infinite == 0x80).nonzero().tolist() == [[3, 3]]  # the zero of a negative weight
    assert (infinite == 0).sum() == 128 * 128 - 3
    assert bits(q[256:]).eq(0).all()
    assert scale[0].isnan()
    assert scale[1:].flatten().tolist() == [INF, torch.tensor(AMAX_FLOOR).div(448).item()]


@pytest.mark.parametrize("shape", [(5, 256, 384), (2, 3, 130, 70), (0, 256, 128), (0, 128), (128, 0)])
def test_leading_dimensions_are_quantised_together(shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    q, scale = quantize(weight)
    assert q.shape == shape
    assert scale.shape == (*shape[:-2], *scale_shape(*shape[-2:]))
    for place in product(*map(range, shape[:-2])):
        assert_equal((q[place], scale[place]), quantize(weight[place]))


@pytest.mark.parametrize("transposed", [False, True])
def test_into_rows_and_columns_of_a_fused_weight(transposed: bool) -> None:
    whole = normal(700, 520)
    source = whole.T.contiguous().T if transposed else whole
    fused = empty(torch.empty(1000, 900))
    quantize_into(source, fused[0][256:956, 128:648], fused[1][2:8, 1:6])
    assert_equal((fused[0][256:956, 128:648], fused[1][2:8, 1:6]), quantize(whole))
    fused[0][256:956, 128:648], fused[1][2:8, 1:6] = 3.0, -7.0
    assert_equal(fused, empty(torch.empty(1000, 900)))  # nothing was written beside it


@given(st.data())
@settings(max_examples=60)
def test_a_part_stands_alone_exactly_if_its_bytes_never_depend_on_the_rest(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 400), st.integers(1, 400)))
    spans = []
    for size in shape:
        edges = st.sampled_from([e for e in (0, 128, 256, 384, size) if e <= size]) | st.integers(0, size)
        start, stop = sorted(data.draw(st.tuples(edges, edges).filter(lambda span: span[0] != span[1])))
        spans.append(slice(start, stop))
    rows, columns = spans
    blocks = tuple(slice(span.start // 128, -(-span.stop // 128)) for span in spans)
    weight = torch.full(shape, 64.0)
    weight[rows, columns] = 1.0  # any neighbour in a block of the part changes its scale
    q, scale = quantize(weight)
    part = quantize(weight[rows, columns])
    same = torch.equal(bits(q[rows, columns]), bits(part[0])) and torch.equal(scale[blocks], part[1])
    assert stands_alone(shape, rows, columns) == same


def test_a_part_that_is_not_inside_is_an_error() -> None:
    for rows in (slice(0, 257), slice(128, 128), slice(-1, 128)):
        with pytest.raises(ConfigError, match="is no part of 256"):
            stands_alone((256, 256), rows, slice(0, 128))


def test_gaussian_weights_come_back_within_2_64_percent() -> None:
    weight = normal(1024, 1000, dtype=torch.float32)
    q, scale = quantize(weight)
    error = (dequantize(q, scale, torch.float32) - weight).norm() / weight.norm()
    assert error == pytest.approx(0.0264, abs=1e-4)
    back = dequantize(q, scale)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, dequantize(q, scale, torch.float32).bfloat16())
    for row, column in ((0, 0), (500, 127), (1023, 999)):
        exact = q[row, column].float() * scale[row // 128, column // 128]
        assert dequantize(q, scale, torch.float32)[row, column] == exact
    assert not dequantize(*quantize(weight * 0)).any()


@pytest.fixture(params=["torch", INTERPRETER, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which groups run. Triton's interpreter wants TRITON_INTERPRET=1 and a machine without a GPU."""
    if request.param == "triton_interpreter":
        request.getfixturevalue("interpreter")
        interpret(monkeypatch)
    if request.param != "torch":
        monkeypatch.setattr(
            "fp8plan.runtime.apply.quantize.triton_kernels.ROUNDING", "exact"
        )  # as the CPU, which the tests compare
    return "cuda" if request.param == "cuda" else "cpu"


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run groups on the CPU by Triton's interpreter, with torch's conversion. Triton's own loses a mantissa's carry."""
    import triton.language as tl
    from triton.runtime import interpreter

    from fp8plan.runtime.apply.quantize import targets as quantize_groups

    theirs = interpreter._convert_float

    def convert(data, from_dtype, to_dtype, rounding):
        if (from_dtype, to_dtype) != (tl.float32, tl.float8e4nv):
            return theirs(data, from_dtype, to_dtype, rounding)
        return torch.from_numpy(data).to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(quantize_groups, "_by_triton", bool)


def group(device: str) -> list[torch.Tensor]:
    """Weights of several shapes and dtypes: one is strided, one is unaligned, and three are not finite."""
    found = [normal(*SHAPES[i % len(SHAPES)], seed=i, dtype=DTYPES[i % 3]) for i in range(21)]
    found += [normal(256, 900, seed=50)[:, 256:640], normal(1, 300 * 256 + 1).flatten()[1:].view(300, 256)]
    found += [torch.zeros(128, 128), normal(128, 384, seed=60) * 1e-6]
    found[1][200, 300], found[4][0, 0], found[22][299, 255] = NAN, -INF, INF
    return [weight.to(device) for weight in found] if device == "cuda" else found


NOT_FINITE, ZEROS = [1, 4, 22], 23  # of the group


def flags(number: int, device: str) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.int32, device=device)


def test_a_group_is_quantised_as_each_alone_and_flags_say_what_it_holds(device: str) -> None:
    sources = group(device)
    outs = [empty(source) for source in sources]
    targets = QuantizeTargets(*zip(*outs, strict=True))
    raised = flags(len(sources), device)
    targets.run(sources, raised)
    for source, out in zip(sources, outs, strict=True):
        assert_equal(tuple(x.cpu() for x in out), quantize(source.cpu()))
    expected = [2 if i in NOT_FINITE else 0 if i == ZEROS else 1 for i in range(len(sources))]
    assert raised.tolist() == expected

    healed = [source.nan_to_num(0, 1, -1) * 2 for source in sources]
    targets.run([x if x.stride(-1) == 1 else x.contiguous() for x in healed], raised)  # a second step, flags not reset
    for source, out in zip(healed, outs, strict=True):
        assert_equal(tuple(x.cpu() for x in out), quantize(source.cpu()))
    assert raised.tolist() == expected


def test_a_group_goes_into_parts_of_a_fused_weight(device: str) -> None:
    q, scale = (x.to(device) for x in empty(torch.empty(4, 512, 384)[0]))
    sources = [normal(256, 384, seed=1).to(device), normal(128, 256, seed=2).to(device), normal(128, 128).to(device)]
    places = [(slice(256, 512), slice(0, 384)), (slice(0, 128), slice(128, 384)), (slice(0, 128), slice(0, 128))]
    blocks = [tuple(slice(side.start // 128, side.stop // 128) for side in place) for place in places]
    targets = QuantizeTargets([q[place] for place in places], [scale[block] for block in blocks])
    targets.run(sources, flags(3, device))
    for source, place, block in zip(sources, places, blocks, strict=True):
        assert_equal((q[place].cpu(), scale[block].cpu()), quantize(source.cpu()))
    assert (q[128:256].float() == 3).all()
    assert (scale[1] == -7).all()


@pytest.mark.parametrize("dtype", [*DTYPES, E4M3], ids=str)
def test_a_group_is_copied_and_flags_say_what_it_holds(device: str, dtype: torch.dtype) -> None:
    shapes = [(3, 8192), (256, 512), (100, 700), (5,), (8192,), (1, 1), (0, 4), (33, 40)]
    sources = [normal(*shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    sources += [normal(64, 2048).to(device, dtype)[:, 512:1536]]  # rows with gaps
    sources[1][255, 511], sources[4][8191], sources[8][63, 1023] = NAN, NAN if dtype == E4M3 else INF, NAN
    sources[2].mul_(-0.0) if dtype != E4M3 else sources[2].view(torch.uint8).fill_(0x80)  # zeros with a sign
    sources[3].zero_()[4] = 2.0**-9  # E4M3's smallest
    outs = [torch.full_like(source.float(), 3.0).to(dtype) for source in sources]
    outs[7] = torch.full((33, 96), 3.0, device=device).to(dtype)[:, 16:56]
    raised = flags(len(sources), device)
    raised[0] = 2  # as an earlier call left it
    CopyTargets(outs).run(sources, raised)
    for source, out in zip(sources, outs, strict=True):
        assert torch.equal(source.contiguous().view(torch.uint8), out.contiguous().view(torch.uint8))
    assert raised.tolist() == [2, 2, 0, 1, 2, 1, 0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("ours", "mode"), [("compiled", "compiled"), ("eager", "eager"), ("torch", "eager")])
def test_each_rounding_equals_vllm_where_it_divides_so(case: str, ours: str, mode: str) -> None:
    pytest.importorskip("vllm")
    weight = case_weight(case)
    mine = quantize(weight) if ours == "torch" else by_triton(weight, ours)
    for values, theirs in zip(mine, vllm_function(mode)(weight), strict=True):
        assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("targets", [QuantizeTargets([], []), CopyTargets([])], ids=["quantize", "copy"])
def test_a_group_of_none_takes_nothing(targets: QuantizeTargets | CopyTargets) -> None:
    targets.run([], flags(0, "cpu"))
    with pytest.raises(ConfigError, match="1 sources for 0 targets"):
        targets.run([ONES], flags(0, "cpu"))
    with pytest.raises(ConfigError, match=r"flags are torch.int32 \[1\] on cpu; they must be torch.int32 \[0\]"):
        targets.run([], flags(1, "cpu"))


BAD_WEIGHTS = [torch.ones(4), torch.ones(4, 4, dtype=torch.float64), torch.ones(4, 4).to(E4M3), torch.ones(4, 4).int()]


@pytest.mark.parametrize("weight", BAD_WEIGHTS, ids=lambda w: f"{w.dtype}{list(w.shape)}")
def test_what_is_no_weight_is_an_error(weight: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="quantised are bf16, fp16 and fp32"):
        quantize(weight)


ONES = torch.ones(256, 256)
Q, SCALE = quantize(ONES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_into(ONES[:128], Q, SCALE), r"the weight is \[128, 256\] and q \[256, 256\]"),
        (lambda: quantize_into(ONES, ONES, SCALE), "it must be torch.float8_e4m3fn"),
        (lambda: quantize_into(ONES, Q, SCALE[:1]), r"torch.float32 \[2, 2\]"),
        (lambda: quantize_into(ONES, Q, SCALE.double()), "scale is torch.float64"),
        (lambda: QuantizeTargets([Q], []), "1 q_outs for 0 scale_outs"),
        (lambda: QuantizeTargets([Q.T], [SCALE]), "the last contiguous"),
        (lambda: QuantizeTargets([Q[None]], [SCALE[None]]), "give 2 dimensions"),
        (lambda: CopyTargets([ONES.int()]), "copied are torch.bfloat16"),
        (lambda: CopyTargets([ONES[0], ONES.to("meta")]), "make a group for each device"),
    ],
)
def test_what_does_not_belong_together_is_an_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("sources", "raised", "message"),
    [
        ([ONES], flags(2, "cpu"), "1 sources for 2 targets"),
        ([ONES, ONES], flags(1, "cpu"), r"flags are torch.int32 \[1\] on cpu; they must be torch.int32 \[2\]"),
        ([ONES, ONES], flags(2, "cpu").long(), "they must be torch.int32"),
        ([ONES, ONES[:1]], flags(2, "cpu"), r"source 1 is torch.float32 \[1, 256\]"),
        ([ONES, Q], flags(2, "cpu"), "source 1 is torch.float8_e4m3fn"),
        ([ONES, ONES.T], flags(2, "cpu"), r"source 1 has strides \(1, 256\)"),
    ],
)
def test_a_wrong_source_is_an_error_before_anything_is_written(
    sources: list[torch.Tensor], raised: torch.Tensor, message: str
) -> None:
    outs = [empty(ONES), empty(ONES)]
    with pytest.raises(ConfigError, match=message):
        QuantizeTargets(*zip(*outs, strict=True)).run(sources, raised)
    for out in outs:
        assert_equal(out, empty(ONES))
    with pytest.raises(ConfigError, match=message):
        CopyTargets([ONES.clone(), ONES.clone()]).run(sources, raised)
