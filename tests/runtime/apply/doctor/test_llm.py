"""The doctor on a plain vllm.LLM, on a CPU, which was started as people start it: most of what can be wrong is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from frozen_imports import freeze_imports
from tiny_models import BLOCK_SIZE, checkpoint, experts_or_skip, weights

import fp8plan
from fp8plan.runtime.apply.doctor.doctor import Diagnosis

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

BLOCKS = 6  # of the KV cache: three requests of two blocks each
PROMPTS = [[(7 * n + 31 * row) % 1000 for n in range(BLOCK_SIZE - 10)] for row in range(6)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Experts in blockwise FP8, routers too, as vLLM does by itself; KV scales that nobody measured; a tiny pool."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()  # groups of a dense engine that died in this process have none for experts
    freeze_imports()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, experts_or_skip():
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a RolloutEngine of other tests may have set it
        llm = LLM(
            str(checkpoint("moe", "a")),
            skip_tokenizer_init=True,
            quantization="fp8_per_block",
            kv_cache_dtype="fp8",
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=6,
            max_num_batched_tokens=1024,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=BLOCKS + 1,
            enforce_eager=True,
            disable_log_stats=False,
        )
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def found(llm: LLM) -> Diagnosis:
    """The doctor's findings after a rollout that the pool is too small for."""
    from vllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.generate(inputs, SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False), use_tqdm=False)
    return fp8plan.doctor(llm, prompts=PROMPTS, precision="fp8_block")


def test_all_that_is_wrong_is_named(found: Diagnosis) -> None:
    said = {one.fault: one for one in found.faults}
    assert set(said) == {"wrong_precision", "router_quantised", "kv_scales_unit", "preemption_storm"}
    assert "fp8_block+fp8_kv: linears Fp8PerBlock" in said["wrong_precision"].says
    assert "3 in float8_e4m3fn" in said["router_quantised"].says
    assert "1.0 in all 3 layers" in said["kv_scales_unit"].says
    assert said["preemption_storm"].says.endswith("since the engine's start: each computes its request's tokens again")
    assert (found.observed.preemptions or 0) > 0


def test_what_is_right_is_told(found: Diagnosis) -> None:
    said = {one.check: one for one in found.findings if one.state.value == "ok"}
    assert set(said) == {"kernels", "e8m0", "cuda_graphs", "weights", "sync", "decode", "prefix_cache", "prefix_hits"}
    assert said["prefix_hits"].says == "0.0% of 708 tokens since the engine's start were in the prefix cache"
    assert "ReferenceFp8BlockKernel" in said["kernels"].says
    assert "sound" in said["weights"].says


def test_sparse_patches_of_vllm_know_no_scale() -> None:
    """The fault `sparse_sync` is vLLM's own. Once this fails, a version of vLLM is fit for it."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    class Model(torch.nn.Module):
        weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
        scale = 0.01

        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, tensor in weights if self.weight.copy_(tensor) is not None}

    index, value = torch.tensor([5], dtype=torch.int32), torch.tensor([0.6], dtype=torch.bfloat16)
    patch = CheckpointWeightPatch("weight", (4, 4), torch.bfloat16, value, index)
    model = Model()
    assert load_checkpoint_weight_patches(model, [patch]) == {"weight"}
    assert float(model.weight.float()[1, 1]) * model.scale == pytest.approx(0.006, rel=0.05)


def test_routes_of_experts_that_no_trainer_can_replay_are_warned_of(found: Diagnosis) -> None:
    (warning,) = found.warnings
    assert warning.fault == "router_replay_off"
    assert "weights are fp8_block, and the routes of experts are not returned" in warning.says


def test_what_it_types_for_the_router_leaves_the_router_out(found: Diagnosis) -> None:
    import ast
    import re

    (todo,) = (one.todo for one in found.faults if one.fault == "router_quantised")
    assert todo is not None
    (settings,) = re.findall(r"quantization_config=(\{.*?\})", todo)
    (pattern,) = ast.literal_eval(settings)["ignore"]
    assert re.match(pattern.removeprefix("re:"), "model.layers.0.mlp.gate")
    assert not re.match(pattern.removeprefix("re:"), "model.layers.0.mlp.gate_up_proj")


def test_the_trainers_weights_need_fp8plans_engine(llm: LLM) -> None:
    (one,) = [x for x in fp8plan.doctor(llm, weights=weights("moe", "a")).findings if x.check == "weights"]
    assert one.state.value == "unknown"
    assert one.todo == "RolloutEngine.from_setup(...)"
