"""The parts of a step that are neither a GEMM nor attention: small kernels, sampling, and the host.

GPU, per layer: norms with the residual's addition, rotary embedding, activation, and gaps between kernels
(`layer_cost`). GPU, per step: input preparation and sampling (`sampling_cost`). Host: scheduling, and launches outside
of a CUDA graph (`host_cost`, `launch_cost`). With async scheduling the host prepares step t + 1 while the GPU runs step
t (`fp8plan.model.cost.step`). Once per rollout the requests reach the engine (`start_cost`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention, LayerInput, Mlp
from fp8plan.model.cost.base import (
    Array,
    Cost,
    StepBatch,
    constant,
    p_norm,
    paced,
    streaming_cost,
    times,
    traffic,
    zero,
)
from fp8plan.model.cost.mixers import KERNELS
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile.profile import HOST_PACE, Profile

GROUPS = "host.groups"


def layer_cost(m: Array, shape: ModelShape, tensor_parallel: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of the small kernels of all layers at m tokens, and of the gaps between kernels, shape (steps,)."""
    total = norm_cost(m, shape.hidden_size, gpu, profile).scaled(sum(layer.norms for layer in shape.layers))
    total = total + times(np.full(m.shape, layers_of_two_parts(shape)), *profile.named("overhead.layer_seconds"))
    for attention, number in shape.parts_of(Attention):
        total = total + rotary_cost(m, attention, tensor_parallel, gpu, profile).scaled(number)
    for latent, number in shape.parts_of(LatentAttention):
        total = total + latent_rotary_cost(m, latent, tensor_parallel, gpu, profile).scaled(number)
    for elements, number in _activations(shape, tensor_parallel, gpu).items():
        total = total + _elementwise("activation", m, elements, gpu, profile).scaled(number)
    return total


def layers_of_two_parts(shape: ModelShape) -> float:
    """Half the number of parts: the layers, if each has two. It decides the gaps between kernels, and the launches."""
    return sum(number for _, number in shape.counted) / 2


