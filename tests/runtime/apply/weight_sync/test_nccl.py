"""Weights that a trainer sends by itself: vLLM's own transfer code and rendezvous at both ends, and instead of NCCL's
broadcast one through the rendezvous's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from native_client import clear_streams
from tiny_models import CALIBRATION, generate, quantised, started, started_beside_references, weights

from fp8plan.errors import ConfigError, NotServingError, SyncError
from fp8plan.runtime.apply.weight_sync.delta.listing import formats
from fp8plan.runtime.apply.weight_sync.manifest import Entry, manifest_of
from fp8plan.runtime.apply.weight_sync.nccl import (
    RemoteSource,
    Rendezvous,
    TrainerTransfer,
    agree,
    connect,
    digest,
    misaligned,
    working,
)

pytestmark = pytest.mark.vllm

BUFFER = 300_000  # bytes: some broadcasts for a tiny model, with fused groups cut in two


class StoreCommunicator:
    """PyNcclCommunicator's part that transfers use, without NCCL."""

    def __init__(self, group: Any, device: Any) -> None:
        import torch

        self.device = torch.device("cpu")  # as vLLM's has one
        self.group, self.rank, self.disabled = group, group.rank, False
        self.broadcasts = 0
        self.aborted = threading.Event()
        opened.append(self)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        if self.disabled:
            return  # as vLLM's: the tensor stays as it is
        self.broadcasts += 1
        key = f"broadcast_tensor/{src}/{self.group.broadcast_recv_src_counter[src]}"
        while self.rank != src and not self.group.store.check([key]):
            if self.aborted.wait(0.001):
                return  # as a kernel that was aborted
        tensor.copy_(self.group.broadcast(tensor, src))

    def destroy(self) -> None:
        self.disabled = True
        self.aborted.set()


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


opened: list[StoreCommunicator] = []


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", StoreCommunicator)
    opened.clear()
    yield
    clear_streams()


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("dense", "fp8_block"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("moe", "bf16"), ("ragged", "fp8_block"))),
    ],
)
def test_what_a_trainer_sends_serves_as_in_a_fresh_engine(kind: str, precision: str) -> None:
    with started_beside_references(kind, precision) as (engine, references):
        transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
        for which in "bab":
            sent = weights(kind, which)
            report = engine.sync_weights(transfer.source(sent))
            assert generate(engine) == references[which]
            assert (report.tensors, report.bytes) == (len(sent), sum(tensor.nbytes for tensor in sent.values()))
            assert 1 < report.chunks == opened[0].broadcasts
            assert report.compared > 0
            opened[0].broadcasts = 0


def test_quantised_by_the_trainer_with_calibrated_kv_scales() -> None:
    with started_beside_references("dense", "fp8_block+fp8_kv", weights_in="fp8_block") as (engine, references):
        transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
        names = sorted(engine.ask(formats(engine.state)).fp8)
        for which in "ba":
            engine.sync_weights(transfer.source(quantised(weights("dense", which), names)), kv_prompts=CALIBRATION)
            assert generate(engine) == references[which]


def test_a_trainer_of_its_own_sends_when_it_is_told() -> None:
    with started_beside_references("dense", "fp8_block") as (engine, references):
        where = Rendezvous("127.0.0.1", free_port(), world_size=2, buffer_bytes=BUFFER)
        told, sent = threading.Event(), weights("dense", "b")
        manifest = manifest_of(sent)

        def train() -> None:
            transfer = TrainerTransfer(where, "cpu").ready()
            assert told.wait(60)
            transfer.send(iter(sent.items()), manifest)

        trainer = threading.Thread(target=train)
        trainer.start()
        engine.join_transfer(where)
        engine.sync_weights(RemoteSource(manifest, told.set))
        trainer.join()
        assert generate(engine) == references["b"]


