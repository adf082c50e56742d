"""Features of TRL's GRPOTrainer with a plan, on a real engine: docs/guides/trl.md lists them with these tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from plans import predicted
from test_trl import same_as_policy
from tiny_models import CALIBRATION, cpu_plan, generate, weights
from transformers.core_model_loading import revert_weight_conversion
from trl_runs import logged, model, started

from fp8plan.errors import ConfigError
from fp8plan.model.precision import PRESETS
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.watch.monitor.sinks import JsonLines

pytestmark = [pytest.mark.trl, pytest.mark.vllm]

KV: dict[str, Any] = {"plan": "auto", "choice": "fp8_kv"}


def state_of(engine: RolloutEngine) -> Any:
    """Digests of the live weights, and answers: a CPU's packed linears have no digest."""
    if engine.state.fp8_kv:
        engine.recalibrate_kv(kv_prompts=CALIBRATION)
    return engine.llm.collective_rpc("fp8plan_digests")[0]["ok"], generate(engine, cold=True)


# ------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize(
    ("kind", "precision", "more"),
    [
        ("dense", "fp8_kv", {}),
        pytest.param("dense", "bf16", {"use_dora": True}, marks=pytest.mark.slow, id="dora"),
        pytest.param("dense", "fp8_block", {}, marks=pytest.mark.slow, id="fp8-base"),
        pytest.param("moe", "fp8_kv", {}, marks=pytest.mark.slow, id="moe-attention"),
    ],
)
def test_a_sync_of_lora_sends_what_merge_and_unload_gives(
    kind: str, precision: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """On all linears; of a model with experts, on those of attention. Bit for bit."""
    first = weights(kind, "a")
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False, **more)
    plan = replace(cpu_plan(precision), model=model(kind), choices=tuple(map(predicted, PRESETS)))
    with started(tmp_path, plan=plan, policy=model(kind), peft_config=lora, max_steps=2) as trainer:
        trainer.train()
        generation, engine = trainer.vllm_generation, trainer.rollout_engine
        generation.sync_weights()
        synced = state_of(engine)
        sent = dict(generation.copies(generation.announced()))
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        expected = dict(
            revert_weight_conversion(merged, {name: x.bfloat16() for name, x in merged.state_dict().items()})
        )
        assert sent.keys() == expected.keys()
        assert len(sent) >= 36
        assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
        assert any(not torch.equal(tensor, first[name]) for name, tensor in sent.items() if "proj" in name)
        engine.sync_weights(expected)
        assert state_of(engine) == synced


# -------------------------------------------------------------------------------------------------------- the policy


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"gradient_checkpointing": True}, {"model_init_kwargs": {"dtype": "float16"}}],
    ids=["checkpointing", "fp16"],
)
def test_the_engine_holds_the_policys_weights(more: dict[str, Any], tmp_path: Path) -> None:
    with started(tmp_path, max_steps=2, learning_rate=1e-4, **KV, **more) as trainer:
        trainer.train()
        trainer.vllm_generation.sync_weights()
        assert same_as_policy(trainer)
        assert all(0 <= k3 < 0.05 for k3 in logged(trainer, "fp8plan/k3_kl"))


LOSSES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo")},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {"vllm_importance_sampling_mode": "token_truncate"},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_each_of_trls_losses_gets_the_plans_weights(loss: str, tmp_path: Path) -> None:
    with started(tmp_path, max_steps=3, loss_type=loss, **KV, **LOSSES[loss]) as trainer:
        before = trainer.model.lm_head.weight.detach().clone()
        trainer.train()
        assert not torch.equal(before, trainer.model.lm_head.weight)
        assert all(torch.isfinite(x).all() for x in trainer.model.parameters())
        assert len(logged(trainer, "fp8plan/k3_kl")) == 3
        assert all(abs(ratio - 1) < 0.1 for ratio in logged(trainer, "sampling/importance_sampling_ratio/mean"))


