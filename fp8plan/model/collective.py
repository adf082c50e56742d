"""All-reduces of tensor parallelism.

    seconds = latency + 2 (p - 1) / p * bytes / (link bandwidth * efficiency)

The ring's traffic; a one-shot kernel for small messages moves more but is bounded by the latency anyway. Without NVLink
the link is PCIe, with its own efficiency (every GPU shares the host's switch).
"""

from __future__ import annotations

from fp8plan.model.batch import Array
from fp8plan.model.cost import Cost, constant, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.profile import Profile


def all_reduce_cost(message_bytes: Array, ranks: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one all-reduce of `message_bytes` over `ranks` GPUs of one host, shape (steps,)."""
    link = "nvlink" if gpu.nvlink_bandwidth is not None else "pcie"
    bandwidth = gpu.nvlink_bandwidth if gpu.nvlink_bandwidth is not None else gpu.pcie_bandwidth
    latency, efficiency = f"collective.{link}.latency_seconds", f"collective.{link}.bandwidth_efficiency"
    moved = message_bytes * (2 * (ranks - 1) / ranks)
    return constant(*profile.named(latency), message_bytes) + traffic(moved, bandwidth, profile.named(efficiency))
