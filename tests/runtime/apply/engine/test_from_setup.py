"""Engines without a plan: of a model that the cost model does not know, all works but the prediction of its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, CALIBRATION, KV_BLOCKS, answer

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.engine.launch import launch
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Verdict
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback

pytestmark = pytest.mark.vllm

LIMITS = EngineLimits(
    max_num_seqs=8, max_num_batched_tokens=512, block_size=BLOCK_SIZE, num_gpu_blocks=KV_BLOCKS, enforce_eager=True
)
PROMPT = [5, 9, 33, 17, 200, 401]


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A checkpoint of an architecture that nothing is known of, and other weights for it."""
    from safetensors.torch import load_file
    from transformers import OPTConfig, OPTForCausalLM

    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = OPTConfig(
            vocab_size=1024, hidden_size=256, ffn_dim=512, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=256, init_std=0.08,
        )  # fmt: skip
        folders.append(tmp_path_factory.mktemp(f"opt_{seed}"))
        OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(folders[-1])
    return str(folders[0]), load_file(folders[1] / "model.safetensors")


def follow(action: Action) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=action, reason="a test")


def test_a_model_that_cannot_be_predicted_is_started_synced_stepped_down_and_monitored(
    opt: tuple[str, dict[str, Any]],
) -> None:
    folder, other = opt
    engine = RolloutEngine.from_setup(EngineSetup(folder, "cpu", "fp8_kv", LIMITS), skip_tokenizer_init=True)
    try:
        assert engine.launch.limits.max_model_len == 256  # the model's own
        engine.recalibrate_kv()  # on random tokens, as no rollout has run
        before = answer(engine, PROMPT)
        assert engine.guard is None
        assert "model_type 'opt' is not modelled" in str(engine.guard_off)
        assert engine.sync_weights(other, kv_prompts=CALIBRATION).tensors == len(other)
        after = answer(engine, PROMPT)
        assert after != before
        records = list[Any]()
        monitor = Monitor(engine=engine, sinks=[Callback(records.append)])
        rollout = torch.tensor([after[1]])
        step = monitor.step(rollout + 0.01, rollout)
        assert step.verdict is None
        assert records[0]["precision"] == "fp8_kv"
        assert records[0]["response_lengths"] == [len(after[0])]
        assert "not modelled" in records[0]["guard"]["off"]
        engine.apply(follow(Action.KV_TO_BF16))  # without a plan, any precision may follow
        assert engine.launch.precision == "bf16"
        engine.sync_weights(other)
        assert len(answer(engine, PROMPT)[0]) == len(after[0])
    finally:
        engine.shutdown()


def test_a_precision_that_the_gpu_lacks_is_refused_before_anything_starts(opt: tuple[str, dict[str, Any]]) -> None:
    says = r"fp8_block: fp8plan does not model FP8 weights .*allowed: bf16, or another GPU"
    with pytest.raises(ConfigError, match=says):
        launch(EngineSetup(opt[0], "a100", "fp8_block", EngineLimits()))
    assert launch(EngineSetup(opt[0], "a100", "fp8_kv", EngineLimits())).kwargs["attention_backend"] == "FLASHINFER"


def test_the_kernels_of_an_unknown_model_are_not_warmed_up(opt: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    from fp8plan.runtime.apply.engine.warm_up import deep_gemm_rows

    assert deep_gemm_rows(EngineSetup(opt[0], "h200", "fp8_block"), 1024) == []
    assert deep_gemm_rows(EngineSetup("Qwen/Qwen3-0.6B", "h200", "fp8_block"), 1024)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "triton"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True, "moe_backend": "auto"}, "auto"),
        ({"tensor_parallel_size": 1}, None),
        ({"enable_expert_parallel": False}, None),
    ],
)
def test_the_kernels_of_experts_are_those_of_what_runs(more: dict[str, Any], expected: str | None) -> None:
    limits = EngineLimits(tensor_parallel_size=2, enable_expert_parallel=True)
    setup = EngineSetup("Qwen/Qwen3-30B-A3B", "h200", "fp8_block", limits)
    assert launch(setup, more=more).kwargs.get("moe_backend") == expected


