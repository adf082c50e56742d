"""One arm, one seed: GRPO with fp8plan's engine and Monitor, step by step, from a checkpoint if there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

import fp8plan
from benchmarks.learning import predicted
from benchmarks.learning.arms import CORRECTIONS, Arm, broken, strength
from benchmarks.learning.grpo import Sample, batch_of, samples_of
from benchmarks.learning.policies.make import task_of
from benchmarks.learning.policies.tasks import PILOT, TRAIN
from benchmarks.learning.state import RunFolder
from benchmarks.learning.trainer import Trainer
from fp8plan import schemas
from fp8plan.errors import ProfileError
from fp8plan.jsonl import now
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import E4M3_MAX
from fp8plan.model.risk.expected import COUNTED_TIS, THRESHOLD
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.engine.launch import held_back
from fp8plan.runtime.apply.weight_sync.kv_scales import MARGIN
from fp8plan.runtime.watch.correction.settings import Thresholds
from fp8plan.runtime.watch.guard.fallback import GuardSettings
from fp8plan.views.report import plan_report

ADVISES_NOTHING: Final = GuardSettings(patience=None)  # it judges each rollout; an arm stays what it is called


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, beside its arm's.

    policy, checkpoint: its name, and the folder of its weights
    prompts, samples:   of a rollout
    learning_rate:      of AdamW, constant
    micro_tokens:       padded tokens of a micro-batch
    save_every:         steps; 0: never
    memory:             share of the GPU's memory for the engines, whose trainers are on the same GPU
    at_once:            runs that share the GPU
    """

    policy: str
    checkpoint: Path
    device: str = "cpu"
    steps: int = 40
    prompts: int = 16
    samples: int = 16
    learning_rate: float = 1e-4
    temperature: float = 1.0
    clip: float = 0.2
    max_norm: float = 1.0
    micro_tokens: int = 16_384
    save_every: int = 10
    memory: float = 0.4
    at_once: int = 1


def as_text(plan: fp8plan.Plan) -> str:
    """The report of a plan, as `fp8plan plan` prints it."""
    console = Console(width=120)
    with console.capture() as shown:
        console.print(plan_report(plan))
    return shown.get()


