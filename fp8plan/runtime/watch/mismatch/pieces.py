"""Sequences whose tokens are spread over ranks, as under context or sequence parallelism, brought together.

The ranks of a sequence group have the same rows, and each rank a piece of every row, which may be empty. Here each gets
the whole rows: 8 bytes for every token of the group. All that follows is then as in one process, to the last bit.

Pieces follow each other in the order of the ranks. Where a trainer cuts in another order (a rank has the first and the
last part, say), figures by position in the response are of that order, and sums of a sequence differ by float64's
rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sums import ALONE, IntArray, gathered, raise_first

if TYPE_CHECKING:
    import torch


class Piece(NamedTuple):
    """A rank's piece of each row, or its rows brought together.

    sides:   [2, tokens] float32: the log-probs of trainer and engine, row after row
    lengths: [rows] number of valid tokens
    marked:  [rows] bool: rows with a token that the mask marks
    invalid: number of tokens left out because a log-prob was NaN or infinite
    """

    sides: torch.Tensor
    lengths: IntArray
    marked: Any
    invalid: int


def check_group(group: Any, everyone: Any = None) -> None:
    """Raise ConfigError for a sequence group that is none.

    everyone: the group of all that train together, which must include it; None: all of torch.distributed
    """
    from torch import distributed

    allowed = (
        "the process group of the ranks that hold pieces of the same sequences, such as mesh['cp'].get_group(). "
        "Without it, give whole sequences, or use level='token' without rejections of sequences"
    )
    if not isinstance(group, distributed.ProcessGroup) or distributed.get_rank(group) < 0:
        raise ConfigError(f"sequence_group is {group!r:.60} on this rank; allowed: {allowed}")
    together = () if everyone is ALONE else distributed.get_process_group_ranks(everyone)
    if outside := set(distributed.get_process_group_ranks(group)) - {*together}:
        raise ConfigError(
            f"group lacks rank {min(outside)} of sequence_group; allowed: a group with all ranks that hold pieces, or "
            "None for all ranks"
        )


def joined(own: Piece | None, group: Any, refusal: Exception | None = None) -> tuple[Piece, torch.Tensor]:
    """Whole rows, and the places [own tokens] of this rank's tokens among theirs. Every rank of the group calls it.

    own: this rank's piece; None if its input was refused, with `refusal` as the reason

    Raises the refusal; on the other ranks a ConfigError that quotes it, and on all for numbers of rows that differ.
    """
    import torch
    from torch import distributed

    pieces = gathered(None if own is None else own._replace(sides=torch.empty(0)), {}, group)
    if own is None or None in pieces:
        raise_first(refusal, group)
    rows = [len(piece.lengths) for piece in pieces]
    if len(set(rows)) > 1:
        raise ConfigError(
            f"ranks of the sequence group have {', '.join(map(str, rows))} rows; allowed: the same sequences on each, "
            "with a piece of every one, which may be empty"
        )
    lengths = np.array([piece.lengths for piece in pieces])
    places = [torch.from_numpy(place).to(own.sides.device) for place in places_of(lengths)]
    whole = own.sides.new_empty(2, int(lengths.sum()))
    for sides, place in zip(_exchanged(own.sides, lengths.sum(1), group), places, strict=True):
        whole[:, place] = sides
    marked, invalid = np.any([piece.marked for piece in pieces], axis=0), sum(piece.invalid for piece in pieces)
    return Piece(whole, lengths.sum(0), marked, invalid), places[distributed.get_rank(group)]


def places_of(lengths: IntArray) -> list[IntArray]:
    """For each rank the places of its tokens among those of all ranks, row after row, and within a row by rank.

    lengths: [ranks, rows] number of tokens
    """
    ends = lengths.T.cumsum().reshape(lengths.T.shape).T  # of each piece, among all tokens
    mine = lengths.cumsum(1)  # end of each piece among the rank's own tokens
    return [
        np.arange(count.sum()) + np.repeat(end - own, count)
        for count, end, own in zip(lengths, ends, mine, strict=True)
    ]


def _exchanged(sides: torch.Tensor, counts: IntArray, group: Any) -> list[torch.Tensor]:
    """The sides [2, tokens] of each rank. counts: [ranks] number of tokens"""
    import torch
    from torch import distributed

    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    buffer = torch.zeros(2, int(counts.max()), device=device)
    buffer[:, : sides.shape[1]] = sides
    received = [torch.empty_like(buffer) for _ in counts]
    distributed.all_gather(received, buffer, group=group)
    return [each[:, :count].to(sides.device) for each, count in zip(received, counts.tolist(), strict=True)]
