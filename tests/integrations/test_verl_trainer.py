"""verl's trainers with a Monitor: their own `_compute_advantage` on a batch, figures, thresholds, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from verl_parts import planned, small

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.controller.laws import ConstantThresholds, LevelThresholds
from fp8plan.runtime.watch.guard.observation import EngineFacts

pytestmark = [pytest.mark.verl, pytest.mark.transfer_queue]

OURS = "actor_rollout_ref.rollout.custom.fp8plan"
CORRECTION = "algorithm.rollout_correction"
EMITTED = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=4.0")  # of planned()
ROWS, LENGTH = 8, 20
LENGTHS = torch.tensor([20, 3, 7, 20, 1, 12, 20, 5])


def batch_of(noise: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """The part of a batch that verl keeps when it computes advantages.

    noise: standard deviation of the log-ratios
    """
    chance = torch.Generator().manual_seed(seed)
    rollout = -9 - torch.rand(ROWS, LENGTH, generator=chance)  # so far down that no noise makes it positive
    mask = (torch.arange(LENGTH) < LENGTHS[:, None]).long()
    return {
        "response_mask": mask,
        "rm_scores": torch.randn(ROWS, LENGTH, generator=chance) * mask,
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + noise * torch.randn(ROWS, LENGTH, generator=chance),
    }


class Queue:
    """verl's TransferQueue of one batch: nested tensors by field."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        lengths = LENGTHS.tolist()
        self.fields: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(
                [row[:n] for row, n in zip(x, lengths, strict=True)], layout=torch.jagged
            )
            for name, x in batch.items()
        }

    def kv_batch_get(self, select_fields: list[str], **_: Any) -> Any:
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorStack

        known = {name: self.fields[name] for name in select_fields if name in self.fields}
        uids = NonTensorStack(*(f"prompt {row // 4}" for row in range(ROWS)))
        return TensorDict({**known, "uid": uids}, batch_size=ROWS)

    def kv_batch_put(self, fields: Any, **_: Any) -> Any:
        self.fields |= dict(fields.items())
        return SimpleNamespace(keys=[])

    def padded(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.fields[name].to_padded_tensor(0)
        return found


SEEN = {
    "status": {"last_update": None},
    "facts": EngineFacts("Qwen/Qwen3-8B", "h200_sxm", "0.26.0", "fp8_kv", planned("fp8_kv").limits),
    "rollout": None,
}

Trainer = Callable[..., Any]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A planned trainer of a mode, as main_ppo makes it, without its Ray cluster."""
    from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync

    from fp8plan.integrations.verl import trainer as ours

    kinds = {
        "sync": PPOTrainerSync,
        "colocate_async": PPOTrainerColocateAsync,
        "separate_async": PPOTrainerSeparateAsync,
    }
    (tmp_path / "plan.json").write_text(planned("fp8_kv").to_json())
    monkeypatch.setattr(
        PPOTrainer, "init", lambda self: setattr(self, "global_steps", self.config.trainer.get("at", 0))
    )
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(ours.PlannedTrainer, "_seen", lambda self: [SEEN])

    def made(*overrides: str, mode: str = "sync") -> Any:
        told = small(
            f"+{OURS}.plan={tmp_path}/plan.json",
            f"trainer.v1.trainer_mode={mode}",
            f"trainer.default_local_dir={tmp_path}",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={2 if mode == 'separate_async' else 8}",
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={'nccl' if mode == 'separate_async' else 'naive'}",
            "actor_rollout_ref.rollout.nnodes=1",  # of engines on their own GPUs
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            *overrides,
        )
        found = ours.planned_class(kinds[mode])(config=told)
        found.init()
        return found

    return made


def step(
    trainer: Any, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, tags: Any = ({},) * ROWS
) -> tuple[Queue, dict[str, Any]]:
    """verl's own _compute_advantage on a batch: what it wrote, and what it logged."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    queue, metrics = Queue(batch), dict[str, Any]()
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys = [f"{row // 4}_{row % 4}_0" for row in range(ROWS)]
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=list(tags)), metrics)
    return queue, metrics


def verls_own(batch: dict[str, torch.Tensor], config: Any) -> tuple[Any, dict[str, Any]]:
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    data = DataProto.from_dict(tensors={name: x.clone() for name, x in batch.items()})
    return compute_rollout_correction_and_add_to_batch(data, config)