class Loop:
    """A run of one arm. `run` does all of it."""

    def __init__(
        self, settings: Settings, arm: Arm, seed: int, folder: RunFolder, say: Callable[[str], Any] = print
    ) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM would take most of the machine's
        self.settings, self.arm, self.seed, self.folder, self.say = settings, arm, seed, folder, say
        self.task, self.correction = task_of(settings.policy, settings.checkpoint), CORRECTIONS[arm.correction]
        torch.manual_seed(seed)
        saved = folder.load(settings.device)
        self.step = 0 if saved is None else int(saved["step"])
        self.trainer = Trainer(
            settings.checkpoint, settings.device, settings.learning_rate, settings.temperature, settings.clip,
            settings.max_norm, settings.micro_tokens,
        )  # fmt: skip
        self.first = self.trainer.tensors() if arm.mismatch == "broken" else {}
        self.gpu = find_gpu("cpu" if settings.device == "cpu" else "auto")
        limits, pool = predicted.limits_of(self.gpu, self.task, settings.memory / settings.at_once)
        self.limits = replace(limits, enable_return_routed_experts=arm.replay)
        self.precision = arm.preset(settings.device) if saved is None else saved["precision"]
        setup = EngineSetup(str(settings.checkpoint), self.gpu, self.precision, self.limits)
        with held_back():
            self.engine = fp8plan.RolloutEngine.from_setup(
                setup,
                skip_tokenizer_init=True,
                mode="inprocess",
                seed=seed + (self.step << 16),
                guard=ADVISES_NOTHING,
                **pool,
            )
        say("the engine is there")
        if saved is not None:
            self.trainer.load_state_dict(saved["trainer"])
            self.tell("resumed", f"from the checkpoint of step {self.step}")
        self.sync(0.0)
        if saved is None:
            self._pilot((settings.prompts, settings.samples))
        plan = None
        if (folder / "plan.json").is_file():
            plan = fp8plan.Plan.from_json((folder / "plan.json").read_text(encoding="utf-8"))
            # An arm starts at its own C, whatever the plan recommends.
            start = self.correction.settings.thresholds or Thresholds(COUNTED_TIS)
            plan = replace(plan, thresholds={THRESHOLD: start.tis})
        sinks = [fp8plan.JsonLines(str(folder / "run.jsonl"))]
        laws = self.correction
        self.monitor = fp8plan.Monitor(laws.settings, laws.controller, sinks, plan=plan, engine=self.engine)
        if saved is not None:
            self.monitor.load_state_dict(saved["monitor"])

    def run(self) -> None:
        """Do the steps that are left."""
        while self.step < self.settings.steps:
            self.one_step()
            if self.settings.save_every and self.step % self.settings.save_every == 0:
                self.save()
        self.sync(0.0)  # the trainer's own weights, whatever was planted
        self.folder.write("done.json", {"steps": self.step, "date": now(), "reward_after": self.evaluate()})

    def close(self) -> None:
        self.monitor.close()
        self.engine.shutdown()

    def one_step(self) -> None:
        """Rollout, correction, updates, sync."""
        begun = self.trainer.clock()
        samples, rewards, rollout_s = self.rollout(self.settings.prompts, self.settings.samples, TRAIN, self.step)
        batch = batch_of(samples, rewards, self.settings.samples).to(self.settings.device)
        old = self.trainer.logprobs(batch)
        mean = sum(rewards) / len(rewards)
        versions = [self.engine.state.version] * len(samples)
        corrected = self.monitor.step(
            old,
            batch.rollout_logprobs,
            batch.mask,
            versions=versions,
            routing_differs=self.trainer.routing_differs(batch) if self.arm.replay else None,
            metrics={schemas.REWARD: mean},
        )
        self.trainer.update(batch, old, corrected.mask, corrected.weights)
        self.step += 1
        trained = self.trainer.clock()
        if corrected.decided.escalate in self.correction.follows:
            self.follow(corrected.decided)
        if not self.arm.stale(self.step - 1, self.settings.steps) or not self.engine.serving:  # a step down ended it
            self.sync(strength(self.arm.mismatch, self.step, self.settings.steps))
        ended = self.trainer.clock()
        row = {"step": self.step, "date": now(), "reward": mean, "response_tokens": int(batch.mask.sum())}
        row |= {"finished": sum(sample.tokens[-1] in self.task.stop for sample in samples) / len(samples)}
        row |= {"rollout_s": rollout_s, "train_s": trained - begun - rollout_s, "sync_s": ended - trained}
        self.folder.log("steps.jsonl", row | {"step_s": ended - begun, "precision": self.engine.launch.precision})
        self.say(
            f"step {self.step}: reward {mean:.3f}, k3 {corrected.mismatch.k3:.1e}, {corrected.decided.decision.value}, "
            f"{ended - begun:.1f} s"
        )

    def rollout(self, prompts: int, samples: int, use: int, number: int) -> tuple[list[Sample], list[float], float]:
        """Samples, their rewards, and seconds."""
        from vllm import SamplingParams

        problems = [p for p in self.task.problems(prompts, (self.seed, use, number)) for _ in range(samples)]
        inputs = [{"prompt_token_ids": problem.prompt} for problem in problems]
        sampling = SamplingParams(
            temperature=self.settings.temperature, max_tokens=self.task.max_response_tokens, logprobs=0,
            stop_token_ids=list(self.task.stop), detokenize=False, flat_logprobs=True,
        )  # fmt: skip
        begun = time.perf_counter()
        drawn = samples_of(problems, self.engine.generate(inputs, sampling, routed_experts=self.arm.replay))
        seconds = time.perf_counter() - begun
        return drawn, [self.task.reward(sample.problem, sample.tokens) for sample in drawn], seconds

    def follow(self, decided: Any) -> None:
        """Do what the controller asks for beyond thresholds."""
        before = self.engine.launch.precision
        self.engine.apply(None, decided.escalate)
        self.tell(decided.escalate.value, f"{before}, then {self.engine.launch.precision}: {decided.reason}")

    def tensors(self, noise: float) -> dict[str, torch.Tensor]:
        """The tensors that are sent to the engine. noise: as a share of each matrix's RMS"""
        sent = self.trainer.tensors(noise, self.seed * 100_003 + self.step)
        if not broken(self.arm.mismatch, self.step, self.settings.steps):
            return sent
        return sent | {name: tensor for name, tensor in self.first.items() if ".layers.0." in name}

    def sync(self, noise: float) -> None:
        """Make the policy's weights serve. noise: as in `tensors`"""
        kv = {}
        if self.engine.state.fp8_kv and self.arm.kv_scales == "unit":
            largest = E4M3_MAX / MARGIN
            kv = {"kv_amax": {layer: [largest] * 3 for layer in self.engine.kv_scales()}}
        self.engine.sync_weights(self.tensors(noise), **kv)

    def save(self) -> None:
        state = {"step": self.step, "precision": self.engine.launch.precision}
        self.folder.save(state | {"trainer": self.trainer.state_dict(), "monitor": self.monitor.state_dict()})

    def evaluate(self) -> float:
        """Mean reward on the pilot's problems, the same ones at any time."""
        _, rewards, _ = self.rollout(self.settings.prompts, self.settings.samples, PILOT, 0)
        return sum(rewards) / len(rewards)

    def tell(self, what: str, why: object) -> None:
        self.folder.log("events.jsonl", {"step": self.step, "date": now(), "what": what, "why": str(why)})
        self.say(f"step {self.step}: {what}: {why}")

    def _pilot(self, shape: tuple[int, int]) -> None:
        """A rollout and an update that is not applied, both timed when warm; then the arm's plan, written."""
        samples, rewards, _ = self.rollout(*shape, PILOT, 0)
        batch = batch_of(samples, rewards, self.settings.samples).to(self.settings.device)
        times = [self.trainer.timed(batch) for _ in range(2)][-1]
        lengths = [(len(sample.problem.prompt), len(sample.tokens)) for sample in samples]
        steps = StepTimes(train_s=times[1], logprob_s=times[0])
        try:
            plan: Any = predicted.plan_of_pilot(
                self.settings.checkpoint, self.gpu.name, shape, lengths, self.limits, steps
            )
            self.folder.write("plan.json", plan.to_dict())
            self.say(f"{as_text(plan)}\nThis run samples in {self.precision}, whatever the plan chose.\n")
        except ProfileError as error:  # experts on a CPU: the run is worth its while without
            plan = error
            self.tell("no plan", error)
        foreseen = predicted.foreseen(plan, self.precision)
        foreseen |= {"at_once": self.settings.at_once, "pilot_reward": sum(rewards) / len(rewards)}
        responses = [tokens for _, tokens in lengths]
        foreseen["pilot_response_tokens"] = {"mean": sum(responses) / len(responses), "longest": max(responses)}
        self.folder.write("predicted.json", foreseen)
