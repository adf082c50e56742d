"""The experts of each token, which an engine returns for router replay: bytes, and the seconds that they take.

vLLM's enable_return_routed_experts, in 0.31 to 0.33: each MoE layer copies the chosen experts into a buffer on the GPU
(fused_moe/routed_experts_capturer.py). After a step they are copied to the host, where Python files the rows of each
request, and sends them to the front end (vllm/distributed/aux_output_connector). 0.30 does the same work in its
scheduler.
The host's part adds to that of scheduling, as the rows must be there before the scheduler goes on. When a request ends,
the front end joins its rows, and only the last requests wait for that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fp8plan.model.architecture import Experts, ModelShape
from fp8plan.model.cost.base import Array, Cost, StepBatch, constant, paced, times
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.profile import HOST_PACE, Profile

ON_GPU, ON_HOST = "routes", "host.routes"  # kernels, as prefixes of coefficients
MOST_IN_A_BYTE: Final = 256  # experts whose numbers vLLM returns as uint8; more are uint16
ON_GPU_BYTES: Final = 4  # of an expert's number in the buffer, an int32
CONCURRENT_STEPS: Final = 2  # steps in flight with async scheduling


class RouteBytes(NamedTuple):
    """The bytes of returned experts.

    token:   of one token; layers without experts count, too
    device:  of the buffer on each GPU, which vLLM's plan of the memory leaves out
    host:    of the store in a replica's process, which holds as many tokens as the KV cache, and of blocks in flight
    rollout: of all prompts and responses of a rollout, which go to the trainer
    """

    token: int
    device: int
    host: int
    rollout: int


def route_bytes(shape: ModelShape, limits: EngineLimits, kv_cache_tokens: int, tokens: int) -> RouteBytes:
    """The bytes of returned experts.

    shape:           of a model with experts
    kv_cache_tokens: tokens of a replica's KV pool
    tokens:          of all prompts and responses of a rollout
    """
    every = [experts for experts, _ in shape.parts_of(Experts)]
    numbers = shape.num_layers * max(experts.choices_per_token for experts in every)
    token = numbers * (1 if max(experts.num_experts for experts in every) <= MOST_IN_A_BYTE else 2)
    requests, block = int(limits.max_num_seqs), int(limits.block_size)
    blocks = CONCURRENT_STEPS * (-(-int(limits.max_num_batched_tokens) // block) + requests) + requests
    device = int(limits.max_num_batched_tokens) * numbers * ON_GPU_BYTES
    return RouteBytes(token, device, (kv_cache_tokens + blocks * block) * token, tokens * token)


def route_layers(shape: ModelShape) -> int:
    """The number of layers that copy their experts."""
    return sum(number for _, number in shape.parts_of(Experts))


def route_gpu_cost(like: Array, shape: ModelShape, profile: Profile) -> Cost:
    """Seconds of the GPU in each step: a small kernel for each MoE layer, and one for the step. like: shape (steps,)"""
    layers = times(np.full(like.shape, float(route_layers(shape))), *profile.named(f"{ON_GPU}.layer_seconds"))
    return layers + constant(*profile.named(f"{ON_GPU}.step_seconds"), like)


def route_host_cost(batch: StepBatch, graphed: Array, shape: ModelShape, profile: Profile) -> tuple[Cost, Cost]:
    """Seconds of the host in each step: those that add to scheduling, and launches outside of a CUDA graph.

    graphed: bool (steps,), True if a step is small enough for the CUDA graphs
    """
    counts = {
        "request_seconds": batch.decode_requests + batch.prefill_requests,
        "prompt_token_seconds": batch.prefill_tokens,
        "step_seconds": np.ones(graphed.shape),
    }
    filing = [times(count, *profile.named(f"{ON_HOST}.{name}")) for name, count in counts.items()]
    eager = np.where(graphed, 0.0, float(route_layers(shape)))
    launching = times(eager, *profile.named(f"{ON_HOST}.launch_seconds"))
    return paced(sum(filing[1:], filing[0]), HOST_PACE, profile), paced(launching, HOST_PACE, profile)


def route_end_cost(tokens: float, profile: Profile) -> Cost:
    """Seconds of the front end after the last step, shape (1,). tokens: of all requests that end in it"""
    return paced(times(np.array([tokens]), *profile.named(f"{ON_HOST}.end_token_seconds")), HOST_PACE, profile)
