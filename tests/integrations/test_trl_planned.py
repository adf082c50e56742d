"""Trainers of TRL's beside GRPO with a plan, by the mixin: real runs on the CPU with an FP8 KV cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trl import same_as_policy
from trl_runs import SETTINGS, dataset, ended, logged, model, share_of_even

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard, Verdict

pytestmark = pytest.mark.trl


def rloo(folder: Path, **more: Any) -> Any:
    import trl

    from fp8plan.integrations.trl import Planned

    class RLOOTrainer(Planned, trl.RLOOTrainer):
        """TRL's, with a plan."""

    ours = {name: more.pop(name) for name in ("plan", "choice", "train_dataset", "sinks") if name in more}
    args = trl.RLOOConfig(output_dir=str(folder), beta=0.0, **(SETTINGS | more))
    rows = {"train_dataset": dataset()}
    return RLOOTrainer(model(), share_of_even, args, **(rows | ours))


def online_dpo(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig

    from fp8plan.integrations.trl.online_dpo import OnlineDPOTrainer

    ours = {name: more.pop(name) for name in ("plan", "choice") if name in more}
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
