"""One sync for all replicas. To its procedure (apply.weight_sync.procedure) a fleet is an engine with more workers.

Every Call goes to every replica, and their answers are merged into those of one engine. So a sync is a commit in two
phases: a refusal of one replica ends it in all. "commit" comes when each has all weights, checked, and the same scales.
A replica that dies drops out, and the others go on. Nothing here does input or output; the tests run it without Ray.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Method, Rpc
from fp8plan.runtime.apply.weight_sync.manifest import dtype_name, dtype_named, gathered

if TYPE_CHECKING:
    import numpy as np
    import torch

ALIKE: Final = ("fp8plan_prepare",)  # all replicas must answer the same; the first one's answer is used


def addressed(call: Call, position: int, replicas: int, workers: int) -> Call:
    """Return a replica's part of a Call.

    Prompts are dealt out. Over NCCL each replica's workers get ranks of their own; all else goes to each as it is.

    position: number of the replica among those asked; workers: number in each replica
    """
    match call:
        case Generate(prompts, sampling, everywhere=False):
            return Generate(list(prompts)[position::replicas], sampling)
        case Rpc("fp8plan_join", (where,)):
            return Rpc("fp8plan_join", ({**where, "first_rank": where["first_rank"] + position * workers},))
    return call


def merged(call: Call, answers: Mapping[int, Any]) -> Any:
    """Put the replicas' answers to a Call together, as an engine would answer it.

    answers: number of the replica -> its answer, in the order of `addressed`
    """
    if isinstance(call, Generate) and call.everywhere:
        return [outputs for replica in answers.values() for outputs in replica]
    if isinstance(call, Generate):
        parts = list(answers.values())
        most = max(map(len, parts), default=0)
        return [part[row] for row in range(most) for part in parts if row < len(part)]
    if isinstance(call, Rpc):
        return _workers(call.method, answers)
    return None


def _workers(
    method: Method | Callable[..., Any], answers: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the answers of all workers; errors say whose they are."""
    every = []
    for replica, ranks in answers.items():
        for rank, answer in enumerate(ranks):
            every.append(dict(answer))
            if "error" in answer:
                every[-1]["who"] = _who(replica, rank, len(ranks))
    if method not in ALIKE or any("error" in answer for answer in every):
        return every
    (first, ours), *others = answers.items()
    for replica, theirs in others:
        if theirs != ours:
            text = f"it would load the manifest in another way than replica {first}; allowed: replicas of one plan"
            return [{"error": text, "who": _who(replica, 0, 1)}]
    return [dict(answer) for answer in ours]


def _who(replica: int, rank: int, ranks: int) -> str:
    return f"replica {replica}" + (f", rank {rank}" if ranks > 1 else "")


class Packed(NamedTuple):
    """A tensor as plain bytes, which processes on one host can read from the object store without a copy."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


def packed(tensors: Sequence[torch.Tensor]) -> list[Packed]:
    """Return tensors as bytes on the host."""
    import torch

    whole = (gathered(tensor).cpu().contiguous() for tensor in tensors)
    return [Packed(dtype_name(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy()) for t in whole]


def unpacked(parts: Sequence[Packed]) -> list[torch.Tensor]:
    """Return the tensors of `packed`, as views of its bytes. Nobody may write to them: other replicas read them."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        flat = [torch.from_numpy(part.data) for part in parts]
    return [bits.view(dtype_named(part.dtype)).view(part.shape) for bits, part in zip(flat, parts, strict=True)]
