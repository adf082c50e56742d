"""The group of a rendezvous takes data alone, and vLLM's own ends understand it."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import SyncError

pytestmark = pytest.mark.vllm

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Store:
    """A store as torch's, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: Any) -> None:
        if missing := set(keys) - set(self.values):
            raise RuntimeError(f"wait timeout after {timeout}, keys: {missing}")

    def delete_key(self, key: str) -> None:
        self.values.pop(key, None)


def ends(kind: str = "plain") -> tuple[Any, Any]:
    """A sender, fp8plan's or vLLM's own, and a receiver."""
    from vllm.distributed.utils import StatelessProcessGroup

    from fp8plan.runtime.apply.weight_sync.plain_group import PlainGroup

    store: Any = Store()
    sender = StatelessProcessGroup(0, 2, store)
    return (PlainGroup.of(sender) if kind == "plain" else sender), PlainGroup(1, 2, store)


@given(PLAIN)
def test_plain_values_come_from_either_kind_of_end(value: Any) -> None:
    for kind in ("plain", "vllm"):
        sender, receiver = ends(kind)
        sender.broadcast_obj(value, src=0)
        assert receiver.broadcast_obj(None, src=0) == value


def test_nccls_id_comes_from_vllms_own_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own code at both ends, but for NCCL itself."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    made = ncclUniqueId()
    made.internal[:] = bytes(range(128))

    class Library:
        def __init__(self, path: Any) -> None: ...

        def ncclGetRawVersion(self) -> int:
            return 22000

        def ncclGetVersion(self) -> str:
            return "2.20.0"

        def ncclGetUniqueId(self) -> Any:
            return made

    monkeypatch.setattr(pynccl, "NCCLLibrary", Library)
    monkeypatch.setattr(pynccl.PyNcclCommunicator, "_init_comm", lambda self, device: None)
    sender, receiver = ends("vllm")
    pynccl.PyNcclCommunicator(sender, 0)
    assert bytes(pynccl.PyNcclCommunicator(receiver, 0).unique_id.internal) == bytes(range(128))


def programs() -> list[Any]:
    """Objects whose pickles call something, or name what could be called."""
    import functools
    import subprocess

    def of(function: Any, *arguments: Any) -> Any:
        return type("Program", (), {"__reduce__": lambda _: (function, arguments)})()

    return [
        of(os.system, "true"),
        of(eval, "1"),
        of(subprocess.Popen, ["true"]),
        of(functools.partial, os.getpid),
        of(getattr, "", "join"),
        os.system,
        {"deep": [(of(exec, "pass"),)]},
        Exception("one of Python's own"),
    ]


@pytest.mark.parametrize("at", range(8))
def test_nothing_that_a_peer_sends_is_run(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends("vllm")
    sender.broadcast_obj(programs()[at], src=0)
    with pytest.raises(SyncError, match="which is not run; allowed: data, and NCCL's id"):
        receiver.broadcast_obj(None, src=0)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_data_are_an_error_of_ours(content: bytes) -> None:
    from fp8plan.runtime.apply.weight_sync.plain_group import read

    with suppress(SyncError):
        read(content)


def test_an_id_that_is_damaged_does_not_write_beyond_itself() -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    from fp8plan.runtime.apply.weight_sync.plain_group import read

    content = pickle.dumps(ncclUniqueId())
    long = content.replace(bytes(128), bytes(120) + b"12345678")
    assert bytes(read(long).internal)[-8:] == b"12345678"
    for cut in range(len(content)):
        with pytest.raises(SyncError):
            read(content[:cut])


DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8", "int64")


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3))
def test_tensors_come_bit_for_bit(dtype: str, shape: list[int]) -> None:
    import torch

    bits = torch.randint(0, 255, (torch.empty(shape).numel() * getattr(torch, dtype).itemsize,), dtype=torch.uint8)
    sent = bits.view(getattr(torch, dtype)).reshape(shape)
    sender, receiver = ends()
    sender.broadcast(sent, src=0)
    got = receiver.broadcast(torch.zeros(shape, dtype=sent.dtype), src=0)
    assert torch.equal(got.reshape(-1).view(torch.uint8), bits)


def test_tensors_with_gaps_come_as_their_values() -> None:
    import torch

    whole = torch.arange(12.0).reshape(3, 4)
    sender, receiver = ends()
    sender.broadcast(whole.T.requires_grad_(), src=0)
    got = receiver.broadcast(torch.zeros(3, 4).T, src=0)
    assert torch.equal(got, whole.T)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"dtype": "float32", "shape": [2]}\n',
        b'{"dtype": "float32", "shape": [2]}\n' + bytes(7),
        b'{"dtype": "float32", "shape": [2]}\n' + bytes(9),
        b'{"dtype": "float32", "shape": [1, 2]}\n' + bytes(8),
        b'{"dtype": "bfloat16", "shape": [4]}\n' + bytes(8),
        pickle.dumps([1.0, 2.0]),
    ],
)
def test_anything_but_the_tensor_that_was_announced_is_refused(content: bytes) -> None:
    import torch

    sender, receiver = ends()
    sender.store.set("broadcast_tensor/0/0", content)
    with pytest.raises(SyncError, match=r"bytes came, which begin with .*allowed: .*then 8 bytes of raw values"):
        receiver.broadcast(torch.zeros(2), src=0)


def test_the_communicator_of_a_cpu_is_destroyed_as_nccls_is() -> None:
    """As vLLM's engine does at its shutdown from 0.32 on."""
    import torch

    from fp8plan.runtime.apply.worker.backend import StoreCommunicator

    for kind in ("plain", "vllm"):
        communicator = StoreCommunicator(ends(kind)[0])
        communicator.broadcast(torch.zeros(2), src=0)
        communicator.destroy()
        assert communicator.disabled
        with pytest.raises(AttributeError):
            communicator.broadcast(torch.zeros(2), src=0)


def test_a_silent_peer_is_not_waited_for() -> None:
    import torch

    _, receiver = ends()
    receiver.limit_s = 0.5
    with pytest.raises(SyncError, match=r"nothing came from the trainer for 0.5 s, or it has died: wait timeout"):
        receiver.broadcast(torch.zeros(2), src=0)
    for refused in (receiver.recv_obj, receiver.recv):
        with pytest.raises(NotImplementedError):
            refused(torch.zeros(2), 0)
