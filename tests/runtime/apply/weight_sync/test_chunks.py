"""A trainer's stream, cut into messages of complete groups; also one whose tensors are sharded."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from sharded_trainer import checked, sharded, tensors

from fp8plan.errors import SyncError
from fp8plan.runtime.apply.weight_sync.stream import Channel, arrived, chunks

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


def test_each_worker_has_a_handle_of_its_own_to_a_gpus_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees a buffer when the receiver of each handle has let go of it, and never if a handle has two receivers.

    A CPU stands for the GPU: `receivers` counts as torch does.
    """
    from torch.multiprocessing import reductions

    buffer, receivers = torch.zeros(1024, dtype=torch.uint8), list[int]()

    def shared(tensor: Any) -> tuple[None, tuple[Any, ...]]:
        receivers.append(1)
        return None, (*range(6), None, len(receivers) - 1)

    def rebuilt(*parts: Any) -> Any:
        receivers[parts[7]] -= 1  # it lets go at once
        return buffer

    monkeypatch.setattr(reductions, "reduce_tensor", shared)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuilt)
    monkeypatch.setattr(Channel, "_shared", lambda *_: buffer)
    cpu = torch.device("cpu")
    workers = [SimpleNamespace(rank=rank, device=cpu, _fp8plan_stage=(None, None)) for rank in range(2)]
    channel = Channel("cuda", 1024, workers=2)
    for value in (1.0, 2.0):  # two chunks, of which the second needs no handle
        call = channel.message("fp8plan_load", [0], [torch.full((4,), value)])
        numbers, staged = call.arguments
        for worker in workers:
            assert arrived(worker, staged)[0].tolist() == 4 * [value]
    assert (call.method, numbers) == ("fp8plan_load", [0])
    address = staged["address"]
    assert pickle.loads(address[1][0]) != pickle.loads(address[1][1])
    assert receivers == [0, 0]
    assert channel.counts == {"tensors": 2, "bytes": 32, "chunks": 2}


@pytest.mark.slow
def test_shards_of_an_fsdp_trainer_are_gathered(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(sharded, args=(str(tmp_path),), nprocs=2)
