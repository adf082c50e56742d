"""Trainers of TRL's beside GRPO with a plan, by the mixin: real runs on the CPU with an FP8 KV cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trl import same_as_policy
from test_trl_turns import TEMPLATE
from trl_runs import SETTINGS, dataset, ended, logged, model, share_of_even

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard, Verdict

pytestmark = pytest.mark.trl


def rloo(folder: Path, **more: Any) -> Any:
    import trl

    from fp8plan.integrations.trl import Planned

    class RLOOTrainer(Planned, trl.RLOOTrainer):
        """TRL's, with a plan."""

    ours = {name: more.pop(name) for name in ("plan", "choice", "dry_run", "train_dataset", "sinks") if name in more}
    args = trl.RLOOConfig(output_dir=str(folder), beta=0.0, **(SETTINGS | more))
    rows = {"train_dataset": dataset()}
    return RLOOTrainer(model(), share_of_even, args, **(rows | ours))


def online_dpo(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig

    from fp8plan.integrations.trl.online_dpo import OnlineDPOTrainer

    ours = {name: more.pop(name) for name in ("plan", "choice", "dry_run") if name in more}
    names = ("vllm_max_model_length", "num_generations", "max_completion_length")
    settings = {name: value for name, value in SETTINGS.items() if name not in names}
    settings |= {"max_new_tokens": 16, "max_length": 64, "beta": 0.1}
    args = OnlineDPOConfig(output_dir=str(folder), **(settings | more))
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model()), AutoTokenizer.from_pretrained(model())
    return OnlineDPOTrainer(
        policy, None, share_of_even, args=args, train_dataset=dataset(), processing_class=tokenizer, **ours
    )


def watched(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, str | None]]:
    """For each sync of a trainer: live weights are the policy's, samples compared, source of KV scales."""
    generation, seen = trainer.vllm_generation, list[tuple[bool, int, str | None]]()
    sync = generation.sync_weights

    def synced() -> None:
        sync()
        seen.append((same_as_policy(trainer), generation.report.compared, generation.report.kv_source))

    monkeypatch.setattr(generation, "sync_weights", synced)
    return seen


