"""The peak of PyTorch's allocations while vLLM profiles a forward pass and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fp8plan.model.architecture import Experts, Linear, ModelShape
from fp8plan.model.architecture.parts import LatentAttention, LayerInput, Mlp, TokenPart, parts
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits, model_runner
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, FP32_BYTES, Precision
from fp8plan.version import DEFAULT_VERSION, has

# PyTorch's cuBLAS workspace on Hopper (CUDA semantics, "cuBLAS workspaces": 32 MiB there, 8 MiB before).
CUBLAS_WORKSPACE_BYTES: Final = 32 << 20

MOST_MLA_CONTEXT: Final = 64 * 1024  # tokens

# Routers that are a torch.nn.Linear in float32 (glm4_moe.py, mimo_v2.py), so with a weight that requires a gradient.
KEEPS_ROUTER_INPUTS: Final = ("glm4_moe", "glm4v_moe", "mimo_v2_flash")


def activation_peak_bytes(
    shape: ModelShape, precision: Precision, gpu: Gpu, limits: EngineLimits, engine_version: str = DEFAULT_VERSION
) -> int:
    """Peak of PyTorch's allocations in profile_run: a forward pass of max_num_batched_tokens, then the sampler.

    The expert workspace persists (vllm/v1/worker/workspace.py). So it counts in both, from the first layer with experts
    on. cuBLAS's workspace counts from the first BF16 GEMM on: lm_head, if all other linears are FP8. Measured peaks
    were 0 to 60 MiB (4%) higher with vLLM 0.26, and 320 MiB (15%) for Gemma 3. Since 0.30 vLLM also counts what it
    allocates before profile_run. The counts of each request's tokens, for penalties, are most of that.
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    forward = max(_mixers_bytes(shape, tokens, tp), _latent_bytes(shape, limits))
    forward = max(forward, _experts_bytes(shape, precision, limits))
    dense = _mlps_bytes(shape, tokens, tp)
    if any(precision.weights == "bf16" or not w.quantised for w in shape.linears(tp) if w.name != "lm_head"):
        forward, dense = forward + CUBLAS_WORKSPACE_BYTES, dense + CUBLAS_WORKSPACE_BYTES
    sampler = _sampler_bytes(shape, gpu, limits, engine_version) + CUBLAS_WORKSPACE_BYTES
    inputs = _layer_inputs_bytes(shape, tokens)
    forward, dense = forward + inputs, dense + inputs
    persists = _expert_workspace_bytes(shape, limits) + _router_inputs_bytes(shape, tokens)
    peak = max(persists + max(forward, sampler), dense + (0 if _dense_layers_come_first(shape) else persists))
    counted = has(engine_version, "memory that stays is counted")
    return peak + (_token_counts_bytes(shape, limits) if counted else 0)


def _mixers_bytes(shape: ModelShape, tokens: int, tp: int) -> int:
    """Bytes alive in the widest mixer: residual, fused input projection, its normed and rotated copy, output."""
    wide = (2 * linears[0].n + _output(linears) for linears in _mixer_linears(shape, tp))
    return tokens * (shape.hidden_size + max(wide, default=0)) * BF16_BYTES


def _mlps_bytes(shape: ModelShape, tokens: int, tp: int) -> int:
    """Bytes alive in the widest dense MLP: residual, outputs of first matrix and activation, and `_held`.

    FP8 copies of a layer's input are made after a wider BF16 buffer is free, so they do not raise the peak.
    """
    hidden = shape.hidden_size
    wide = [_mlp_width(mlp.linears(hidden, tp)) for mlp, _ in shape.parts_of(Mlp)]
    return tokens * (_held(shape, tp) + hidden + max(wide)) * BF16_BYTES if wide else 0


def _experts_bytes(shape: ModelShape, precision: Precision, limits: EngineLimits) -> int:
    """Bytes alive in the widest experts, without their workspace.

    These are residual, input, output, the quantised inputs of both GEMMs in FP8, and `_held`. The shared experts' bytes
    count instead, as in a dense MLP, if they are more.
    """
    hidden, widths, tp = shape.hidden_size, [0], limits.tensor_parallel_size
    for experts, _ in shape.parts_of(Experts):
        w13, w2 = experts.expert_linears(hidden, limits.expert_slices)
        quantised = (w13.k + experts.experts_per_token * w2.k) * FP8_BYTES // BF16_BYTES
        routed = 3 * hidden + (0 if experts.run_in(precision).weights == "bf16" else quantised)
        widths.append(_held(shape, tp) + max(routed, hidden + _mlp_width(experts.linears(hidden, tp))))
    return limits.max_num_batched_tokens * max(widths) * BF16_BYTES


def _held(shape: ModelShape, tp: int) -> int:
    """Elements of a token that stay alive during an MLP: the mixer's output and the old residual.

    The compiled graph is split at attention (compilation/backends.py), and the caller of a piece holds its inputs.
    """
    return shape.hidden_size + max(map(_output, _mixer_linears(shape, tp)), default=0)


