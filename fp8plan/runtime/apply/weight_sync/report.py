"""The report of a sync."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fp8plan.runtime.apply.weight_sync.kv_scales import Scales


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of a sync.

    version:      number of the weights that serve now, counted from 1
    seconds:      time of each phase (prepare, begin, load, finish, kv_scales, reset, score) and "total"; "check" is the
                  self-check's part of begin, load and finish
    tensors, bytes: sent in all
    patched:      True if only what has changed was sent
    looked:       unchanged tensors that were compared with the engine's, by digests (SyncSettings.look_every)
    healed:       why patches were refused and all weights sent; None: they were not
    rounded:      tensors that came in FP32, and that the engine holds in BF16 or FP8
    residual:     RMS of the changes that top_k has left out, over the weights' RMS; 0 without top_k. After
                  Follower.pull it is 0, because only the Publisher knows it
    chunks:       number of messages
    layers:       dtype of their weights -> modules of one rank
    in_place, reloaded: modules written directly, and by vLLM's layerwise reload
    why_reloaded: kind of module -> why vLLM must load it
    ignored:      tensors that vLLM leaves out (a tied lm_head)
    compared:     sampled tensors written in place that equal the sent ones (Samples in apply.worker.comparison); 0
                  if vLLM reloads all
    weight_error: RMS error of the sampled quantised weights, a fraction: 2.6% for Gaussian ones; reported, not judged
    kv_scales:    layer -> scales of q, k, v; None with a BF16 KV cache
    kv_source:    name of their source
    kv_clipped:   layers that fixed scales clip -> largest |k| or |v| over what their scales can store
    scored_k3:    mean k3 per token of the scored sequence; None without one
    checks:       result of each worker's self-check, by rank: "compared", "weight_error", "seconds"
    """

    version: int
    seconds: Mapping[str, float]
    tensors: int
    bytes: int
    chunks: int
    layers: Mapping[str, int]
    in_place: int
    reloaded: int
    why_reloaded: Mapping[str, str]
    ignored: Sequence[str]
    compared: int
    weight_error: float | None
    kv_scales: Scales | None = None
    kv_source: str | None = None
    scored_k3: float | None = None
    checks: Sequence[Mapping[str, Any]] = ()
    patched: bool = False
    looked: int = 0
    healed: str | None = None
    residual: float = 0.0
    rounded: int = 0
    kv_clipped: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the report as a server's status holds it, with the date."""
        left_out = ("checks", "healed", "kv_scales", "kv_source", "residual", "scored_k3")
        fields = {name: value for name, value in asdict(self).items() if name not in left_out}
        return fields | {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}

    def __str__(self) -> str:
        """Return one line for a log."""
        what = "patches" if self.patched else "tensors"
        text = f"weights {self.version} serve: {self.tensors} {what}, {self.bytes / 1e6:,.1f} MB"
        text += f" in {self.seconds['total']:.3f} s, {self.in_place} modules written in place"
        text += f", {self.reloaded} reloaded by vLLM, {self.compared} samples as sent"
        if self.looked:
            text += f", {self.looked} unchanged ones compared"
        if self.healed is not None:
            text += f", all sent because {self.healed}"
        if self.weight_error is not None:
            text += f", weight error {self.weight_error:.2%}"
        if self.rounded:
            text += f", {self.rounded} rounded from FP32"
        if self.kv_source is not None:
            text += f", KV scales from {self.kv_source}"
        if self.kv_clipped:
            text += f", {len(self.kv_clipped)} layer(s) clip K or V"
        if self.scored_k3 is not None:
            text += f", k3 {self.scored_k3:.1e} to the trainer"
        return text