class TestFaults:
    """One engine: every fault is followed by a sync that heals it."""

    @pytest.fixture(scope="class")
    def engine(self) -> Iterator[Any]:
        with started("dense", "a", "fp8_block") as engine:
            yield engine

    @pytest.fixture
    def transfer(self, engine: Any) -> Iterator[TrainerTransfer]:
        transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
        yield transfer
        engine.sync_weights(transfer.source(weights("dense", "a")))
        assert engine.serving

    def refuses(self, engine: Any) -> None:
        with pytest.raises(NotServingError):
            generate(engine)

    def test_no_trainer_was_ever_connected(self, engine: Any) -> None:
        vars(engine.llm.llm_engine.model_executor.driver_worker.worker).pop("_fp8plan_receiver", None)
        sent = weights("dense", "b")
        with pytest.raises(SyncError, match=r"no trainer is connected.*old weights serve"):
            engine.sync_weights(RemoteSource(manifest_of(sent), lambda: pytest.fail("started")))
        assert engine.serving

    def test_a_wrong_manifest_leaves_the_old_weights(self, engine: Any, transfer: TrainerTransfer) -> None:
        sent = weights("dense", "b")
        del sent["model.layers.1.self_attn.q_proj.weight"]
        with pytest.raises(SyncError, match=r"q_proj.*old weights serve"):
            engine.sync_weights(transfer.source(sent))
        assert engine.serving
        assert not opened[-1].broadcasts

    def test_the_trainer_was_given_another_manifest(self, engine: Any, transfer: TrainerTransfer) -> None:
        sent = weights("dense", "b")
        other = transfer.source(dict(reversed(sent.items())))
        before = generate(engine, cold=True)
        with pytest.raises(SyncError, match=r"different manifests.*the old weights serve"):
            engine.sync_weights(RemoteSource(manifest_of(sent), other.start))
        assert generate(engine, cold=True) == before

    def test_an_iterator_that_raises_half_way(self, engine: Any, transfer: TrainerTransfer) -> None:
        sent = weights("dense", "b")

        def broken() -> Iterator[Any]:
            yield from list(sent.items())[:9]
            raise OSError("the disk is full")

        with pytest.raises(SyncError, match="the trainer failed: OSError: the disk is full"):
            engine.sync_weights(transfer.source(broken(), manifest_of(sent)))
        self.refuses(engine)

    @pytest.mark.parametrize("fault", ["shape", "dtype", "order", "few", "many"])
    def test_what_comes_is_not_what_was_announced(self, engine: Any, transfer: TrainerTransfer, fault: str) -> None:
        import torch

        sent = weights("dense", "b")
        manifest, pairs = manifest_of(sent), list(sent.items())
        name, tensor = pairs[3]
        changes: dict[str, list[Any]] = {
            "shape": [*pairs[:3], (name, tensor[:1]), *pairs[4:]],
            "dtype": [*pairs[:3], (name, tensor.to(torch.float32)), *pairs[4:]],
            "order": [*pairs[:3], pairs[4], pairs[3], *pairs[5:]],
            "few": pairs[:-1],
            "many": [*pairs, ("model.more.weight", tensor)],
        }
        words = {"few": pairs[-1][0], "many": "model.more.weight was not announced"}
        with pytest.raises(SyncError, match=words.get(fault, "came; announced")):
            engine.sync_weights(transfer.source(iter(changes[fault]), manifest))
        self.refuses(engine)

    def test_nan_in_one_tensor_is_named(self, engine: Any, transfer: TrainerTransfer) -> None:
        sent = weights("dense", "b")
        sent["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
        with pytest.raises(SyncError, match=r"not finite: model.layers.2.mlp.down_proj.weight"):
            engine.sync_weights(transfer.source(sent))
        self.refuses(engine)

    def test_a_worker_that_fails_takes_the_rest_and_both_ends_hear_of_it(
        self, engine: Any, transfer: TrainerTransfer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fp8plan.runtime.apply.worker.live_weights import LiveWeights

        def fail(*_: Any) -> None:
            raise MemoryError("none left")

        source, sending = transfer.source(weights("dense", "b")), []
        start = RemoteSource(source.manifest, lambda: sending.append(source.start()))
        with monkeypatch.context() as patch:
            patch.setattr(LiveWeights, "load", fail)
            with pytest.raises(SyncError, match=r"worker 0 failed: MemoryError: none left.*the old weights serve"):
                engine.sync_weights(start)
        assert "MemoryError" in str(sending[0].exception(10))
        assert engine.serving  # as nothing was written

    def test_a_trainer_that_stalls_is_broken_off(self, engine: Any) -> None:
        transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER, limit_s=0.5)
        sent, goes_on = weights("dense", "b"), threading.Event()

        def stalling() -> Iterator[Any]:
            for place, pair in enumerate(sent.items()):
                assert place < 9 or goes_on.wait(60)
                yield pair

        sending: list[Any] = []
        source = transfer.source(stalling(), manifest_of(sent))
        with pytest.raises(SyncError, match=r"no tensor was sent or taken for 0.5 s"):
            engine.sync_weights(RemoteSource(source.manifest, lambda: sending.append(source.start())))
        self.refuses(engine)
        with pytest.raises(SyncError, match="broken off; connect"):
            engine.sync_weights(transfer.source(sent))
        goes_on.set()
        with pytest.raises(SyncError, match=r"no tensor was sent or taken for 0.5 s"):
            sending[0].result(10)
        engine.sync_weights(connect(engine.join_transfer, device="cpu").source(weights("dense", "a")))
        assert engine.serving

    @pytest.mark.filterwarnings("ignore:.*exceeds buffer_size_bytes")
    def test_a_slow_trainer_may_take_longer_than_the_limit_in_all(self, engine: Any) -> None:
        limit_s, sent = 1.0, weights("dense", "b")
        transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=1, limit_s=limit_s)

        def slow() -> Iterator[Any]:
            for pair in sent.items():
                time.sleep(2 * limit_s / len(sent))
                yield pair

        report = engine.sync_weights(transfer.source(slow(), manifest_of(sent)))
        assert report.seconds["load"] > limit_s
        assert report.chunks == len(sent)
        assert engine.serving


