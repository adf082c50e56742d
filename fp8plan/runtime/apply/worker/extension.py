"""The methods inside vLLM's worker: mixed into its class by `worker_extension_cls`, called through `collective_rpc`.

Every method returns plain data that vLLM can send between processes. An error is returned too, as {"error": text}.
An exception would cross a process as text without a type, and vLLM takes some for the engine's death.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError, Fp8PlanError, LostEngineError, text_of
from fp8plan.runtime.apply.weight_sync.amax import AmaxRecorder
from fp8plan.runtime.apply.weight_sync.kv_scales import attention_layers, live_scales, set_scales
from fp8plan.runtime.apply.weight_sync.manifest import Entry
from fp8plan.runtime.apply.weight_sync.nccl import Rendezvous
from fp8plan.runtime.apply.weight_sync.stream import arrived
from fp8plan.runtime.apply.worker.comparison import Comparison
from fp8plan.runtime.apply.worker.facts import digest, examine, worker_facts, zero_kv
from fp8plan.runtime.apply.worker.live_weights import LiveWeights

if TYPE_CHECKING:
    import torch

    from fp8plan.runtime.apply.worker.nccl_receive import Receiver
    from fp8plan.runtime.apply.worker.updates import Updates

    # Tensors of this process, or the place where another process has put them (weight_sync.stream.Channel).
    Chunk = Sequence[torch.Tensor] | Mapping[str, Any]

EXTENSION = "fp8plan.runtime.apply.worker.extension.Fp8PlanWorker"


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Make a method answer {"ok": result}, or {"error": text} for an exception."""

    @functools.wraps(method)
    def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"ok": method(*args, **kwargs)}
        except Fp8PlanError as error:
            return {"error": str(error), "lost": isinstance(error, LostEngineError)}
        except Exception as error:  # of vLLM or torch: the sync fails, the engine lives
            return {"error": text_of(error)}

    return answer


