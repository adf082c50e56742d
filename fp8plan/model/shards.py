"""The tensor-parallel sizes into which an engine can cut a block-quantised model.

FP8 comes in blocks of 128 x 128. A rank's size may be no whole number of blocks, with three outcomes (read in vLLM 0.24
to 0.32, and run against 0.30 by tests/model/test_shards.py):

- Online quantisation of a linear pads the scales of outputs, but asserts that groups of 128 divide the inputs, in the
  first forward pass (per_token_group_quant_fp8). fp8plan leaves such a linear in BF16, by name (`Linear.quantised`,
  fp8plan.model.emit.vllm).
- Online quantisation of experts pads each rank's expert to whole blocks (maybe_roundup_sizes). The
  model's width must not need padding. Routers inside the experts' runner (Qwen3-MoE) get the padded tokens, and
  gpt-oss's loader copies its 2,880 inputs to a parameter of 2,944.
- For a checkpoint in FP8 blocks vLLM refuses a rank that begins or ends inside a block, experts included
  (validate_fp8_block_shape and its _moe), or finds no place for the scales of a fused layer. verl quantises whole
  matrices and has vLLM load such a checkpoint, so one such layer rules a size out. 0.30 cuts the scales of experts
  finer, but 0.24, which verl 0.9.1 installs, does not. 0.32 pads them to whole blocks for kernels that `moe_backend`
  names and that take no others; fp8plan names Triton's alone. Expert parallelism cuts no block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.architecture.parts import LatentAttention
from fp8plan.model.precision import Precision
from fp8plan.model.targets import TARGETS

_LATENT: Final = (
    "inside of verl and TRL, fp8plan's engine measures the scales of an FP8 KV cache after each weight sync, and knows "
    "no kernel of latent attention that reads new ones; allowed: bf16, fp8_block"
)


class Size(NamedTuple):
    """A size that must be a whole number of blocks."""

    layer: str
    what: str
    size: int


def check_target(target: str) -> None:
    if target not in TARGETS:
        raise ConfigError(f"target is {target!r}; allowed: {', '.join(TARGETS)}")


def strictest(targets: Iterable[str]) -> str:
    """The target with the most demands; "vllm" without targets. Another target may refuse its layouts."""

    def demands(target: str) -> tuple[bool, int, bool]:
        starts = TARGETS[target]
        return starts.whole_blocks, len(starts.lacks), starts.sender is not None

    return max(targets, key=demands, default="vllm")


def why_not_shardable(
    shape: ModelShape,
    precision: Precision,
    tensor_parallel: int,
    target: str = "vllm",
    expert_parallel: bool = False,
) -> str | None:
    """The reason why an engine of `target` cannot run `shape` in `precision` on that many ranks; None if it can.

    expert_parallel: each rank has whole experts
    """
    check_target(target)
    starts = TARGETS[target]
    if reason := shape.why_not(precision) or starts.lacks.get(precision.name):
        return reason
    if starts.sender is not None and shape.stored is not None:
        return shape.stored.not_synced
    if starts.measures == "fp8plan" and precision.kv == "fp8" and shape.parts_of(LatentAttention):
        return _LATENT
    if not precision.in_blocks:
        return None
    # TRL runs fp8plan's own engine, or vLLM's server with fp8plan's backend.
    if not starts.whole_blocks and shape.stored is None:
        nothing_left = _why_nothing_left(shape, precision, tensor_parallel, expert_parallel)
        return _why_not_padded(shape, precision) or nothing_left
    block = precision.weight_block[0]

    def fault(tp: int, whole_experts: bool = expert_parallel) -> Size | None:
        sizes = _whole_blocks(shape, tp, 1 if whole_experts else tp)
        return next((size for size in sizes if size.size % block), None)

    part = fault(tensor_parallel)
    if part is None:
        return None
    layouts = shape.allowed_tensor_parallel(expert_parallel=expert_parallel)
    allowed = ", ".join(str(tp) for tp in layouts if fault(tp) is None)
    helps = fault(tensor_parallel, whole_experts=True) is None
    if shape.stored is None:
        of, whom, none = "", f"with FP8 weights {starts.sender}", "none, use bf16 weights"
    else:
        of, whom = _of_the_whole(shape, part, tensor_parallel), f"of weights in {shape.stored.label} vLLM"
        none = "none, plan the BF16 model"
    return (
        f"{part.layer} has {of}{part.size} {part.what} on each GPU at tensor_parallel_size {tensor_parallel}, and "
        f"{whom} takes multiples of {block}; allowed: {allowed or none}"
        f"{', or expert parallelism, which leaves experts whole' if helps else ''}"
    )


def _of_the_whole(shape: ModelShape, part: Size, ranks: int) -> str:
    """Words that derive a linear's inputs on a rank from all its inputs; "" if ranks do not share them."""
    whole = part.size * ranks
    linears = (*shape.linears(), *shape.expert_linears())
    shared = ranks > 1 and any((x.name, x.k) == (part.layer, whole) for x in linears)
    return f"{whole:,} / {ranks} = " if shared else ""


