"""Ranks that hold pieces of the same sequences: all that they say and weigh is what one process does, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mismatch_batches import sharing_sequences

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.measure import pack
from fp8plan.runtime.watch.mismatch.pieces import places_of
from fp8plan.runtime.watch.monitor.monitor import Monitor

torch = pytest.importorskip("torch")


@given(
    st.integers(1, 4).flatmap(
        lambda rows: st.lists(st.lists(st.integers(0, 3), min_size=rows, max_size=rows), min_size=1, max_size=4)
    )
)
def test_the_places_of_pieces(lengths: list[list[int]]) -> None:
    """Rows one after the other, and in each the ranks' pieces."""
    found = places_of(np.array(lengths))
    whole: dict[int, tuple[int, int, int]] = {}
    for rank, (places, counts) in enumerate(zip(found, lengths, strict=True)):
        tokens = [(row, rank, number) for row, count in enumerate(counts) for number in range(count)]
        whole |= dict(zip(places.tolist(), tokens, strict=True))
    assert [whole[place] for place in range(len(whole))] == sorted(whole.values())
    assert len(whole) == np.sum(lengths)


@pytest.mark.slow
def test_ranks_that_share_sequences_weigh_them_as_one_process_does(tmp_path: Path) -> None:
    """Two share sequences and a third has its own. tests/runtime/mismatch_batches.py has what they compare."""
    torch.multiprocessing.spawn(sharing_sequences, args=(str(tmp_path),), nprocs=3)


@pytest.mark.parametrize("group", [2, "cp", True])
def test_pieces_without_their_group_are_refused(group: Any) -> None:
    batch = torch.full((2, 3), -1.0), torch.full((2, 3), -1.1), torch.ones(2, 3)
    says = r"sequence_group is .* on this rank; allowed: the process group .* whole sequences, or use level='token'"
    with pytest.raises(ConfigError, match=says):
        Monitor(sequence_group=group)
    with pytest.raises(ConfigError, match=says):
        pack(*batch, sequence_group=group)