def of_bytes() -> Any:
    """A tokenizer of bytes, as GOLD needs it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.vllm
@pytest.mark.parametrize(("made", "reward"), [(rloo, "reward"), (online_dpo, "objective/scores")])
def test_a_policy_learns_with_an_fp8_kv_cache(
    made: Callable[..., Any], reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 12
    with ended(made(tmp_path, plan="auto", choice="fp8_kv", max_steps=steps)) as trainer:
        seen = watched(trainer, monkeypatch)
        trainer.train()
        rewards = logged(trainer, reward)
        assert len(rewards) == steps
        assert 0.4 < rewards[0] < 0.6
        assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
        assert trainer.monitor is None
        assert len(seen) == steps
        assert all(same and compared > 0 for same, compared, _ in seen)
        sources = [source or "" for *_, source in seen]
        assert "random tokens" in sources[0]
        assert set(sources[1:]) == {"sequences of the last rollout"}
        for name in ("fp8_kv", "sync_s", "speed_ratio", "tokens_per_s", "advice"):
            assert len(logged(trainer, f"fp8plan/{name}")) == steps, name


# Trainers by the mixin alone: their names in TRL, and what one needs beside the settings of all.
MESSAGES = [{"role": "user", "content": "w1 w2 w3"}, {"role": "assistant", "content": "w4 w5"}]
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Distillation": ("trl", {}, {"prompt": "w1 w2 w3"}),
    "SDPO": ("trl.experimental.sdpo", {"num_generations": 8}, {"prompt": "w1 w2 w3"}),
    "SDFT": ("trl.experimental.sdft", {}, {"prompt": "w1 w2 w3", "privileged_context": "w4 w5"}),
    "GOLD": ("trl.experimental.gold", {"lmbda": 1.0, "max_length": 128}, {"messages": MESSAGES}),
    "IWOPD": ("trl.experimental.iw_opd", {"lmbda": 1.0, "max_length": 64}, {"messages": MESSAGES}),
}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", OTHERS)
def test_other_trainers_generate_with_a_planned_engine_and_an_fp8_kv_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    from fp8plan.integrations.trl import Planned

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    place, more, row = OTHERS[name]
    of_trl = import_module(place)
    settings = {key: value for key, value in SETTINGS.items() if key != "num_generations"}
    settings |= {"per_device_train_batch_size": 8, "max_steps": 2} | more
    config = getattr(of_trl, f"{name}Config")(output_dir=str(tmp_path), **settings)
    tokenizer = of_bytes() if name == "GOLD" else AutoTokenizer.from_pretrained(model())
    tokenizer.chat_template = TEMPLATE
    needs = {"reward_funcs": share_of_even} if name == "SDPO" else {}
    if name in ("Distillation", "GOLD", "IWOPD"):
        needs["teacher_model"] = model()
    rows = Dataset.from_list([row] * 16)
    kind = type(f"Planned{name}", (Planned, getattr(of_trl, f"{name}Trainer")), {})
    trainer = kind(
        model(), args=config, train_dataset=rows, processing_class=tokenizer, plan="auto", choice="fp8_kv", **needs
    )
    with ended(trainer):
        seen = watched(trainer, monkeypatch)
        trainer.train()
        assert len(seen) == 2
        assert all(same and compared > 0 for same, compared, _ in seen)
        assert seen[1][2] == "sequences of the last rollout"
        assert logged(trainer, "fp8plan/fp8_kv") == [1.0] * 2
        assert min(logged(trainer, "fp8plan/tokens_per_s")) > 0


@pytest.mark.parametrize(
    ("made", "more", "match"),
    [
        (rloo, {"sinks": [print]}, "RLOOTrainer takes no sinks; allowed: "),
        (rloo, {"choice": "fp8_kv"}, "choice and dry_run belong to a plan, and plan is None; type: plan='auto'"),
        (rloo, {"plan": "auto", "use_vllm": False}, r"use_vllm is False; type: RLOOConfig\(use_vllm=True"),
        (
            online_dpo,
            {"plan": "auto", "vllm_mode": "server"},
            "vllm_mode is 'server', for which OnlineDPOTrainer has a",
        ),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(
    made: Callable[..., Any], more: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        made(tmp_path, **more)


@pytest.mark.parametrize("made", [rloo, online_dpo])
def test_a_dry_run_ends_before_an_engine_starts(
    made: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    monkeypatch.setattr(RolloutEngine, "from_plan", lambda *_, **__: pytest.fail("an engine starts"))
    with pytest.raises(SystemExit) as end:
        made(tmp_path, plan="auto", dry_run=True)
    assert end.value.code == 0
    assert capsys.readouterr().out.endswith("fp8plan: dry_run: no engine and no training was started\n")
    with pytest.raises(ConfigError, match="dry_run belong to a plan"):
        made(tmp_path, dry_run=True)


def test_the_plan_of_rloo_is_that_of_grpo_with_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import planned

    with pytest.raises(SystemExit):
        rloo(tmp_path, plan="auto", dry_run=True)
    printed = capsys.readouterr().out
    version = check_vllm_version().partition("+")[0]
    planned(GRPOConfig(str(tmp_path), **SETTINGS), dataset(), model=model(), gpu="cpu", engine_version=version)
    table = capsys.readouterr().out
    assert "rollout s" in table
    assert table in printed


def test_a_servers_rollouts_are_those_of_all_processes(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl.request import rollouts_of, rollouts_with

    args = GRPOConfig(str(tmp_path), **(SETTINGS | {"vllm_mode": "server", "generation_batch_size": 64}))
    generation = SimpleNamespace(mode="server", max_num_seqs=64, tensor_parallel_size=2, max_completion_length=16)
    assert rollouts_with(generation, samples=8, processes=2) == rollouts_of(args)


@pytest.mark.vllm
def test_the_guards_advice_is_followed_without_a_monitor_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(guard: Guard, observed: Any) -> Verdict:
        action = Action.KV_TO_BF16 if guard.facts.precision == "fp8_kv" else Action.NONE
        return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=action, reason="a test")

    monkeypatch.setattr(Guard, "after_rollout", judge)
    settings = {"plan": "auto", "choice": "fp8_kv", "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    with ended(rloo(tmp_path, **settings)) as trainer:
        trainer.train()
        assert logged(trainer, "fp8plan/fp8_kv") == [1.0, 0.0, 0.0]
        assert logged(trainer, "fp8plan/speed_ratio") == [0.5] * 3
    state = json.loads((tmp_path / "checkpoint-3" / "fp8plan.json").read_text())
    assert (state["guard"]["rung"], len(state["sequences"])) == ("kv_to_bf16", 16)
    with ended(rloo(tmp_path, plan="auto", choice="fp8_kv", max_steps=4)) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert trainer.rollout_engine.launch.precision == "bf16"
