"""The run of verl on a GPU, as far as a CPU goes: its files, its reward, its commands in verl's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl_runs import model
from verl_config import configured

from benchmarks.gpu import verl_grpo, verl_reward
from fp8plan.errors import ConfigError

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl")
    verl_grpo.make(path, model(), verl_grpo.VOCABULARY)
    return path


def told(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"mode": "sync", "gpus": 1, "tensor_parallel": 1, "steps": 20, "precision": "fp8_kv"}
        | {"memory": None, "target_kl": None, "response": 512, "micro_batch": 16}
        | changes
    )


def test_a_folder_with_another_model_is_not_used(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r", 8192\), and .*, 4096\) is asked for; give another --folder"):
        verl_grpo.make(folder, model(), 4096)
    verl_grpo.make(folder, model(), verl_grpo.VOCABULARY)


def test_the_reward_is_the_share_of_even_words() -> None:
    assert verl_reward.compute_score("", "w4 w7 w10 <eos> w", "") == pytest.approx(2 / 3)
    assert verl_reward.compute_score("", "", "") == 0.0


def test_verl_loads_the_reward_from_its_file(folder: Path) -> None:
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = configured(verl_grpo.command("stock", folder, told()))
    assert get_custom_reward_fn(config)("", "w2 w3", "") == 0.5


def test_verl_builds_a_sampler_that_does_not_wait_for_two_seconds(folder: Path) -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    config = configured(verl_grpo.command("stock", folder, told()))
    trainer = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=None)
    assert PPOTrainerSync._build_replay_buffer(trainer).poll_interval == 0.1


def test_verls_dataset_takes_the_prompts_and_their_tokens_fit(folder: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    rows = load_dataset("parquet", data_files=str(folder / "prompts.parquet"))["train"]
    assert len(rows) == 64 * verl_grpo.BATCH
    assert {"prompt", "data_source", "reward_model", "extra_info"} <= set(rows.column_names)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokens = tokenizer.apply_chat_template(rows[3]["prompt"], add_generation_prompt=True, return_dict=False)
    assert tokens[:3] == [1, 21, 22]
    assert len(tokens) == verl_grpo.WORDS + 2 <= verl_grpo.PROMPT


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_verl_composes_all_commands_which_differ_by_the_plugins_words(folder: Path, mode: str) -> None:
    given = told(mode=mode, gpus=2)
    stock, *ours = (set(verl_grpo.compose(verl_grpo.command(part, folder, given))) for part in verl_grpo.PARTS)
    own = {f"trainer.default_local_dir={folder / part}" for part in verl_grpo.PARTS}
    for differ in ((words ^ stock) - own for words in ours):
        assert all("fp8plan" in word or word.endswith("rollout.name=vllm") for word in differ)


def test_fp8plan_takes_its_command(folder: Path) -> None:
    from fp8plan.integrations.verl.settings import refuse, settings_in

    words = verl_grpo.command("fp8plan", folder, told(tensor_parallel=2, gpus=2))
    config = configured(words)
    refuse(config)
    assert (settings_in(config).choice, settings_in(config).accept) == ("fp8_kv", "high")
    passes = config.actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.pass_config
    assert passes.fuse_allreduce_rms is False


def test_figures_of_verls_log_become_rows(tmp_path: Path) -> None:
    data = {"timing_s/step": 3.0, "fp8plan/threshold_tis": 2.0, "perf/total_num_tokens": 5}
    lines = [{"step": step, "data": data | {"timing_s/step": float(step)}} for step in range(1, 6)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = verl_grpo.steps_of(tmp_path / "log.jsonl")
    assert rows[0] == {"step": 1, "timing_s/step": 1.0, "fp8plan/threshold_tis": 2.0}
    assert verl_grpo.steps_of(tmp_path / "absent") == []