@pytest.mark.parametrize(
    "asked",
    [
        ["rollout_is=token", "rollout_is_threshold=1.2"],
        ["rollout_is=sequence", "rollout_is_threshold=2.0", "rollout_is_batch_normalize=True"],
        ["rollout_is=token", "rollout_is_threshold=0.7_1.5", "rollout_rs=seq_mean_k1", "rollout_rs_threshold=0.9_1.1"],
    ],
)
def test_with_constant_thresholds_it_is_verls_own_correction(
    trainer: Trainer, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trainer(f"+{OURS}.thresholds=constant", *(f"algorithm.rollout_correction.{x}" for x in asked))
    batch = batch_of(0.3)
    queue, metrics = step(found, batch, monkeypatch)
    theirs, their_metrics = verls_own(batch, found.config.algorithm.rollout_correction)
    for name in ("rollout_is_weights", "response_mask"):
        wanted = theirs.batch[name] * batch["response_mask"]
        assert torch.allclose(queue.padded(name).float(), wanted.float(), rtol=1e-5, atol=1e-6), name
    shared = {name for name in their_metrics if name in metrics}
    assert {"rollout_corr/k3_kl", "rollout_corr/rollout_is_mean"} <= shared
    for name in shared:
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_thresholds_tighten_when_the_kl_rises(trainer: Trainer, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trainer(f"+{OURS}.thresholds=level", mode=mode)
    seen = [step(found, batch_of(noise, seed), monkeypatch)[1] for seed, noise in enumerate([0.05] * 3 + [1.0] * 6)]
    bounds = [metrics["fp8plan/threshold_tis"] for metrics in seen]
    assert bounds[0] == bounds[2] == found.plan.thresholds["token_tis"]
    assert bounds[-1] < bounds[0]
    assert seen[-1]["fp8plan/k3_kl"] > 10 * seen[0]["fp8plan/k3_kl"]
    assert {metrics["fp8plan/fp8_kv"] for metrics in seen} == {1.0}


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_the_versions_of_verls_trajectories_separate_staleness(
    trainer: Trainer, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first version of each. Without versions the KL is not split. A version that is too old still counts."""
    run = tmp_path / "run.jsonl"
    found, batch = trainer(f"+{OURS}.run_file={run}", mode=mode), batch_of(0.05)
    stale = torch.arange(ROWS) < 4
    batch["old_log_probs"][stale] += 0.3 * torch.randn(4, LENGTH, generator=torch.Generator().manual_seed(9))
    for old, last in ((6, 7), (6, 6), (7, 700)):
        tags = [{"min_global_steps": old if x else last, "max_global_steps": last} for x in stale]
        step(found, batch, monkeypatch, tags)
    step(found, batch, monkeypatch)
    records = [json.loads(line) for line in run.read_text().splitlines()]
    seen = [{name: part["tokens"] for name, part in record["versions"].items()} for record in records]
    old, fresh = int(LENGTHS[stale].sum()), int(LENGTHS[~stale].sum())
    assert seen == [{"6": old, "7": fresh}, {"6": old + fresh}, {"637": old, "700": fresh}, {}]
    causes = [[part["causes"] for part in record["attribution"]] for record in records]
    assert [["staleness"] in split for split in causes] == [True, False, True, False]


def test_the_weights_that_verls_loss_gets_are_the_monitors(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(0.5)
    queue, metrics = step(trainer(), batch, monkeypatch)
    ratio = torch.exp(batch["old_log_probs"] - batch["rollout_log_probs"]).clamp(max=metrics["fp8plan/threshold_tis"])
    assert torch.allclose(queue.padded("rollout_is_weights"), ratio * batch["response_mask"], rtol=1e-5)
    assert queue.padded("advantages").shape == (ROWS, LENGTH)


def test_without_a_correction_all_weights_are_verls(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, metrics = step(trainer(f"+{OURS}.correct=False"), batch_of(0.5), monkeypatch)
    assert "rollout_is_weights" not in queue.fields
    assert "fp8plan/threshold_tis" not in metrics
    assert metrics["fp8plan/k3_kl"] > 0.01


def test_the_correction_that_emit_writes_is_the_plans(trainer: Trainer) -> None:
    """C from 4 to 2 by default, and 2 as a constant. A C of the user's own stays as a constant."""
    constant = f"+{OURS}.thresholds=constant"
    for given, law, c in (((), LevelThresholds, 4.0), ((constant,), ConstantThresholds, 2.0)):
        for told in ((), EMITTED):
            monitor = trainer(*told, *given).monitor
            assert (type(monitor.controller), monitor.thresholds.tis) == (law, c)
    assert trainer(EMITTED[0], f"{CORRECTION}.rollout_is_threshold=3.0", constant).monitor.thresholds.tis == 3.0


def test_without_a_correction_there_is_a_limit_and_nothing_adapts(trainer: Trainer) -> None:
    assert trainer(f"+{OURS}.correct=False", f"+{OURS}.limit_kl=0.5").monitor.state.limit_kl == 0.5
    with pytest.raises(ConfigError, match=r"thresholds is \"level\" and nothing is corrected; allowed"):
        trainer(f"+{OURS}.correct=False", f"+{OURS}.thresholds=level")


def test_a_batch_without_log_probs_is_one_clear_error(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(0.1)
    del batch["rollout_log_probs"]
    with pytest.raises(ConfigError, match="verl's batch has no rollout_log_probs"):
        step(trainer(), batch, monkeypatch)


def test_a_checkpoint_carries_the_thresholds_on(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = f"+{OURS}.thresholds=level"
    found = trainer(level)
    for seed in range(5):
        metrics = step(found, batch_of(1.0, seed), monkeypatch)[1]
    found.global_steps = 5
    (tmp_path / "global_step_5").mkdir()
    found._save_checkpoint()
    assert json.loads((tmp_path / "global_step_5" / "fp8plan.json").read_text())["steps"] == 5
    resumed = trainer(level, "+trainer.at=5")
    assert resumed.monitor.steps == 5
    assert resumed.monitor.thresholds.tis == metrics["fp8plan/threshold_tis"] < found.plan.thresholds["token_tis"]


def test_a_step_down_that_is_advised_is_said_with_what_to_type(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[ModuleType], list[str]]
) -> None:
    from fp8plan.integrations.verl import trainer as ours

    said, found = warnings_of(ours), trainer()
    for seed in range(30):
        step(found, batch_of(2.0, seed), monkeypatch)
    assert said
    assert "advises a step down from fp8_kv: " in said[0]
    assert said[0].endswith(f"go on from a checkpoint with +{OURS}.choice=bf16")
