"""The material of parts: a weight matrix as vLLM runs it, and what a layer keeps of each token or request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from fp8plan.model.precision import FP8_BLOCK

CacheKind: TypeAlias = Literal["full", "sliding", "chunked", "latent", "state"]

# Inputs of a linear that share one scale. vLLM's online quantisation wants a whole number of such groups on each rank.
INPUT_BLOCK: Final = FP8_BLOCK.weight_block[1]


class Linear(NamedTuple):
    """One weight matrix as vLLM runs it on one tensor-parallel rank: y[m, n] = x[m, k] @ W[n, k]^T.

    What FP8 weights make of it is asked here by all: cost, memory, mismatch, settings, and what a target refuses.
    """

    name: str
    n: int
    k: int
    layers: int  # in how many layers it occurs; 1 in what a part says of itself
    quantisable: bool  # whether vLLM hands it the quantisation config
    all_reduce: bool  # row-parallel: followed by an all-reduce of [m, n] when tensor_parallel_size > 1
    parts: tuple[int, ...] = ()  # outputs of each matrix that is fused into it, in their order; () where it is one
    padded: bool = False  # whether vLLM pads it to whole blocks, as it does experts
    stored: Literal["", "bf16", "fp8"] = ""  # how an FP8 checkpoint holds it; "": vLLM quantises a BF16 checkpoint

    @property
    def quantised(self) -> bool:
        """Tell whether it is in FP8 on this rank, where weights are."""
        whole = self.padded or self.k % INPUT_BLOCK == 0
        return self.asked and (self.stored == "fp8" or whole)

    @property
    def asked(self) -> bool:
        """Tell whether it is to be in FP8, where weights are: whether that can be is another question."""
        return self.quantisable and self.stored != "bf16"

    @property
    def left_in_bf16(self) -> bool:
        """Tell whether it stays in BF16 only because its inputs on this rank are no whole blocks, or because an FP8
        checkpoint holds it so.
        """
        return self.quantisable and not self.quantised

    @property
    def elements(self) -> int:
        """Elements of one layer's matrix."""
        return self.n * self.k


class Cache(NamedTuple):
    """The cache of one layer on one rank.

    full, latent: K and V (or the latent) of every token
    sliding:      of the last `window` tokens
    chunked:      of the tokens of the current chunk of `window`
    state:        a state of fixed size for each request
    """

    kind: CacheKind
    elements_per_token: int = 0  # of the KV dtype
    window: int = 0  # tokens
    state_bytes: int = 0  # of one request
    index_bytes_per_token: int = 0  # keys of a token indexer, in a format of their own


class Size(NamedTuple):
    """A size that tensor parallelism has to cut into equal parts."""

    what: str  # as an error names it, after "it has"
    size: int
    replicated: bool = False  # more ranks than this many keep a copy each


@dataclass(frozen=True, slots=True)
class Holder:
    """The linears that an FP8 checkpoint holds in BF16, as every part knows them.

    bf16: their names; None: the checkpoint is not FP8
    """

    bf16: frozenset[str] | None = field(default=None, kw_only=True)

    def held(self, *linears: Linear) -> tuple[Linear, ...]:
        """The linears as the checkpoint holds them."""
        if self.bf16 is None:
            return linears
        return tuple(x._replace(stored="bf16" if x.name in self.bf16 else "fp8") for x in linears)


class Part(Protocol):
    """A mixer, an MLP or experts: what a layer is made of. hidden: the model's width. tp: tensor-parallel ranks."""

    def linears(self, hidden: int, tp: int = 1) -> tuple[Linear, ...]:
        """The matrices of one rank, as vLLM fuses and cuts them. The routed experts' own are not among them."""

    def vectors(self, hidden: int, tp: int = 1) -> int:
        """Elements on one rank that are in no linear: norms, biases, convolutions, gates. Always BF16."""

    def parameters(self, hidden: int) -> int:
        """Elements that a checkpoint holds."""

    def cuts(self) -> tuple[Size, ...]:
        """The sizes that tensor parallelism must divide."""


def column(name: str, n: int, k: int, *, quantisable: bool = True) -> Linear:
    """A matrix whose outputs stay where they are: cut by rows, or a copy on every rank."""
    return Linear(name, n, k, 1, quantisable, False)


def fused(name: str, parts: tuple[int, ...], k: int) -> Linear:
    """Matrices of one input that vLLM keeps as one, cut by rows: so many outputs of each on one rank."""
    return column(name, sum(parts), k)._replace(parts=parts)


def row(name: str, n: int, k: int) -> Linear:
    """A matrix whose inputs are cut, so that its outputs are added up over the ranks."""
    return Linear(name, n, k, 1, True, True)


def elements(linears: Iterable[Linear]) -> int:
    """Elements of one layer's matrices together."""
    return sum(linear.elements for linear in linears)


def kv_heads_of_rank(kv_heads: int, tp: int) -> int:
    """KV heads on one rank. vLLM copies them where there are more ranks than heads (QKVParallelLinear)."""
    return max(1, kv_heads // tp)
