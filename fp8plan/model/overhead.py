"""What is neither a GEMM nor attention: small kernels, sampling, and the host.

On the GPU, per layer: norms, rotary embedding, activation, residual (`layer_cost`); per step: input preparation and
sampling (`sampling_cost`). On the host: scheduling, and launching what is not in a CUDA graph (`host_cost`). With
async scheduling the host prepares step t + 1 while the GPU runs step t, so a step lasts as long as the slower of them.
Once per rollout the requests have to reach the engine (`start_cost`).
"""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.attention import heads_per_rank
from fp8plan.model.batch import Array, StepBatch
from fp8plan.model.cost import Cost, constant, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP32_BYTES
from fp8plan.model.profile import Profile


def layer_cost(m: Array, shape: ModelShape, tensor_parallel: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of the small kernels of all layers at m tokens, shape (steps,)."""
    fixed, efficiency = "overhead.layer_seconds", "overhead.bandwidth_efficiency"
    query, key_value = heads_per_rank(shape, tensor_parallel)
    norms = 2 * 4 * shape.hidden_size  # two add-and-norms, each two vectors in and two out
    rotary = 2 * (query + 2 * key_value) * shape.head_dim  # in and out
    activation = 3 * _inner_size(shape) // tensor_parallel  # gate and up in, product out
    moved = m * float((shape.num_layers * (norms + rotary) + activation) * BF16_BYTES)
    per_layer = constant(fixed, profile.coefficient(fixed) * shape.num_layers, m)
    return per_layer + traffic(moved, gpu.memory_bandwidth, (efficiency, profile.coefficient(efficiency)))


def _inner_size(shape: ModelShape) -> int:
    """Activated elements per token, summed over layers; the routed experts' own are part of the grouped GEMM."""
    if shape.experts is None:
        return shape.num_layers * shape.intermediate_size
    dense = shape.num_layers - shape.experts.layers
    return dense * shape.intermediate_size + shape.experts.layers * shape.experts.shared_intermediate_size


def sampling_cost(batch: StepBatch, shape: ModelShape, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds between the last layer and the next token: input preparation, log-softmax and sampling, (steps,)."""
    step, passes = "overhead.step_seconds", "overhead.sampler_passes"
    once = batch.sampled_requests * float(shape.vocab_size * FP32_BYTES) / gpu.memory_bandwidth
    sampler = once * profile.coefficient(passes)
    return constant(step, profile.coefficient(step), sampler) + Cost(sampler, {passes: sampler})


def host_cost(batch: StepBatch, eager: Array, shape: ModelShape, profile: Profile) -> Cost:
    """Seconds the host needs per step; `eager` (bool, (steps,)) says which steps run outside a CUDA graph."""
    step, request, launch = ("host.step_seconds", "host.request_seconds", "host.eager_layer_seconds")
    requests = batch.decode_requests + batch.prefill_requests
    per_request = requests * profile.coefficient(request)
    launches = np.where(eager, profile.coefficient(launch) * shape.num_layers, 0.0)
    fixed = constant(step, profile.coefficient(step), per_request)
    return fixed + Cost(per_request + launches, {request: per_request, launch: launches})


def start_cost(requests: int, prompt_tokens: int, profile: Profile) -> Cost:
    """Seconds a rollout of `requests` with `prompt_tokens` in all takes beside its steps: shape (1,).

    vLLM's front end checks all prompts before it sends the first to the engine, which hashes each for its prefix cache.
    """
    fixed, each, token = ("host.start_seconds", "host.arrival_seconds", "host.prompt_token_seconds")
    arrivals = np.array([requests * profile.coefficient(each)])
    tokens = np.array([prompt_tokens * profile.coefficient(token)])
    fixed_cost = constant(fixed, profile.coefficient(fixed), arrivals)
    return fixed_cost + Cost(arrivals + tokens, {each: arrivals, token: tokens})