class Fp8PlanWorker:
    """The mixin. Its names start with fp8plan_, so that they meet none of vLLM's."""

    device: Any  # an attribute of vLLM's worker, as are the next two
    model_runner: Any
    weight_transfer_engine: Any
    _fp8plan_stage: tuple[Any, Any] = None, None  # address and memory of the chunks that another process sends

    @answering
    def fp8plan_facts(self) -> dict[str, Any]:
        """Read this worker's facts: versions, kernels, E8M0, dtypes, CUDA graphs, memory (apply.worker.facts)."""
        return worker_facts(self)

    @answering
    def fp8plan_prepare(self, manifest: Sequence[Sequence[Any]], in_place: bool, number: int) -> dict[str, Any]:
        """Check a manifest in a dry run. `fp8plan_begin` takes its number."""
        entries = tuple(Entry(name, dtype, tuple(shape)) for name, dtype, shape in manifest)
        prepared = self._fp8plan_weights().prepare(entries, in_place, number)
        quantised = [name for name, moves in prepared.binding.moves.items() if any(m.scale is not None for m in moves)]
        return {
            "groups": list(prepared.groups),
            "quantised": quantised,
            "wide": list(prepared.wide),
            "reloaded": [number for number, entry in enumerate(prepared.manifest) if entry.name in prepared.reloads],
            "taken": list(prepared.taken),
            "twins": [list(group) for group in prepared.twins],
        }

    @answering
    def fp8plan_begin(
        self, number: int, samples: int, version: int, keep: str | None, base: str | None = None, look_every: int = 0
    ) -> None:
        """Open a sync of a prepared manifest, as LiveWeights.begin takes it."""
        live = self._fp8plan_weights()
        live.open()
        live.begin(number, samples, version, keep, base, look_every)

    @answering
    def fp8plan_load(self, numbers: Sequence[int], sent: Chunk) -> None:
        """Write tensors."""
        with self._fp8plan_arrived(sent) as tensors:
            self._fp8plan_weights().load(numbers, tensors)

    @answering
    def fp8plan_patch(self, numbers: Sequence[int], sent: Chunk) -> None:
        """Write patches (fp8plan.runtime.apply.weight_sync.delta.patch)."""
        with self._fp8plan_arrived(sent) as patches:
            self._fp8plan_weights().patch(numbers, patches)

    @answering
    def fp8plan_join(self, where: dict[str, Any]) -> None:
        """Meet a trainer that will send tensors by itself (fp8plan.runtime.apply.weight_sync.nccl)."""
        from fp8plan.runtime.apply.worker.nccl_receive import Receiver

        self._fp8plan_receiver = Receiver(self, self._fp8plan_weights(), Rendezvous(**where))

    @answering
    def fp8plan_receive(self, now: bool) -> int | None:
        """Take the trainer's tensors and count the broadcasts; with now=False only check that they could come."""
        receiver = self._fp8plan_connected()
        if now:
            return receiver.receive()
        receiver.expect()
        return None

    @answering
    def fp8plan_receive_patches(self, numbers: Sequence[int], lengths: Sequence[int]) -> int:
        """Take a chunk of patches that the trainer sends by itself.

        numbers: of the tensors that are patched; lengths: bytes of each patch
        """
        return self._fp8plan_connected().receive_patches(numbers, lengths)

    @answering
    def fp8plan_finish(self, patches: int = 0) -> dict[str, Any]:
        self._fp8plan_stage = None, None
        return self._fp8plan_weights().finish(patches)

    @answering
    def fp8plan_commit(self, stamp: str | None = None) -> None:
        self._fp8plan_weights().commit(stamp)

    @answering
    def fp8plan_abort(self, why: str) -> bool:
        """End a sync that failed, if one is open. Return True if the weights from before it are here, and may serve."""
        self._fp8plan_stage = None, None
        return self._fp8plan_weights().abort(why)

    @answering
    def fp8plan_zero_kv(self) -> int:
        """Zero the KV cache, while no request runs; return its bytes."""
        return zero_kv(self)

    @answering
    def fp8plan_record_amax(self, on: bool) -> dict[str, list[float]] | None:
        """Start recording, or stop and return {layer: [q, k, v]}, the largest magnitudes since."""
        if on:
            self._fp8plan_recorder: AmaxRecorder | None = AmaxRecorder(self.model_runner.get_model())
            return None
        recorder, self._fp8plan_recorder = self._fp8plan_recorder, None
        return None if recorder is None else recorder.stop()

    @answering
    def fp8plan_set_kv_scales(self, scales: dict[str, Sequence[float]]) -> None:
        set_scales(self.model_runner.get_model(), scales)

    @answering
    def fp8plan_attention_layers(self) -> list[str]:
        return [name for name, _ in attention_layers(self.model_runner.get_model())]

    @answering
    def fp8plan_kv_scales(self) -> dict[str, dict[str, float]]:
        return live_scales(self.model_runner.get_model())

    @answering
    def fp8plan_digests(self) -> dict[str, int]:
        """Return parameter -> a checksum of every bit and its place: equal weights have equal digests."""
        return {name: digest(tensor.data) for name, tensor in self.model_runner.get_model().named_parameters()}

    @answering
    def fp8plan_attach(self) -> dict[str, Any]:
        """Note that fp8plan's part of a server's front end is there; return worker_facts."""
        self.weight_transfer_engine.attached = True
        return worker_facts(self)

    @answering
    def fp8plan_status(self) -> dict[str, Any]:
        """Read the state of a server's weights (runtime.apply.worker.updates) and its KV scales."""
        updates = self._fp8plan_updates()
        live = updates.live
        return {
            "version": live.version,
            "stamp": live.stamp,
            "refusal": live.refusal,
            "last_update": updates.report,
            "kv_scales": live_scales(self.model_runner.get_model()),
        }

    @answering
    def fp8plan_examine(self) -> dict[str, Any]:
        """Look for weights that no sync wrote, and for weights that cannot be right (runtime.apply.worker.facts)."""
        return examine(self)

    @answering
    def fp8plan_compare(self, number: int) -> None:
        """Begin to compare the live weights with the tensors of a prepared manifest."""
        prepared = self._fp8plan_weights().still_prepared(number)
        self._fp8plan_comparison = Comparison(prepared, self.device)

    @answering
    def fp8plan_compare_with(self, numbers: Sequence[int], sent: Chunk) -> None:
        with self._fp8plan_arrived(sent) as tensors:
            self._fp8plan_comparison.take(numbers, tensors)

    @answering
    def fp8plan_compared(self) -> dict[str, Any]:
        self._fp8plan_stage = None, None
        result: dict[str, Any] = self._fp8plan_comparison.result()
        del self._fp8plan_comparison
        return result

    @contextmanager
    def _fp8plan_arrived(self, sent: Chunk) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the tensors of a chunk. The sender may overwrite memory that it shares once this ends."""
        if not isinstance(sent, Mapping):
            yield sent
            return
        import torch

        yield arrived(self, sent)
        torch.get_device_module(self.device).synchronize(self.device)

    def _fp8plan_connected(self) -> Receiver:
        """Return the end of a transfer. Raises ConfigError if there is none."""
        receiver: Receiver | None = getattr(self, "_fp8plan_receiver", None)
        if receiver is None:
            raise ConfigError(
                "no trainer is connected; type: engine.join_transfer(where) (fp8plan.runtime.apply.weight_sync.nccl)"
            )
        return receiver

    def _fp8plan_updates(self) -> Updates:
        """Return the updates of a server's weights. Raises ConfigError where the weight-transfer backend is another."""
        if (updates := self._fp8plan_of_server()) is None:
            backend = type(self.weight_transfer_engine).__name__
            hint = """--weight-transfer-config '{"backend": "fp8plan"}'"""
            raise ConfigError(f"the weight-transfer backend is {backend}; allowed: fp8plan; type: vllm serve {hint}")
        return updates

    def _fp8plan_of_server(self) -> Updates | None:
        """Return the updates of fp8plan's weight-transfer backend; None without it."""
        return getattr(getattr(self, "weight_transfer_engine", None), "updates", None)

    def _fp8plan_weights(self) -> LiveWeights:
        if (updates := self._fp8plan_of_server()) is not None:
            return updates.live
        if not hasattr(self, "_fp8plan_live"):
            self._fp8plan_live = LiveWeights(self)
        return self._fp8plan_live
