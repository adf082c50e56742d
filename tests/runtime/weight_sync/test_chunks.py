"""A trainer's stream, cut into messages of complete groups; also one whose tensors are sharded."""

from __future__ import annotations

from typing import Any

import pytest
from sharded_trainer import checked, sharded, tensors

from fp8plan.errors import SyncError
from fp8plan.runtime.weight_sync.stream import chunks

torch = pytest.importorskip("torch")


def test_a_group_is_held_back_until_it_is_complete() -> None:
    found = [numbers for numbers, _ in chunks(tensors().items(), checked(), most=1)]
    assert found == [[1], [3], [0, 2, 4]]
    assert [numbers for numbers, _ in chunks(tensors().items(), checked(), most=10**9)] == [[1, 3, 0, 2, 4]]


def test_what_is_incomplete_at_the_end_comes_all_the_same() -> None:
    """The workers know better what is missing."""
    some = {name: tensor for name, tensor in tensors().items() if name != "k"}
    assert [numbers for numbers, _ in chunks(some.items(), checked(), most=1)] == [[1], [3], [0, 4]]


@pytest.mark.parametrize(("name", "says"), [("z", "z was not announced"), ("x", "x came twice")])
def test_a_name_comes_once_and_as_announced(name: str, says: str) -> None:
    with pytest.raises(SyncError, match=says):
        list(chunks([*tensors().items(), (name, torch.zeros(1))], checked(), most=1))


def test_inference_tensors_have_no_version_and_pass() -> None:
    with torch.inference_mode():
        some = tensors()
    assert len(list(chunks(some.items(), checked(), most=1))) == 3


@pytest.mark.slow
def test_shards_of_an_fsdp_trainer_are_gathered(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(sharded, args=(str(tmp_path),), nprocs=2)
