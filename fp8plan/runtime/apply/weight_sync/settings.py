"""The settings of an engine's syncs."""

from __future__ import annotations

from dataclasses import dataclass

from fp8plan.checks import instance, whole
from fp8plan.errors import ConfigError
from fp8plan.model.precision import find_precision
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.apply.weight_sync.manifest import FORMATS


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Settings of an engine's syncs.

    weights_in:  format that is sent: "bf16", or "fp8_block" (E4M3 and FP32 scales where the engine holds FP8, see
                 manifest.FORMATS)
    in_place:    write live tensors directly where a trial has shown vLLM's own bits; False: always reload by vLLM
    chunk_bytes: size of one message of tensors
    rollback:    "cpu" or "cuda": keep a copy of the weights there, to return to after a failure; None: no copy
    delta:       "cpu" or "cuda": keep a copy of what the engine holds there, send only what has changed, and imply
                 weights_in="fp8_block"; None: send all weights
    top_k:       with delta, send the most useful changes only; None: all of them, so that no bit differs
    look_every:  with delta, an unchanged tensor is compared with the engine's once in so many syncs; 0: never. If they
                 differ, all weights are sent
    samples:     tensors that are compared with the sent ones after a sync

    Raises ConfigError for values out of range.
    """

    weights_in: str = "bf16"
    in_place: bool = True
    chunk_bytes: int = 1 << 30
    rollback: str | None = None
    delta: str | None = None
    top_k: TopK | None = None
    look_every: int = 20
    samples: int = 4

    @classmethod
    def planned(cls, preset: str, remote: bool) -> SyncSettings:
        """Return the settings for a preset. FP8 engines get E4M3 and scales over a link (`remote`): half the bytes.

        Else BF16 is sent: on the engine's own GPUs quantising is one read and one write.
        """
        return cls(weights_in="fp8_block" if remote and find_precision(preset).weights == "fp8_block" else "bf16")

    def __post_init__(self) -> None:
        if self.weights_in not in FORMATS:
            raise ConfigError(f"weights_in is {self.weights_in!r}; allowed: {', '.join(FORMATS)}")
        for name, least in (("chunk_bytes", 1), ("samples", 0), ("look_every", 0)):
            whole(name, getattr(self, name), least)
        for name in ("rollback", "delta"):
            if (place := getattr(self, name)) not in (None, "cpu", "cuda"):
                raise ConfigError(f"{name} is {place!r}; allowed: None, 'cpu', 'cuda' (where the copy is kept)")
        if self.top_k is not None:
            instance("top_k", self.top_k, TopK, "TopK(share=1e-4)")
        if self.top_k is not None and self.delta is None:
            raise ConfigError("top_k is set without delta; type: SyncSettings(delta='cpu', top_k=TopK(share=1e-4))")
        if self.delta is not None:
            object.__setattr__(self, "weights_in", "fp8_block")
