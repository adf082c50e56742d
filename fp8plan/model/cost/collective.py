"""The all-reduces of tensor parallelism.

    seconds = latency + 2 (p - 1) / p * bytes / (link bandwidth * efficiency)

This is the ring's traffic. A one-shot kernel for small messages moves more, but its latency dominates. Without NVLink
the link is PCIe, with its own efficiency (every GPU shares the host's switch).

Ranks on several nodes reduce inside each node. Then each GPU exchanges its share of the message over its own network
adapter. The two coefficients of this exchange are assumed, with wide intervals.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from fp8plan.model.cost.base import Array, Cost, constant, traffic, zero
from fp8plan.model.hardware import Gpu
from fp8plan.model.profile.profile import Profile

# bytes/s of one GPU in one direction: an adapter of 400 Gb/s each, as in DGX H100, H200 and B200.
NETWORK_BANDWIDTH: Final = 50e9
# Coefficient -> (value, sd of its log), for profiles that lack it. In public logs of nccl-tests a small all-reduce
# between two hosts takes tens of microseconds. Inside a host vLLM's own kernel takes five.
NETWORK: Final = {
    "collective.network.latency_seconds": (4e-5, 0.7),
    "collective.network.bandwidth_efficiency": (0.6, 0.4),
}


def with_network(profile: Profile) -> Profile:
    """A copy of `profile` with assumed values for the network coefficients that it lacks."""
    missing = {name: fact for name, fact in NETWORK.items() if name not in profile.coefficients}
    return replace(
        profile,
        coefficients=profile.coefficients | {name: value for name, (value, _) in missing.items()},
        log_covariance=profile.log_covariance | {name: {name: sd**2} for name, (_, sd) in missing.items()},
        notes=profile.notes | dict.fromkeys(missing, "assumed for all networks"),
    )


def all_reduce_cost(message_bytes: Array, ranks: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one all-reduce of `message_bytes` over `ranks` GPUs, shape (steps,).

    Raises ProfileError if the GPUs are on several nodes and `profile` has no network coefficients (`with_network`).
    """
    inside = min(ranks, gpu.gpus_per_node)
    cost = _inside(message_bytes, inside, gpu, profile) if inside > 1 else zero(message_bytes)
    if ranks == inside:
        return cost
    nodes = ceil(ranks / inside)
    latency, efficiency = NETWORK
    moved = message_bytes * (2 * (nodes - 1) / nodes / inside)
    cost = cost + constant(*profile.named(latency), message_bytes)
    return cost + traffic(moved, NETWORK_BANDWIDTH, profile.named(efficiency))


def _inside(message_bytes: Array, ranks: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of an all-reduce between GPUs of one node."""
    link = "nvlink" if gpu.nvlink_bandwidth is not None else "pcie"
    bandwidth = gpu.nvlink_bandwidth if gpu.nvlink_bandwidth is not None else gpu.pcie_bandwidth
    latency, efficiency = f"collective.{link}.latency_seconds", f"collective.{link}.bandwidth_efficiency"
    moved = message_bytes * (2 * (ranks - 1) / ranks)
    return constant(*profile.named(latency), message_bytes) + traffic(moved, bandwidth, profile.named(efficiency))
