"""The tensor-parallel sizes into which an engine can cut a block-quantised model.

A rank's part of a layer has so many inputs and outputs, and FP8 comes in blocks of 128 x 128. What is not a whole
number of blocks is met in three ways (read in vLLM 0.24 to 0.32, and run against 0.30 by tests/model/test_shards.py):

- vLLM's online quantisation of a linear pads the scales of its outputs, but quantises what goes in by groups of 128
  and asserts that they divide it, in the first forward pass (per_token_group_quant_fp8).
- vLLM's online quantisation of experts pads each rank's expert to whole blocks (maybe_roundup_sizes, from 0.26 on).
- verl has vLLM load what looks like an FP8 checkpoint, and quantises each whole matrix itself. vLLM then refuses any
  rank that would begin or end inside a block, experts included (validate_fp8_block_shape and its _moe), or finds no
  place for the scales of a fused layer. By 0.30 it cuts the scales of experts finer instead; verl 0.9.1 installs 0.24,
  which does not. With expert parallelism (each rank has whole experts) no block is cut.

None of them leaves such a layer in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.precision import Precision

# Who starts the engine, the least demanding first.
TARGETS: Final = ("vllm", "verl", "trl")


class Size(NamedTuple):
    """Something that must be a whole number of blocks."""

    layer: str
    what: str
    size: int


def check_target(target: str) -> None:
    """Raise ConfigError for a target that does not exist."""
    if target not in TARGETS:
        raise ConfigError(f"target is {target!r}; allowed: {', '.join(TARGETS)}")


def strictest(targets: Iterable[str]) -> str:
    """The target among several that can start the fewest layouts; "vllm" if there are none. What another of them cannot
    start all the same is refused when it is emitted.
    """
    return max(targets, key=TARGETS.index, default="vllm")


def why_not_trl(precision: Precision, tensor_parallel: int) -> str | None:
    """The reason why no engine that TRL's processes start can run FP8 weights, whatever their sizes; None if one can.

    TRL's own cannot: they are built without quantisation. fp8plan's can, in fp8plan.integrations.trl, which holds one
    GPU. TRL's server mode hands BF16 tensors to vLLM's own weight transfer, which may well requantise them; that has
    not been shown under TRL, so it is refused as well.
    """
    if precision.weights == "bf16" or tensor_parallel == 1:
        return None
    return (
        f"TRL cannot sync {precision.name} on {tensor_parallel} GPUs: its own engines take no FP8 weights, and each of "
        "fp8plan.integrations.trl has 1 GPU; plan with --tensor-parallel-size 1, or with --precision bf16 "
        "--precision fp8_kv, or emit for verl or vllm"
    )


def why_not_shardable(
    shape: ModelShape,
    precision: Precision,
    tensor_parallel: int,
    target: str = "vllm",
    expert_parallel: bool = False,
) -> str | None:
    """The reason why an engine that `target` starts cannot run `shape` in `precision` on that many ranks; None if it
    can. expert_parallel: each rank has whole experts
    """
    check_target(target)
    if precision.weights == "bf16":
        return None
    if target == "trl" and (reason := why_not_trl(precision, tensor_parallel)):
        return reason
    block, who = precision.weight_block[0], "verl" if target == "verl" else "vLLM"

    def fault(tp: int, whole_experts: bool = expert_parallel) -> Size | None:
        sizes = _whole_blocks(shape, tp, 1 if whole_experts else tp) if target == "verl" else _inputs(shape, tp)
        return next((found for found in sizes if found.size % block), None)

    found = fault(tensor_parallel)
    if found is None:
        return None
    layouts = shape.allowed_tensor_parallel(expert_parallel=expert_parallel)
    allowed = ", ".join(str(tp) for tp in layouts if fault(tp) is None)
    helps = fault(tensor_parallel, whole_experts=True) is None
    return (
        f"{found.layer} has {found.size} {found.what} on each GPU at tensor_parallel_size {tensor_parallel}, and with "
        f"FP8 weights {who} takes multiples of {block}; allowed: {allowed or 'none, use bf16 weights'}"
        f"{', or expert parallelism, which leaves experts whole' if helps else ''}"
    )


def refusals(
    shape: ModelShape, precision: Precision, tensor_parallel: int, expert_parallel: bool = False
) -> dict[str, str]:
    """The targets that cannot run `shape` on that many ranks, each with the reason."""
    reasons = {
        target: why_not_shardable(shape, precision, tensor_parallel, target, expert_parallel) for target in TARGETS
    }
    return {target: reason for target, reason in reasons.items() if reason is not None}


def _inputs(shape: ModelShape, tp: int) -> Iterator[Size]:
    """The inputs of every quantised linear on one rank."""
    yield from (Size(x.name, "inputs", x.k) for x in shape.linears(tp) if x.quantised)


def _whole_blocks(shape: ModelShape, tp: int, expert_slices: int) -> Iterator[Size]:
    """The inputs, the outputs that another matrix or another rank follows, and the experts' width."""
    yield from _inputs(shape, tp)
    for part, _ in shape.counted:
        for linear, whole in zip(part.linears(shape.hidden_size, tp), part.linears(shape.hidden_size), strict=True):
            if linear.quantised:
                yield from outputs_followed(linear, cut=linear.n < whole.n)
    yield from (Size(x.name, "inputs", x.k) for x in shape.expert_linears(expert_slices))


def outputs_followed(linear: Linear, cut: bool) -> Iterator[Size]:
    """The outputs of one rank that others follow: those of each fused matrix, and the last ones if ranks share them."""
    if linear.parts:
        yield from (Size(linear.name, "outputs of one part", x) for x in (linear.parts if cut else linear.parts[:-1]))
    elif cut:
        yield Size(linear.name, "outputs", linear.n)
