"""Parts of a flat tensor, of which some may be empty."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.runtime.apply.weight_sync.delta.parts import cuts_of, owners_of, sums

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_each_value_has_its_part(counts: list[int]) -> None:
    owners = owners_of(cuts_of(counts, CPU), sum(counts))
    assert owners.tolist() == [part for part, count in enumerate(counts) for _ in range(count)]


@given(st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=8))
def test_sums_are_those_of_each_part(parts: list[list[int]]) -> None:
    values = torch.tensor([value for part in parts for value in part], dtype=torch.int64)
    assert sums(values, cuts_of([len(part) for part in parts], CPU)).tolist() == [sum(part) for part in parts]