def _mixer_linears(shape: ModelShape, tp: int) -> list[tuple[Linear, ...]]:
    return [part.linears(shape.hidden_size, tp) for part, _ in shape.counted if not isinstance(part, TokenPart)]


def _output(linears: tuple[Linear, ...]) -> int:
    """Elements of a mixer's output: the inputs of its last matrix, which is cut by columns."""
    return next(w.k for w in linears if w.all_reduce)


def _dense_layers_come_first(shape: ModelShape) -> bool:
    """True if every dense MLP is in a layer before the first experts."""
    kinds = [{type(part) for part in parts(layer)} for layer in shape.layers]
    first = next((i for i, kind in enumerate(kinds) if Experts in kind), len(kinds))
    return not any(Mlp in kind for kind in kinds[first:])


def _mlp_width(linears: Sequence[Linear]) -> int:
    """Outputs of an MLP's first matrix and activation. Among experts only shared ones count; 0 without them."""
    rows = {w.name.removeprefix("shared_"): w for w in linears}
    first = rows.get("gate_up_proj", rows.get("up_proj"))
    return first.n + rows["down_proj"].k if first else 0


def _latent_bytes(shape: ModelShape, limits: EngineLimits) -> int:
    """Bytes alive in MLA: residual, queries, latent and output of all tokens, and prefill's expanded keys and values.

    Source of the latter: determine_chunked_prefill_workspace_size in mla_attention.py.
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    pages = limits.max_num_seqs * limits.block_size
    longest = limits.max_model_len or shape.context.derived()
    context = max(min(max(8 * longest, 4 * pages), MOST_MLA_CONTEXT), pages)
    most = 0
    for part, _ in shape.parts_of(LatentAttention):
        heads = part.heads // tp
        row = shape.hidden_size + part.latent_width + heads * (part.query_width + part.v_head_dim)
        most = max(most, tokens * row + context * heads * (part.qk_nope_head_dim + part.v_head_dim))
    return most * BF16_BYTES


def _layer_inputs_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of Gemma 4's inputs of all layers, alive from the first layer to the last. Not measured."""
    return tokens * sum(part.all_widths for part, _ in shape.parts_of(LayerInput)) * BF16_BYTES


def _router_inputs_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of inputs and outputs of float32 routers, which stay alive until the sampler is done.

    Probably autograd keeps them, as the weight of a torch.nn.Linear requires a gradient. Measured for GLM-4.5-Air only.
    """
    if shape.model_type not in KEEPS_ROUTER_INPUTS:
        return 0
    rows = sum(layers * (shape.hidden_size + experts.num_experts) for experts, layers in shape.parts_of(Experts))
    return tokens * rows * FP32_BYTES


def _expert_workspace_bytes(shape: ModelShape, limits: EngineLimits) -> int:
    """Buffers of the Triton experts (fused_moe/experts/triton_moe.py, workspace_shapes), vLLM's default on Hopper.

    With expert parallelism they also hold the rows of all tokens, at the experts' whole width.
    """
    most = 0
    for experts, _ in shape.parts_of(Experts):
        w13, w2 = experts.expert_linears(shape.hidden_size, limits.expert_slices)
        most = max(most, experts.choices_per_token * (max(w2.k, w13.k) + max(w13.n, w13.k)))
    return limits.max_num_batched_tokens * most * BF16_BYTES


def _token_counts_bytes(shape: ModelShape, limits: EngineLimits) -> int:
    """Bytes of V2's penalties (v1/worker/gpu/sample/penalties.py): an int32 and a bit for each request and token."""
    return limits.max_num_seqs * shape.padded_vocab_size * 33 // 8


def _sampler_bytes(shape: ModelShape, gpu: Gpu, limits: EngineLimits, engine_version: str) -> int:
    """Hidden states of all tokens and of the sampled rows, logits, and the sampler's buffers.

    The sampler of vLLM's V2 model runner works on the BF16 logits in place in 0.26, and on an FP32 copy later
    (v1/worker/gpu/sample). V1's warm-up holds BF16 logits, FP32 logits, log-probabilities (processed_logprobs),
    probabilities and noise at once (v1/sample/ops/topk_topp_sampler.py). It also holds random hidden states for the
    sampled rows (_dummy_sampler_run), and the top-k kernel's FP32 row per multiprocessor (topk_topp_triton.py).
    """
    tokens, tp = limits.max_num_batched_tokens, limits.tensor_parallel_size
    rows, vocab = min(tokens, limits.max_num_seqs), shape.padded_vocab_size
    row = shape.hidden_size * BF16_BYTES
    before_gather = rows * vocab // tp * BF16_BYTES if tp > 1 else 0
    peak = (tokens + rows) * row + before_gather + rows * vocab * BF16_BYTES
    if model_runner(shape, gpu, engine_version) == "v1":
        peak += rows * row + 4 * rows * vocab * FP32_BYTES + min(gpu.sm_count, rows) * vocab * FP32_BYTES
    elif has(engine_version, "V2 samples from FP32 logits"):
        peak += rows * vocab * FP32_BYTES
    return peak