@pytest.mark.parametrize("max_model_len", [64, 609, 40960])
def test_a_warm_up_has_steps_of_every_kernel(max_model_len: int) -> None:
    """Also of those for more tokens than one prompt can have, which the first step of a rollout may."""
    from fp8plan.runtime.apply.engine.warm_up import MOE_TILES, deep_gemm_rows, warm_up_batches

    limits = EngineLimits(max_num_batched_tokens=8192)
    setup = EngineSetup("Qwen/Qwen3-0.6B", "h200", "fp8_block", limits)
    batches = warm_up_batches(setup, max_model_len)
    steps = [sum(map(len, batch[len(batch) > 1 :])) for batch in batches]  # but for the token before the others
    assert {*MOE_TILES, *deep_gemm_rows(setup, 8192)} <= set(steps)
    assert max(steps) <= 8192
    assert max(len(prompt) for batch in batches for prompt in batch) < max_model_len
    assert all(len(batch) == 1 or len(batch[0]) == 1 for batch in batches)
    begins = [tuple(prompt[:3]) for batch in batches for prompt in batch if len(prompt) > 2]
    assert len(begins) == len(set(begins))
    assert max(map(max, begins)) < 32


def test_one_engine_is_one_replica(opt: tuple[str, dict[str, Any]]) -> None:
    """The guard compares the rollouts of this engine alone."""
    setup = EngineSetup(opt[0], "h200", "bf16", EngineLimits(data_parallel_size=4))
    assert launch(setup).limits.data_parallel_size == 1


def test_an_engine_of_a_setup_may_become_any_precision_and_one_of_a_plan_its_own(
    opt: tuple[str, dict[str, Any]],
) -> None:
    setup = EngineSetup(opt[0], "h200", "fp8_block+fp8_kv")
    assert launch(setup, keep_bf16=(1, 0)).with_precision("bf16").precision == "bf16"
    planned = launch(setup, precisions=("fp8_block+fp8_kv", "fp8_block"))
    assert planned.with_precision("fp8_block").precisions == planned.precisions
    with pytest.raises(ConfigError, match="the plan has no bf16 on 1 GPU"):
        planned.with_precision("bf16")


TIGHT = ("Qwen/Qwen3.5-9B", "rtx4090")  # in BF16 it has fewer blocks than vLLM's default of 256 requests


def test_a_hybrid_engine_starts_with_no_more_requests_than_it_has_blocks() -> None:
    setup = EngineSetup(*TIGHT, "bf16")
    with pytest.warns(RuntimeWarning, match=r"max_num_seqs is \d+ instead of 256: some layers keep a recurrent state"):
        started = launch(setup)
    assert started.limits.max_num_seqs == started.kwargs["max_num_seqs"] <= started.setup.memory().num_gpu_blocks
    assert started.limits.max_num_batched_tokens == started.kwargs["max_num_batched_tokens"] == 8192
    assert launch(setup, more={"max_num_seqs": 256}).kwargs["max_num_seqs"] == 256  # the caller insists
    assert launch(setup, more={"enforce_eager": True}).kwargs["max_num_seqs"] == 256  # no CUDA graphs
    assert launch(EngineSetup("Qwen/Qwen3-8B", "h200")).kwargs["max_num_seqs"] == 1024


def test_a_step_down_lowers_the_requests_to_the_blocks_that_are_left() -> None:
    """Also of a plan, whose numbers are given: with them vLLM would not start, and the run would end."""
    roomy = launch(EngineSetup(*TIGHT, "fp8_block", EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192)))
    assert roomy.kwargs["max_num_seqs"] == 256
    with pytest.warns(RuntimeWarning, match="instead of 256"):
        lower = roomy.with_precision("bf16")
    assert lower.kwargs["max_num_seqs"] <= lower.setup.memory().num_gpu_blocks
