"""Time the small kernels of a step as vLLM runs them: norm, activation, rotary embedding, sampling.

    python -m fp8plan.runtime.measure.kernels.elementwise --output FOLDER [--grid quick|full] [--seconds N]

Kernels, a row of FOLDER/elementwise.jsonl each:
    norm              residual add and RMSNorm, [m, hidden]
    activation        SiLU and product of the halves of [m, 2 inner]
    rotary            rotary embedding of q and k, with `qk_norm` their RMSNorms as well
    sampling.v2       logits [m, vocabulary] -> tokens at temperature 1 and their log-probs (logprobs=0), by the sampler
                      of vLLM's model runner V2. mode "eager": as the engine calls it, bound by launches for small m;
                      "graph": the GPU's time alone

The first three are native PyTorch, which Inductor fuses as at vLLM's default level. With vLLM's options it makes one
kernel for all m, tuned at MOST_ROWS. Inputs are as warm in L2 as their size allows, as in the engine, where the
operation before has just written them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from itertools import product
from types import FunctionType
from typing import Any

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Mlp
from fp8plan.runtime.measure.kernels import timing
from fp8plan.runtime.measure.kernels.sweep import Point, Work, command, shuffled
from fp8plan.runtime.measure.kernels.timing import engine_config, random_normal

QUICK = ("Qwen/Qwen3-8B",)
MODELS = (
    *QUICK,
    "fp8plan/dense-50m",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-70B",
)
ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
SAMPLED_ROWS = (1, 8, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # at most MAX_SAMPLED_ROWS
MAX_SAMPLED_ROWS = 1024
VOCABULARIES = (32000, 128256, 151936)
SAMPLING = "sampling.v2"
MOST_ROWS = 16384  # Inductor tunes for the first size: in the engine, max_num_batched_tokens
POSITIONS = 8192
LOGPROBS_MODE = "processed_logprobs"  # as fp8plan's plans have it
TIMERS = {"graph": timing.graph_seconds, "eager": timing.eager_seconds}
EAGER_CALLS = 10  # in one timed pass


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, shuffled."""
    if grid == "quick":
        every = [*_layers(QUICK, ROWS[1::2]), *_sampling(SAMPLED_ROWS[::5], VOCABULARIES[1:])]
    else:
        every = [*_layers(MODELS, ROWS), *_sampling(SAMPLED_ROWS, VOCABULARIES)]
    return shuffled(every)


def _layers(models: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[Point]:
    for name, m in product(models, rows):
        shape = ModelShape.from_hf(name)
        yield Point("norm", {"m": m, "hidden": shape.hidden_size})
        yield from (Point("activation", {"m": m, "inner": mlp.inner}) for mlp, _ in shape.parts_of(Mlp))
        for part, _ in shape.parts_of(Attention):
            heads = {"heads": part.heads, "kv_heads": part.kv_heads, "head_dim": part.head_dim}
            yield Point("rotary", {"m": m} | heads | {"qk_norm": part.qk_norm != "none"})


def _sampling(rows: tuple[int, ...], vocabularies: tuple[int, ...]) -> Iterator[Point]:
    for mode, m, vocabulary in product(TIMERS, rows, vocabularies):
        yield Point(SAMPLING, {"m": m, "vocabulary": vocabulary, "mode": mode})


def work(point: Point) -> Work:
    shape = dict(point.shape)
    m, mode = shape.pop("m"), shape.pop("mode", "graph")
    if point.kernel == SAMPLING:
        call = sampling(m, **shape)
        return Work([call] * (EAGER_CALLS if mode == "eager" else 1), timer=TIMERS[mode])
    rows, fixed = INPUTS[point.kernel](m, **shape)
    return Work([partial(compiled(point.kernel, **shape), *rows, *fixed)], {"backend": "inductor"})


@cache
def compiled(kernel: str, **shape: Any) -> Callable[..., Any]:
    """The kernel of one shape for any m, compiled as in vLLM, with a symbolic m and no guards."""
    import torch
    from vllm.config import get_current_vllm_config

    from fp8plan.runtime.measure.kernels import native_ops

    native = getattr(native_ops, kernel)
    own = FunctionType(native.__code__.replace(), native.__globals__)  # without guards, a code object serves one shape
    options = dict(get_current_vllm_config().compilation_config.inductor_compile_config)
    options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
    function = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    rows, fixed = INPUTS[kernel](MOST_ROWS, **shape)
    for tensor in rows:
        torch._dynamo.mark_dynamic(tensor, 0)
    function(*rows, *fixed)
    return function


def rotary_inputs(m: int, heads: int, kv_heads: int, head_dim: int, qk_norm: bool) -> tuple[list[Any], list[Any]]:
    import torch

    qkv = random_normal(m, (heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(POSITIONS, (m,), device="cuda")
    weights = (random_normal(head_dim), random_normal(head_dim)) if qk_norm else None
    return [qkv, positions], [random_normal(POSITIONS, head_dim), weights, (heads, kv_heads, head_dim)]


def sampling(m: int, vocabulary: int) -> Callable[[], object]:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    batch = InputBatch.make_dummy(m, m, InputBuffers(m, m, torch.device("cuda")))
    return partial(_sampler(vocabulary), random_normal(m, vocabulary), batch)


@cache
def _sampler(vocabulary: int) -> Any:
    """A sampler with a rollout's sampling parameters for MAX_SAMPLED_ROWS requests."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    device = torch.device("cuda")
    states = RequestState(
        max_num_reqs=MAX_SAMPLED_ROWS,
        max_model_len=POSITIONS,
        max_num_batched_tokens=MOST_ROWS,
        num_speculative_steps=0,
        vocab_size=vocabulary,
        device=device,
    )
    newer = "vllm_config" in signature(Sampler).parameters  # from 0.31 on; 0.30 asks for prompts' lengths
    config = [get_current_vllm_config()] if newer else []
    sampler = Sampler(
        *config,
        max_num_reqs=MAX_SAMPLED_ROWS,
        vocab_size=vocabulary,
        device=device,
        req_states=states,
        logprobs_mode=LOGPROBS_MODE,
    )
    params = SamplingParams(temperature=1.0, logprobs=0, ignore_eos=True)
    for index in range(MAX_SAMPLED_ROWS):
        prompt = [] if newer else [1]
        sampler.add_request(index, *prompt, params)
    sampler.apply_staged_writes()
    return sampler


# Inputs of each function in native_ops: (tensors with m rows, the rest).
INPUTS: dict[str, Callable[..., tuple[list[Any], list[Any]]]] = {
    "norm": lambda m, hidden: ([random_normal(m, hidden), random_normal(m, hidden)], [random_normal(hidden)]),
    "activation": lambda m, inner: ([random_normal(m, 2 * inner)], []),
    "rotary": rotary_inputs,
}


@contextmanager
def inference() -> Iterator[None]:
    """vLLM's default configuration, without FlashInfer's sampler, as in the measured rollouts."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # read when vLLM is imported
    with engine_config():
        import torch

        with torch.inference_mode():
            yield


if __name__ == "__main__":
    raise SystemExit(command("elementwise", __doc__, points, lambda: work, inference))