def norm_cost(m: Array, hidden: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one residual addition and norm of m rows: two vectors in and two out."""
    return _elementwise("norm", m, 4 * hidden, gpu, profile)


def rotary_cost(m: Array, attention: Attention, tensor_parallel: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one layer's rotary embedding, with the norms of Q and K if there are any: in and out."""
    query, key_value = attention.heads_of_rank(tensor_parallel)
    width = query * attention.head_dim + key_value * (attention.head_dim + attention.value_dim)
    return _elementwise("rotary", m, 2 * width, gpu, profile)


def latent_rotary_cost(m: Array, latent: LatentAttention, tensor_parallel: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one layer's rotary embedding of a part of each query and the key, and of the norms of the latents."""
    rotated = (latent.heads // tensor_parallel + 1) * latent.qk_rope_head_dim
    return _elementwise("rotary", m, 2 * (rotated + latent.kv_lora_rank + latent.q_lora_rank), gpu, profile)


def activation_cost(m: Array, inner: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one gated activation of m rows: gate and up in, product out."""
    return _elementwise("activation", m, 3 * inner, gpu, profile)


def _elementwise(name: str, m: Array, elements: int, gpu: Gpu, profile: Profile) -> Cost:
    return streaming_cost(name, m, elements * BF16_BYTES, gpu, profile, "overhead")


def _activations(shape: ModelShape, tensor_parallel: int, gpu: Gpu) -> dict[int, int]:
    """The activations as elements of a row, in and out -> layers.

    The grouped GEMM includes the activations of routed experts, and `shared_cost` those of shared experts beside them.
    """
    numbers: Counter[int] = Counter()
    for part, number in shape.counted:
        if isinstance(part, Mlp):
            numbers[(2 + part.gated) * (part.inner // tensor_parallel)] += number
        elif isinstance(part, Experts) and part.shared_intermediate_size and not runs_beside(part, gpu):
            numbers[(2 + part.gated) * (part.shared_intermediate_size // tensor_parallel)] += number
        elif isinstance(part, LayerInput):  # each layer's gate; look-up, norm and sum for all layers
            numbers[3 * part.width] += number
            if part.all_widths:
                numbers[6 * part.all_widths] += number
        elif isinstance(part, Attention) and part.gated:  # the gate of its output
            numbers[3 * (part.heads // tensor_parallel) * part.value_dim] += number
    return dict(numbers)


def runs_beside(experts: Experts, gpu: Gpu) -> bool:
    """True if shared experts can run beside the routed ones: on GPUs, in families that vLLM builds so."""
    return experts.shared_stream and not gpu.is_cpu


def sampling_cost(batch: StepBatch, shape: ModelShape, gpu: Gpu, runner: str, profile: Profile) -> Cost:
    """Seconds between the last layer and the next token: input preparation, log-softmax and sampling, (steps,).

    runner: vLLM's model runner, "v1" or "v2"
    """
    step = "overhead.step_seconds"
    sampled = sampler_cost(batch.sampled_requests, shape.vocab_size, runner, gpu, profile)
    return constant(*profile.named(step), sampled.seconds) + sampled


def sampler_cost(rows: Array, vocabulary: int, runner: str, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of log-softmax, sampling and gathering of `rows` of logits.

    All are passes over the logits. Memory limits them for many rows, and an SM for one row.
    """
    prefix = f"sampling.{runner}"
    passes, launch, sm = (f"{prefix}.{part}" for part in ("passes", "launch_seconds", "sm_bandwidth"))
    row = float(vocabulary * FP32_BYTES)
    once = Cost(rows * row / gpu.memory_bandwidth, {})
    if sm in profile.coefficients:
        alone = np.where(rows > 0, row, 0.0)
        once = p_norm(4, once, traffic(alone, 1.0, profile.named(sm)))
    all_passes = once.scaled(profile.coefficient(passes))
    sampled = all_passes.plus_partials({passes: all_passes.seconds})
    return sampled + times(np.where(rows > 0, 1.0, 0.0), *profile.named(launch))


def host_cost(batch: StepBatch, cache_groups: int, profile: Profile) -> Cost:
    """Seconds of the host per step to schedule its requests and track them, shape (steps,).

    cache_groups: as in StepModel; vLLM keeps a block table for each request and group
    """
    requests = batch.decode_requests + batch.prefill_requests
    cost = times(requests, *profile.named("host.request_seconds"))
    if cache_groups > 1:
        cost = cost + times(requests * float(cache_groups - 1), *profile.named(f"{GROUPS}.request_seconds"))
    return paced(cost + constant(*profile.named("host.step_seconds"), cost.seconds), HOST_PACE, profile)


def launch_cost(launched: Mapping[str, Array], profile: Profile) -> Cost:
    """Seconds of the host per step for launches outside of a CUDA graph. launched: the result of `launches`"""
    used = [times(number, *profile.named(name)) for name, number in launched.items() if number.any()]
    return paced(sum(used, zero(next(iter(launched.values())))), HOST_PACE, profile)


def launches(
    graphed: Array, prefills: Array, shape: ModelShape, layers: Sequence[Linear], precision: Precision
) -> dict[str, Array]:
    """The host's launches in each step: coefficient -> number, shape (steps,).

    graphed, prefills: bool (steps,), True if a step is small enough for the CUDA graphs, and if it fills prompts
    layers:            the linear layers of the model, without lm_head

    vLLM captures decode steps as one graph. A small step that also fills a prompt runs in pieces, with a graph between
    two mixers. Python launches a larger step kernel by kernel. Decode steps beyond the largest graph, and
    enforce_eager, are assumed to cost as much: not measured.
    """
    eager, in_parts = np.where(graphed, 0.0, 1.0), np.where(graphed & ~prefills, 0.0, 1.0)
    mixers = sum(number for _, number in shape.mixers)
    counts = {
        "host.piecewise_layer_seconds": np.where(graphed & prefills, float(mixers), 0.0),
        "host.eager_layer_seconds": eager * layers_of_two_parts(shape),
    }
    experts = sum(number for _, number in shape.parts_of(Experts))
    if experts:
        counts["host.eager_expert_layer_seconds"] = eager * experts
    if precision.weights != "bf16":
        quantised = sum(n for part, n in shape.parts_of(Experts) if part.run_in(precision) == precision)
        inputs = sum(x.layers for x in layers if x.quantised) + 2 * quantised  # experts': of w13 and of w2
        counts["host.eager_quantise_seconds"] = eager * inputs
    return counts | {f"{kernel}.layer_seconds": in_parts * number for kernel, number in host_kernels(shape).items()}


def host_kernels(shape: ModelShape) -> dict[str, int]:
    """Mixers that take the host longer than attention -> the number of their layers.

    Each is a dozen kernels that Python launches one by one, also between two CUDA graphs.
    """
    layers: Counter[str] = Counter()
    for mixer, number in shape.mixers:
        if not isinstance(mixer, Attention):
            layers["host.mla" if isinstance(mixer, LatentAttention) else f"host.{KERNELS[type(mixer)]}"] += number
    return dict(layers)


def start_cost(requests: int, prompt_tokens: int, profile: Profile) -> Cost:
    """Seconds beside the steps in a rollout of `requests` with `prompt_tokens` in all, shape (1,).

    vLLM's front end checks all prompts before the engine gets the first. The engine hashes each for its prefix cache.
    """
    fixed, each, token = ("host.start_seconds", "host.arrival_seconds", "host.prompt_token_seconds")
    arrivals = np.array([requests * profile.coefficient(each)])
    tokens = np.array([prompt_tokens * profile.coefficient(token)])
    fixed_cost = constant(*profile.named(fixed), arrivals)
    return paced(fixed_cost + Cost(arrivals + tokens, {each: arrivals, token: tokens}), HOST_PACE, profile)
