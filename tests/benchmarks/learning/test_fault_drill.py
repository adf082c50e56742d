"""The fault drill of benchmarks/learning, with a tiny model: the log says what happened, and no scar is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning import loop as learning
from benchmarks.learning.drill import (
    EVENTS,
    KILLED,
    NAMES,
    NAN,
    RESTARTED,
    SPIKE,
    SPIKED,
    SPOILT,
    STALE,
    STEPS,
    Drill,
    Scar,
    noticed,
)  # fmt: skip
from benchmarks.learning.evidence.places import DRILL as REPORT
from benchmarks.learning.loop import Settings
from benchmarks.learning.policies.table import TINY
from benchmarks.learning.policies.tasks import Problem
from benchmarks.learning.policies.teach import new_model
from benchmarks.learning.predicted import read_json
from benchmarks.learning.state import RunFolder
from fp8plan import schemas
from fp8plan.model.validate.records import read_run


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


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """The drill, when it is over."""
    import warm_processes  # noqa: F401 -- vLLM's processes start in seconds

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("drill")
    new_model("qk_norm", TINY).to(torch.bfloat16).save_pretrained(folder / "model")
    settings = Settings("tiny-qk-norm", folder / "model", prompts=8, samples=16, learning_rate=1e-3)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(learning, "task_of", lambda name, folder: Even())
        found = Drill(settings, RunFolder(folder / "run"), say=lambda text: None, noise=3.0)
        found.run()
        yield found
        found.loop.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_the_run_goes_on_and_each_step_is_in_its_logs_once(drill: Drill) -> None:
    expected = list(range(1, STEPS + 1))
    assert [row["step"] for row in drill.folder.rows("steps.jsonl")] == expected
    assert [row["step"] for row in drill.folder.rows("run.jsonl")] == expected
    assert len(read_run(drill.folder / "run.jsonl", include_first=True).records) == STEPS


@pytest.mark.vllm
@pytest.mark.slow
def test_the_log_says_what_happened(drill: Drill) -> None:
    events = [row for row in drill.folder.rows("events.jsonl") if row["what"] not in ("recalibrate_kv", "step_down")]
    assert [(row["step"], row["what"]) for row in events] == sorted(EVENTS.items())
    failed, stale, refused, resumed = (row["why"] for row in events)
    assert f"not finite: {SPOILT}" in failed
    assert f"step {STALE}'s weights did not arrive" in stale
    assert "the engine has died" in refused
    assert f"from the checkpoint of step {RESTARTED}" in resumed


@pytest.mark.vllm
@pytest.mark.slow
def test_a_spike_is_alarming_and_tightens_for_its_own_batch(drill: Drill) -> None:
    rows = {row["step"]: row for row in drill.folder.rows("run.jsonl")}
    spiked, k3 = rows[SPIKE + 1], {step: row["metrics"][schemas.K3] for step, row in rows.items()}
    assert k3[SPIKE + 1] > SPIKED * max(x for step, x in k3.items() if step != SPIKE + 1)
    assert spiked["alarms"]
    assert spiked["thresholds"]["tis"] < rows[SPIKE]["thresholds"]["tis"]


@pytest.mark.vllm
@pytest.mark.slow
def test_the_reward_curve_shows_no_scar(drill: Drill) -> None:
    assert set(drill.scars) == {NAN, SPIKE, STALE, KILLED, RESTARTED}
    for fault, scar in drill.scars.items():
        assert scar.healed, f"after the fault of step {fault} the reward fell by {-scar.change:.3f}"
    report = drill.report()
    assert report["healed"]
    assert report["noticed"]
    rewards = [row["reward"] for row in drill.folder.rows("steps.jsonl")]
    assert rewards[0] < 0.56
    assert np.mean(rewards[-4:]) > 0.62


def test_on_an_h200_each_fault_was_noticed_and_left_no_scar() -> None:
    report = read_json(REPORT)
    assert report["noticed"]
    assert [x["step"] for x in report["scars"]] == list(NAMES)
    assert all(Scar(x["change"], x["error"]).healed for x in report["scars"])


@pytest.mark.parametrize("missing", [None, *EVENTS, SPIKE])
def test_a_fault_that_the_logs_do_not_tell_is_not_noticed(tmp_path: Path, missing: int | None) -> None:
    folder = RunFolder(tmp_path)
    for step, what in EVENTS.items():
        if step != missing:
            folder.log("events.jsonl", {"step": step, "what": what})
    for step in range(1, STEPS + 1):
        spiked = step == SPIKE + 1 and missing != SPIKE
        folder.log("run.jsonl", {"step": step, "metrics": {schemas.K3: 1.1 * SPIKED if spiked else 1.0}})
    assert noticed(folder) == (missing is None)