def test_a_quantised_policy_is_refused_before_an_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes holds four bits of two weights in a byte."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model())
    policy.lm_head.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    monkeypatch.setattr(RolloutEngine, "from_plan", lambda *_, **__: pytest.fail("an engine starts"))
    with (
        pytest.raises(
            ConfigError, match=r"lm_head.weight of the policy is uint8; allowed with a plan: a policy in BF16"
        ),
        started(tmp_path, policy=policy, plan="auto"),
    ):
        pass


# ------------------------------------------------------------------------------------------------------------ sleep


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called of an engine on a CPU, whose sleep loses weights and KV cache, as level 2 does on a GPU."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    said = list[str]()

    def sleep(worker: Any, level: int = 1) -> None:
        said.append(f"sleep {level}")
        for lost in (*worker.model_runner.model.parameters(), *worker.model_runner.kv_caches):
            lost.data.view(torch.uint8).fill_(255)  # NaN

    def wake_up(worker: Any, tags: Any = None) -> None:
        said.append(f"wake {' and '.join(tags)}")

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "step"),
    [
        ("bf16", ["wake weights", "sync", "wake kv_cache", "sleep 2"]),
        ("fp8_kv", ["wake weights and kv_cache", "sync", "sleep 2"]),
    ],
)
def test_sleep_mode_wakes_the_weights_alone_where_no_kv_scales_are_measured(
    precision: str, step: list[str], calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, max_steps=2, plan="auto", choice=precision, vllm_enable_sleep_mode=True) as trainer:
        engine = trainer.rollout_engine
        sync = engine.sync_weights

        def synced(*args: Any, **more: Any) -> Any:
            calls.append("sync")
            return sync(*args, **more)

        monkeypatch.setattr(engine, "sync_weights", synced)
        assert calls == ["sleep 2"]
        trainer.train()
        assert calls[1:] == step * 2
        trainer.vllm_generation.sync_weights()
        assert same_as_policy(trainer)
        assert all(0 <= k3 < 0.05 for k3 in logged(trainer, "fp8plan/k3_kl"))


# ----------------------------------------------------------------------------------------------------------- resume


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """With the thresholds, with KV scales of the last rollout, and with a mark in the run file."""
    file = tmp_path / "run.jsonl"
    with started(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, sinks=[JsonLines(file)], **KV) as trainer:
        trainer.train()
    with started(tmp_path, max_steps=4, sinks=[JsonLines(file)], **KV) as trainer:
        sources, sync = list[str](), trainer.vllm_generation.sync_weights

        def synced() -> None:
            sync()
            sources.append(trainer.vllm_generation.report.kv_source)

        trainer.vllm_generation.sync_weights = synced
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.monitor.steps == 4
    assert sources == ["calibration prompts", "sequences of the last rollout"]  # the first: those of the checkpoint
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 3, 4]
    assert [record.get("resumed") for record in records] == [None, None, None, None, True, None]


# ------------------------------------------------------------------------------------------------------ rollout_func


@pytest.mark.slow
def test_a_rollout_func_gets_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    texts = list[str]()

    def rolled(prompts: list[str], trainer: Any) -> dict[str, Any]:
        outputs = trainer.vllm_generation.llm.generate(prompts, SamplingParams(max_tokens=8, logprobs=0))
        responses = [output.outputs[0] for output in outputs]
        texts.extend(response.text for response in responses)
        logprobs = [
            [step[token].logprob for token, step in zip(x.token_ids, x.logprobs, strict=True)] for x in responses
        ]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [list(response.token_ids) for response in responses],
            "logprobs": logprobs,
        }

    with started(tmp_path, max_steps=1, rollout_func=rolled, **KV) as trainer:
        trainer.train()
        ids = trainer.rollout_engine.last_sequences
        assert len(texts) == 32
        decoded = trainer.processing_class.batch_decode([x[-8:] for x in ids], skip_special_tokens=True)
        assert set(decoded) <= {text.strip() for text in texts}
        assert min(map(len, decoded)) > 8
        assert len(trainer.rollout_engine.observation.response_lengths) == 32