def left_in_bf16(shape: ModelShape, precision: Precision, tensor_parallel: int) -> str:
    """A sentence on the linears that an FP8 engine of vLLM leaves in BF16 on that many ranks; "" if none.

    Those of layers that the user keeps in BF16 are left out.
    """
    kept = shape.left_in_bf16(tensor_parallel) if precision.weights != "bf16" else ()
    if shape.stored is None:
        kept = tuple(linear for linear in kept if not linear.stored)
    if not kept:
        return ""
    named = [f"{x.name} of {x.layers} layer{'s' if x.layers > 1 else ''} ({x.k:,} inputs on each GPU)" for x in kept]
    listed = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    stay = f"{listed} {'stays' if len(named) == 1 else 'stay'} in BF16"
    if shape.stored is not None:
        return f"{stay}, as in the checkpoint"
    return f"{stay}, as vLLM quantises only multiples of {precision.weight_block[1]} inputs"


def _why_not_padded(shape: ModelShape, precision: Precision) -> str | None:
    """The reason why vLLM cannot run experts in FP8, if it would pad the model's width; else None."""
    block = precision.weight_block[0]
    if not shape.parts_of(Experts) or shape.hidden_size % block == 0:
        return None
    return (
        f"experts_w13 has {shape.hidden_size} inputs: with FP8 weights vLLM pads them to a multiple of {block}, which "
        "its routers, or its loader of gpt-oss, do not take; allowed: none, use bf16 weights"
    )


def _why_nothing_left(
    shape: ModelShape, precision: Precision, tensor_parallel: int, expert_parallel: bool
) -> str | None:
    """The reason if vLLM has nothing to quantise, with the layouts in which it has something; else None."""

    def something(tp: int) -> bool:
        return any(x.quantised for x in (*shape.linears(tp), *shape.expert_linears()))

    if something(tensor_parallel):
        return None
    sizes = ", ".join(f"{x.name} {x.k}" for x in shape.left_in_bf16(tensor_parallel))
    layouts = shape.allowed_tensor_parallel(expert_parallel=expert_parallel)
    allowed = ", ".join(str(tp) for tp in layouts if something(tp))
    return (
        f"{precision.name} leaves nothing of {shape.name} to quantise at tensor_parallel_size {tensor_parallel}: vLLM "
        f"takes inputs in multiples of {precision.weight_block[1]}, and on each GPU there are {sizes}; allowed: "
        f"{allowed or 'none, use bf16 weights'}"
    )


def refusals(
    shape: ModelShape,
    precision: Precision,
    tensor_parallel: int,
    expert_parallel: bool = False,
) -> dict[str, str]:
    """Targets with fp8plan that cannot run `shape` on that many ranks -> the reason."""
    ours = [target for target, starts in TARGETS.items() if starts.measures == "fp8plan"]
    pairs = ((x, why_not_shardable(shape, precision, tensor_parallel, x, expert_parallel)) for x in ours)
    return {target: reason for target, reason in pairs if reason is not None}


def _whole_blocks(shape: ModelShape, tp: int, expert_slices: int) -> Iterator[Size]:
    """The inputs of linears, the outputs before another matrix's or rank's, and the experts' width."""
    yield from (Size(x.name, "inputs", x.k) for x in shape.linears(tp) if x.intended)
    for part, _ in shape.counted:
        for linear, whole in zip(part.linears(shape.hidden_size, tp), part.linears(shape.hidden_size), strict=True):
            if linear.intended:
                yield from outputs_followed(linear, cut=linear.n < whole.n)
    yield from (Size(x.name, "inputs", x.k) for x in shape.expert_linears(expert_slices))


def outputs_followed(linear: Linear, cut: bool) -> Iterator[Size]:
    """Outputs of one rank before others: those of each fused matrix, and the last ones if ranks share them."""
    if linear.parts:
        yield from (Size(linear.name, "outputs of one part", x) for x in (linear.parts if cut else linear.parts[:-1]))
    elif cut:
        yield Size(linear.name, "outputs", linear.n)