class TestPatches:
    """Syncs that send only what has changed, by a transfer."""

    @pytest.mark.parametrize(
        ("kind", "precision"), [("dense", "fp8_block"), pytest.param("moe", "fp8_block+fp8_kv", marks=pytest.mark.slow)]
    )
    def test_they_leave_the_bits_of_a_sync_of_all_tensors(self, kind: str, precision: str) -> None:
        with started_beside_references(kind, precision, delta="cpu") as (engine, references):
            transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
            for number, which in enumerate("babbba"):
                report = engine.sync_weights(transfer.source(weights(kind, which)), kv_prompts=CALIBRATION)
                assert (report.patched, report.healed) == (number > 0, None)
                assert generate(engine) == references[which]
                assert report.chunks == opened[0].broadcasts > 0
                if number in (3, 4):  # nothing has changed: digests of a few tensors
                    assert (report.tensors, report.chunks) == (0, 1)
                    assert report.looked > 0
                    assert report.bytes < 1000
                opened[0].broadcasts = 0

    @pytest.mark.slow
    def test_a_dict_is_sent_in_the_order_of_its_manifest(self) -> None:
        with started_beside_references("dense", "fp8_block", delta="cpu") as (engine, references):
            transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
            for number, which in enumerate("ba"):
                sent = weights("dense", which)
                manifest = tuple(reversed(manifest_of(sent)))
                report = engine.sync_weights(transfer.source(sent, manifest))
                assert (report.patched, report.healed) == (number > 0, None)
                assert generate(engine) == references[which]

    @pytest.mark.slow
    def test_those_of_other_weights_are_refused_and_all_tensors_follow(self) -> None:
        with started_beside_references("dense", "fp8_block", delta="cpu") as (engine, references):
            transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
            engine.sync_weights(transfer.source(weights("dense", "a")))
            engine.state.base.stamp = "another"
            report = engine.sync_weights(transfer.source(weights("dense", "b")))
            assert "start from other weights" in (report.healed or "")
            assert generate(engine) == references["b"]
            report = engine.sync_weights(transfer.source(weights("dense", "a")))
            assert (report.patched, report.healed) == (True, None)
            assert generate(engine) == references["a"]

    @pytest.mark.slow
    def test_a_worker_that_fails_midway_gets_all_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fp8plan.runtime.apply.worker.patches import Patches

        with started_beside_references("dense", "fp8_block", delta="cpu") as (engine, references):
            transfer = connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
            engine.sync_weights(transfer.source(weights("dense", "a")))

            def failing(*_: Any) -> None:
                raise MemoryError("none left")

            with monkeypatch.context() as patch:
                patch.setattr(Patches, "load", failing)
                report = engine.sync_weights(transfer.source(weights("dense", "b")))
            assert "MemoryError: none left" in (report.healed or "")
            assert generate(engine) == references["b"]

    def test_a_trainer_in_another_process_cannot_compare(self) -> None:
        with started("dense", "a", "fp8_block", delta="cpu") as engine:
            connect(engine.join_transfer, device="cpu", buffer_bytes=BUFFER)
            remote = RemoteSource(manifest_of(weights("dense", "b")), lambda: pytest.fail("started"))
            with pytest.raises(SyncError, match=r"in another process; allowed: transfer\.source"):
                engine.sync_weights(remote)
            assert engine.serving


def test_digests_tell_orders_and_dtypes_apart() -> None:
    first, second = Entry("a", "bfloat16", (2, 3)), Entry("b", "bfloat16", (3,))
    others = [(second, first), (first,), (first, second._replace(dtype="float32"))]
    assert len({digest((first, second)), *map(digest, others)}) == 4


def test_an_end_that_does_not_answer_ends_the_transfer() -> None:
    class Silent:
        disabled = False

        @property
        def group(self) -> Any:
            raise TimeoutError("nobody spoke")

        def destroy(self) -> None:
            self.disabled = True

    group = Silent()
    with pytest.raises(SyncError, match=r"does not answer \(TimeoutError\).*connect"):
        agree(group, "a manifest")
    with pytest.raises(ConfigError, match="connect the trainer and the engine again"):
        working(group)


def test_odd_sizes_before_wider_dtypes_cannot_be_packed() -> None:
    odd, scales = Entry("w", "float8_e4m3fn", (3, 5)), Entry("w_scale_inv", "float32", (1, 1))
    assert "w_scale_inv would begin at byte 15" in (misaligned((odd, scales), 1 << 20) or "")
    assert misaligned((odd, scales), 8) is None  # the first fills a broadcast
    assert misaligned((scales, odd), 1 << 20) is None


@pytest.mark.parametrize("wrong", [{"world_size": 1}, {"buffer_bytes": 0}, {"limit_s": 0}])
def test_rendezvous_says_what_is_allowed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        Rendezvous(**({"address": "localhost", "port": 1, "world_size": 2} | wrong))


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
