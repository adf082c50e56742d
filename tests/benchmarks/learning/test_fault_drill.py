"""A drill in a running GRPO loop: each fault is planted, the run goes on, the log says what happened, no scar is left.

A scar would be a policy that is worse after a fault than before it. Criterion: on the same 16 held-out prompts, 16
samples each, the reward some steps after the fault is no lower than before it by more than 3 standard errors of the
difference, taken over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from benchmarks.learning import loop as learning
from benchmarks.learning.arms import Arm
from benchmarks.learning.loop import Loop, Settings
from benchmarks.learning.policies import TINY, new_model
from benchmarks.learning.state import RunFolder
from benchmarks.learning.tasks import PILOT, Problem
from fp8plan import schemas
from fp8plan.model.validate.records import read_records

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NAN, SPIKE, STALE, KILLED, RESTARTED = 4, 8, 12, 16, 20  # after this step
STEPS, SAVED, LATER = 24, 4, 3
ERRORS = 3.0  # standard errors


@dataclass(frozen=True)
class Even:
    """Any prompt; a response is worth the share of its tokens that are even. A random model learns it in some steps."""

    stop: Sequence[int] = ()
    max_prompt_tokens: int = 8
    max_response_tokens: int = 16

    def problems(self, count: int, seed: Sequence[int]) -> list[Problem]:
        chance = np.random.default_rng(list(seed))
        return [Problem(chance.integers(256, size=8).tolist(), None) for _ in range(count)]

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        return sum(token % 2 == 0 for token in response) / len(response)


class Drill:
    """A loop that is put to the test. faults: step -> what is done after it; scars: step -> difference, its error"""

    def __init__(self, folder: Path) -> None:
        import warm_processes  # noqa: F401 -- vLLM's processes start in seconds

        self.folder, self.path = RunFolder(folder / "run"), folder / "model"
        torch.manual_seed(0)
        new_model("qk_norm", TINY).to(torch.bfloat16).save_pretrained(self.path)
        self.loop = self.started()
        self.before = dict[int, Any]()
        self.scars = dict[int, tuple[float, float]]()

    def started(self) -> Loop:
        settings = Settings("tiny-qk-norm", self.path, steps=STEPS, prompts=16, samples=16, save_every=SAVED)
        settings = replace(settings, learning_rate=1e-3, mode="multiprocess")
        return Loop(settings, Arm("fp8", "adaptive"), 0, self.folder, say=lambda text: None)

    def run(self, faults: dict[int, Callable[[], None]]) -> None:
        while self.loop.step < STEPS:
            step = self.loop.step
            if step in faults:
                self.before[step] = self.rewards()
                faults.pop(step)()
                assert self.loop.step == step
            if (fault := self.loop.step - LATER) in self.before:
                change = self.rewards() - self.before[fault]
                self.scars[fault] = float(change.mean()), float(change.std(ddof=1) / len(change) ** 0.5)
            self.loop.one_step()
            if self.loop.step % SAVED == 0:
                self.loop.save()

    def rewards(self) -> Any:
        """The mean reward of each held-out prompt."""
        return np.array(self.loop.rollout(16, 16, PILOT, 0)[1]).reshape(16, 16).mean(1)

    def corrupted_sync(self) -> None:
        """The next sync has a NaN in one weight."""
        good = self.loop.tensors

        def spoilt(noise: float) -> dict[str, torch.Tensor]:
            self.loop.tensors = good  # type: ignore[method-assign]
            found = good(noise)
            found["model.layers.1.self_attn.q_proj.weight"][3, 5] = float("nan")
            return found

        self.loop.tensors = spoilt  # type: ignore[method-assign]
        self.loop.sync(0.0)

    def kl_spike(self) -> None:
        """The engine gets weights with noise, so that the next rollout comes from another policy."""
        self.loop.sync(3.0)

    def stale_engine(self) -> None:
        """The next sync says that all went well and does nothing."""
        good = self.loop.engine.sync_weights

        def lost(*_: Any, **__: Any) -> None:
            self.loop.engine.sync_weights = good  # type: ignore[method-assign]

        self.loop.engine.sync_weights = lost  # type: ignore[method-assign,assignment]
        self.loop.sync(0.0)

    def killed_engine(self) -> None:
        manager = self.loop.engine.llm.llm_engine.engine_core.resources.engine_manager
        for process in manager.processes:
            process.kill()
            process.join(30)

    def restarted_trainer(self) -> None:
        """The trainer is lost one step after its last checkpoint, and begins again from there."""
        step = self.loop.step
        self.loop.one_step()
        self.loop.close()
        self.loop = self.started()
        assert self.loop.step == step


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """The drill, when it is over."""
    assert tiny_models.LAYERS  # its import sets the threads of engines
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(learning, "task_of", lambda name, folder: Even())
        found = Drill(tmp_path_factory.mktemp("drill"))
        faults = {NAN: found.corrupted_sync, SPIKE: found.kl_spike, STALE: found.stale_engine}
        found.run(faults | {KILLED: found.killed_engine, RESTARTED: found.restarted_trainer})
        yield found
        found.loop.close()


def test_the_run_goes_on_and_each_step_is_in_its_logs_once(drill: Drill) -> None:
    expected = list(range(1, STEPS + 1))
    assert [row["step"] for row in drill.folder.rows("steps.jsonl")] == expected
    assert [row["step"] for row in drill.folder.rows("run.jsonl")] == expected
    assert len(read_records(drill.folder / "run.jsonl")) == STEPS


def test_the_log_says_what_happened(drill: Drill) -> None:
    events = [row for row in drill.folder.rows("events.jsonl") if row["what"] not in ("recalibrate_kv", "step_down")]
    assert [(row["step"], row["what"]) for row in events] == [
        (NAN, "sync failed"), (STALE, "stale"), (KILLED, "rollout refused"), (RESTARTED, "resumed")
    ]  # fmt: skip
    failed, stale, refused, resumed = (row["why"] for row in events)
    assert "not finite: model.layers.1.self_attn.q_proj.weight" in failed
    assert f"step {STALE}'s weights did not arrive" in stale
    assert "the engine has died" in refused
    assert f"from the checkpoint of step {RESTARTED}" in resumed


def test_a_spike_is_alarming_and_tightens_for_its_own_batch(drill: Drill) -> None:
    rows = {row["step"]: row for row in drill.folder.rows("run.jsonl")}
    spiked, k3 = rows[SPIKE + 1], {step: row["metrics"][schemas.K3] for step, row in rows.items()}
    assert k3[SPIKE + 1] > 10 * max(x for step, x in k3.items() if step != SPIKE + 1)
    assert spiked["alarms"]
    assert spiked["thresholds"]["tis"] < rows[SPIKE]["thresholds"]["tis"]


def test_the_reward_curve_shows_no_scar(drill: Drill) -> None:
    assert set(drill.scars) == {NAN, SPIKE, STALE, KILLED, RESTARTED}
    for fault, (change, error) in drill.scars.items():
        assert change > -ERRORS * error, f"after the fault of step {fault} the reward fell by {-change:.3f}"
    rewards = [row["reward"] for row in drill.folder.rows("steps.jsonl")]
    assert rewards[0] < 0.56
    assert np.mean(rewards[-4:]) > 0.62
