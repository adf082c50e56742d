"""What a set of engine steps is asked to do: the contract between the simulator and the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What engine steps are asked to do; every field is a float64 or int64 array of shape (steps,)."""

    decode_requests: Array  # requests that get one token each
    decode_kv_tokens: Array  # KV tokens those requests read, summed over them
    prefill_tokens: Array  # prompt tokens, or recomputed ones, in this step
    prefill_requests: Array  # chunks they are cut into
    prefill_kv_tokens: Array  # KV tokens the chunks read (context before + own), summed over chunks
    prefill_pairs: Array  # query-key pairs the chunks attend to, summed (attention FLOPs)
    sampled_requests: Array  # rows through lm_head and the sampler


def joined(batches: Sequence[StepBatch]) -> StepBatch:
    """The steps of several batches, one after the other."""
    return StepBatch(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in StepBatch.__slots__))
