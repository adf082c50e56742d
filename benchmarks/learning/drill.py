"""A fault drill in a running GRPO loop: each fault is planted, the run goes on, and no scar may be left.

    python -m benchmarks.learning.drill FOLDER --policy qk-norm [--device cuda] [--memory 0.1]

FOLDER/POLICY/model has the policy, as benchmarks.learning.run leaves it; FOLDER/POLICY/drill, which must be new, gets
the run's own logs and drill.json: for each fault the change of the reward, and its standard error.

A scar would be a policy that is worse after a fault than before it. Criterion: on the same held-out prompts, with new
samples, the reward some steps after the fault is no lower than before it by more than 3 standard errors of the
difference, taken over prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from benchmarks.learning.arms import SPIKE as NOISE
from benchmarks.learning.arms import Arm
from benchmarks.learning.loop import Loop, Settings
from benchmarks.learning.policies.table import POLICIES
from benchmarks.learning.policies.tasks import PILOT
from benchmarks.learning.run import SIZES, sizes_of
from benchmarks.learning.state import DRILL, RunFolder
from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.jsonl import now

NAN, SPIKE, STALE, KILLED, RESTARTED = 4, 8, 12, 16, 20  # after this step
NAMES: Final = {
    NAN: "corrupted sync",
    SPIKE: "KL spike",
    STALE: "stale engine",
    KILLED: "engine killed",
    RESTARTED: "trainer restarted from its checkpoint",
}
EVENTS: Final = {NAN: "sync failed", STALE: "stale", KILLED: "rollout refused", RESTARTED: "resumed"}
SPIKED: Final = 10.0  # times the largest k3 of other steps: that of a spike's
STEPS, SAVED, LATER = 24, 4, 3
ERRORS: Final = 3.0  # standard errors
PROMPTS, SAMPLES = 16, 16  # held out
SPOILT: Final = "model.layers.1.self_attn.q_proj.weight"


class Scar(NamedTuple):
    """The change of the mean reward on held-out prompts from just before a fault to some steps after it."""

    change: float
    error: float

    @property
    def healed(self) -> bool:
        return self.change > -ERRORS * self.error


class Drill:
    """A loop that is put to the test.

    noise: of the weights that a spike sends, as a share of each matrix's RMS
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, say: Callable[[str], Any] = print, noise: float = NOISE
    ) -> None:
        self.settings = replace(settings, steps=STEPS, save_every=SAVED, mode="multiprocess")
        self.folder, self.noise, self.say = folder, noise, say
        self.scars = dict[int, Scar]()
        self.loop = self._started()

    def run(self) -> None:
        """Do all steps, with a fault after each of five."""
        faults = {
            NAN: self.corrupted_sync,
            SPIKE: self.kl_spike,
            STALE: self.stale_engine,
            KILLED: self.killed_engine,
            RESTARTED: self.restarted_trainer,
        }
        before = dict[int, Any]()
        while self.loop.step < STEPS:
            step = self.loop.step
            if step in faults:
                before[step] = self._rewards()
                faults.pop(step)()
                if self.loop.step != step:
                    raise RuntimeError(f"{NAMES[step]}: the run is at step {self.loop.step}, it was at {step}")
            if (fault := step - LATER) in before:
                change = self._rewards() - before[fault]
                self.scars[fault] = Scar(float(change.mean()), float(change.std(ddof=1) / len(change) ** 0.5))
                self.say(f"{NAMES[fault]}: reward {self.scars[fault].change:+.3f} +- {self.scars[fault].error:.3f}")
            self.loop.one_step()
            if self.loop.step % SAVED == 0:
                self.loop.save()

    def report(self) -> dict[str, Any]:
        """Return what drill.json says."""
        scars = [{"fault": NAMES[step], "step": step} | scar._asdict() for step, scar in self.scars.items()]
        healed = len(self.scars) == len(NAMES) and all(scar.healed for scar in self.scars.values())
        said = {"date": now(), "policy": self.settings.policy, "device": self.settings.device}
        said |= {"precision": self.loop.engine.launch.precision, "healed": healed, "noticed": noticed(self.folder)}
        return said | {"scars": scars}

    def corrupted_sync(self) -> None:
        """The next sync has a NaN in one weight."""
        good = self.loop.tensors

        def spoilt(noise: float) -> dict[str, torch.Tensor]:
            self.loop.tensors = good  # type: ignore[method-assign]
            found = good(noise)
            found[SPOILT] = found[SPOILT].clone()  # a BF16 trainer's tensors are its own weights
            found[SPOILT][3, 5] = float("nan")
            return found

        self.loop.tensors = spoilt  # type: ignore[method-assign]
        self.loop.sync(0.0)

    def kl_spike(self) -> None:
        """The engine gets weights with noise, so that the next rollout comes from another policy."""
        self.loop.sync(self.noise)

    def stale_engine(self) -> None:
        """The next sync says that all went well and does nothing."""
        good = self.loop.engine.sync_weights

        def lost(*_: Any, **__: Any) -> None:
            self.loop.engine.sync_weights = good  # type: ignore[method-assign]

        self.loop.engine.sync_weights = lost  # type: ignore[method-assign,assignment]
        self.loop.sync(0.0)

    def killed_engine(self) -> None:
        """The engine's process is killed."""
        manager = self.loop.engine.llm.llm_engine.engine_core.resources.engine_manager
        for process in manager.processes:
            process.kill()
            process.join(30)

    def restarted_trainer(self) -> None:
        """The trainer is lost one step after its last checkpoint, and begins again from there."""
        self.loop.one_step()
        self.loop.close()
        self.loop = self._started()

    def _started(self) -> Loop:
        return Loop(self.settings, Arm("fp8", "adaptive"), 0, self.folder, self.say)

    def _rewards(self) -> Any:
        """The mean reward of each held-out prompt."""
        return np.array(self.loop.rollout(PROMPTS, SAMPLES, PILOT, 0)[1]).reshape(PROMPTS, SAMPLES).mean(1)


def noticed(folder: RunFolder) -> bool:
    """True if the logs tell of each fault when it came: events of four, and the k3 of the spike's batch."""
    told = {(row["step"], row["what"]) for row in folder.rows("events.jsonl")}
    k3 = {row["step"]: row["metrics"][schemas.K3] for row in folder.rows("run.jsonl")}
    others = max(x for step, x in k3.items() if step != SPIKE + 1)
    return set(EVENTS.items()) <= told and k3[SPIKE + 1] > SPIKED * others


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.drill", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--policy", choices=[name for name, x in POLICIES.items() if not x.frozen_layers], required=True
    )
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--memory", type=float, default=0.1, help="share of the GPU's memory for the engine")
    given = parser.parse_args(words)
    checkpoint = given.folder / given.policy / "model"
    folder = RunFolder(given.folder / given.policy / DRILL)
    if (folder / "steps.jsonl").is_file():
        raise ConfigError(
            f"{folder.path} has a drill already; allowed: a new folder. Remove it, or give another FOLDER"
        )
    sizes = sizes_of(given.policy, given.device) | {"memory": given.memory}
    with folder.locked():
        drill = Drill(Settings(given.policy, checkpoint, given.device, **sizes), folder, lambda x: print(x, flush=True))
        try:
            drill.run()
            found = drill.report()
            folder.write("drill.json", found)
        finally:
            drill.loop.close()
    return 0 if found["healed"] and found["noticed"] else 1


if __name__ == "__main__":
    sys.exit(main())
