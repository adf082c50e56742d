"""TRL's GRPOTrainer with a plan: real runs on the CPU, colocated; and without one, where it is TRL's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import predicted
from tiny_models import CALIBRATION, Outputs, cpu_plan, generate
from tiny_models import started as engine_started
from trl_runs import COMPLETION, PROMPT, SETTINGS, dataset, logged, model, share_of_even, started, trainer_of

from fp8plan import schemas
from fp8plan.model.plan.plan import Plan
from fp8plan.model.precision import PRESETS
from fp8plan.model.validate.records import read_records
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.watch.guard.fallback import Action
from fp8plan.runtime.watch.guard.guard import Guard, Verdict
from fp8plan.runtime.watch.monitor.sinks import JsonLines

pytestmark = pytest.mark.trl

STEPS = 12
# Parameters that the CPU's engine keeps as they were sent; it packs its linears.
UNPACKED = ("embed_tokens", "norm", "lm_head")


def live(trainer: Any) -> torch.nn.Module:
    """The model inside of the trainer's engine."""
    found: torch.nn.Module = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    return found


def same_as_policy(trainer: Any) -> bool:
    """Return whether the live weights that the engine keeps unpacked equal the policy's, bit for bit."""
    policy = {name: tensor.detach().bfloat16() for name, tensor in trainer.model.named_parameters()}
    held = {name: x for name, x in live(trainer).named_parameters() if any(part in name for part in UNPACKED)}
    assert len(held) > 10
    return all(torch.equal(policy[name], x) for name, x in held.items())


@dataclass
class Run:
    """Facts of a run.

    after_sync: for each sync, (live weights are the policy's, samples compared, source of KV scales)
    """

    plan: Plan
    history: list[dict[str, Any]]
    after_sync: list[tuple[bool, int, str | None]]
    answers: Outputs
    policy: Path
    stepped_down: list[dict[str, Any]]
    precision: str
    folder: Path

    def logged(self, name: str) -> list[float]:
        return [row[name] for row in self.history if name in row]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of STEPS steps with an FP8 KV cache, and of three more.

    The guard advises a step down after the first of these three.
    """
    from fp8plan.integrations.trl.colocated import PlannedGeneration

    folder = tmp_path_factory.mktemp("trl")
    seen: list[tuple[bool, int, str | None]] = []
    sync = PlannedGeneration.sync_weights
    sinks = [JsonLines(folder / "run.jsonl")]
    how: dict[str, Any] = {"plan": "auto", "choice": "fp8_kv", "sinks": sinks, "save_strategy": "steps"}
    with pytest.MonkeyPatch.context() as patch, started(folder, max_steps=STEPS, save_steps=STEPS, **how) as trainer:

        def watched(self: PlannedGeneration) -> None:
            sync(self)
            assert self.report is not None
            seen.append((same_as_policy(trainer), self.report.compared, self.report.kv_source))

        patch.setattr(PlannedGeneration, "sync_weights", watched)
        trainer.train()
        history, after_sync = trainer.state.log_history, list(seen)
        trainer.vllm_generation.sync_weights()
        trainer.rollout_engine.recalibrate_kv(kv_prompts=CALIBRATION)
        answers = generate(trainer.rollout_engine, cold=True)
        trainer.model.bfloat16().save_pretrained(folder / "policy")
        trainer.model.float()

        def judge(guard: Guard, observed: Any) -> Verdict:
            action = Action.KV_TO_BF16 if guard.facts.precision == "fp8_kv" else Action.NONE
            return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, as_fast=False, causes=(), action=action, reason="a test")

        patch.setattr(Guard, "after_rollout", judge)
        trainer.args.max_steps, trainer.args.save_strategy = 3, "no"
        trainer.train()
        yield Run(
            trainer.plan,
            history,
            after_sync,
            answers,
            folder / "policy",
            trainer.state.log_history,
            trainer.rollout_engine.launch.precision,
            folder,
        )


@pytest.mark.vllm
def test_the_run_chose_from_the_plan_of_its_configuration_alone(run: Run, tmp_path: Path) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import planned

    version = check_vllm_version().partition("+")[0]
    args = GRPOConfig(str(tmp_path), **SETTINGS)
    assert planned(args, dataset(), model=model(), gpu="cpu", engine_version=version) == run.plan


@pytest.mark.vllm
def test_the_precision_is_planned_from_the_trainers_own_settings(run: Run) -> None:
    assert (run.plan.gpu, run.plan.model) == ("cpu", model())
    assert (run.plan.workload["prompts"], run.plan.workload["samples"]) == (4, 8)
    assert (run.plan.workload["max_prompt_tokens"], run.plan.workload["max_response_tokens"]) == (PROMPT, COMPLETION)
    assert (run.plan.limits.max_model_len, run.plan.limits.max_num_seqs) == (256, 32)
    assert [c.precision for c in run.plan.choices if c.available] == ["bf16", "fp8_kv"]


@pytest.mark.vllm
def test_the_policy_learns_with_an_fp8_kv_cache(run: Run) -> None:
    rewards = run.logged("reward")
    assert len(rewards) == STEPS
    assert 0.4 < rewards[0] < 0.6
    assert rewards[-1] > rewards[0] + 0.2
    assert run.logged("fp8plan/fp8_kv") == [1.0] * STEPS


@pytest.mark.vllm
def test_the_engine_holds_the_policys_weights_after_each_sync(run: Run) -> None:
    assert len(run.after_sync) == STEPS
    assert all(same and compared > 0 for same, compared, _ in run.after_sync)
    sources = [source or "" for *_, source in run.after_sync]
    assert "random tokens" in sources[0]
    assert set(sources[1:]) == {"sequences of the last rollout"}
    assert run.logged("fp8plan/sync_compared") == [float(compared) for _, compared, _ in run.after_sync]
    assert min(run.logged("fp8plan/sync_s")) > 0


@pytest.mark.vllm
def test_it_says_what_a_fresh_engine_on_the_trained_policy_says(run: Run) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model()).save_pretrained(run.policy)
    with engine_started(model_folder := run.policy, "", "fp8_kv") as engine:
        assert (model_folder / "model.safetensors").is_file()
        assert generate(engine, cold=True) == run.answers


@pytest.mark.vllm
def test_trls_log_has_fp8plans_figures(run: Run) -> None:
    mean, k3 = run.logged("sampling/importance_sampling_ratio/mean"), run.logged("fp8plan/k3_kl")
    assert all(abs(x - 1) < 0.1 for x in mean)
    assert k3[0] > 0  # later the policy may be so sure of a token that both log-probs are 0
    assert all(0 <= x < 0.03 for x in k3)  # at most 0.009 on three kinds of CPU
    for name in ("speed_ratio", "as_fast_as_predicted", "advice", "tokens_per_s", "predicted_tokens_per_s", "ess_raw"):
        assert len(run.logged(f"fp8plan/{name}")) == STEPS, name
    records = [json.loads(line) for line in (run.folder / "run.jsonl").read_text().splitlines()][:STEPS]
    assert [row["metrics"]["rollout_corr/k3_kl"] for row in records] == pytest.approx(k3)
    assert [row["metrics"][schemas.REWARD] for row in records] == pytest.approx(run.logged("reward"))
    bounds = run.logged("fp8plan/threshold_tis")
    assert bounds == [row["thresholds"]["tis"] for row in records]  # and TRL's loss gets them
    assert bounds[0] == run.plan.thresholds["token_tis"]
    largest = run.logged("sampling/importance_sampling_ratio/max")
    assert all(ratio <= bound * (1 + 1e-6) for ratio, bound in zip(largest, bounds, strict=True))
    assert {row["precision"] for row in records} == {"fp8_kv"}
    assert read_records(run.folder / "run.jsonl")


@pytest.mark.vllm
def test_a_step_down_that_the_guard_advises_is_taken_before_the_next_sync(run: Run) -> None:
    rows = [row for row in run.stepped_down if "reward" in row]
    assert [row["fp8plan/fp8_kv"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["fp8plan/speed_ratio"] for row in rows] == [0.5] * 3
    assert rows[0]["fp8plan/advice"] == 2.0
    assert run.precision == "bf16"


@pytest.mark.vllm
def test_a_checkpoint_carries_the_thresholds_and_the_guards_memory_on(run: Run) -> None:
    import trl

    from fp8plan.integrations.trl import GRPOTrainer
    from fp8plan.integrations.trl.colocated import PlannedGeneration

    saved = run.folder / f"checkpoint-{STEPS}"
    state = json.loads((saved / "fp8plan.json").read_text())
    assert (state["steps"], state["guard"]["rung"]) == (STEPS, "none")
    state["guard"]["rung"] = "kv_to_bf16"
    (saved / "fp8plan.json").write_text(json.dumps(state))
    told: list[Any] = []
    guard = SimpleNamespace(state=SimpleNamespace(rung=Action.KV_TO_BF16), precision_for=lambda running: "bf16")
    launched = SimpleNamespace(precision="fp8_kv")
    engine = SimpleNamespace(launch=launched, guard=guard, apply=lambda *advice: told.append(advice))
    resumed = object.__new__(GRPOTrainer)
    resumed.rollout_engine = engine  # type: ignore[assignment]
    resumed.monitor = SimpleNamespace(load_state_dict=told.append)  # type: ignore[assignment]
    resumed.accelerator = SimpleNamespace(num_processes=1)  # type: ignore[assignment]
    resumed.use_adaptive_entropy = resumed.is_deepspeed_enabled = False
    resumed.vllm_generation = object.__new__(PlannedGeneration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "_load_optimizer_and_scheduler", lambda self, checkpoint: None)
        resumed._load_optimizer_and_scheduler(None)
        assert told == []
        resumed._load_optimizer_and_scheduler(str(saved))
    sequences = state.pop("sequences")
    assert told == [state, (Action.KV_TO_BF16, None)]
    assert len(sequences) == 16
    assert {len(sequence) for sequence in sequences} == {PROMPT + COMPLETION}
    assert resumed.vllm_generation.kv_prompts == sequences


@pytest.mark.slow
@pytest.mark.vllm
def test_fp8_weights_and_experts_are_synced_colocated_from_the_file_of_a_plan(tmp_path: Path) -> None:
    """Transformers holds the experts of a layer in one tensor, the checkpoint does not."""
    from block_weights import quantize
    from transformers.core_model_loading import revert_weight_conversion

    path = tmp_path / "plan.json"
    made = replace(cpu_plan("fp8_block+fp8_kv"), model=model("moe"), choices=tuple(map(predicted, PRESETS)))
    path.write_text(made.to_json())
    with started(tmp_path, plan=path, policy=model("moe"), max_steps=2) as trainer:
        trainer.train()
        trainer.vllm_generation.sync_weights()
        held, policy = dict(live(trainer).named_parameters()), dict(trainer.model.named_parameters())
        for layer in range(3):
            name = f"model.layers.{layer}.self_attn.o_proj.weight"
            codes, scales = quantize(policy[name].detach().bfloat16())
            assert torch.equal(held[name].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(held[f"{name}_scale_inv"], scales)
        assert logged(trainer, "fp8plan/fp8_weights") == [1.0] * 2
        digests = trainer.rollout_engine.llm.collective_rpc("fp8plan_digests")[0]["ok"]
        whole = {name: x.bfloat16() for name, x in trainer.model.state_dict().items()}
        trainer.rollout_engine.sync_weights(revert_weight_conversion(trainer.model, whole))
        assert trainer.rollout_engine.llm.collective_rpc("fp8plan_digests")[0]["ok"] == digests
        assert sum(".experts." in name and digest != 0 for name, digest in digests.items()) > 3
        assert all(0 < error < 0.05 for error in logged(trainer, "fp8plan/weight_error"))


PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "trl.md").read_text()


@pytest.mark.slow
@pytest.mark.vllm
def test_the_guides_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As it is written, but for the model's name and what makes a run short and possible on a CPU."""
    import trl

    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
    short = SETTINGS | {"output_dir": str(tmp_path), "max_steps": 1}
    config = trl.GRPOConfig
    monkeypatch.setattr(trl, "GRPOConfig", lambda **written: config(**(written | short)))
    names: dict[str, Any] = {"reward": share_of_even, "dataset": dataset()}
    exec(code.replace("Qwen/Qwen3-8B", model()), names)
    trainer = names["trainer"]
    trainer.rollout_engine.shutdown()
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("fp8plan: ")]
    assert said[0] == f'fp8plan: plan="auto": bf16 for {model()} on cpu'
    assert "replaces TRL's defaults (sequence_mask, 3.0), also where they are written out" in said[1]
    assert trainer.plan.choices[trainer.plan.chosen].precision == trainer.rollout_engine.launch.precision == "bf16"
    assert logged(trainer, "fp8plan/fp8_kv") == [0.0]


@pytest.mark.vllm
def test_the_guide_names_the_figures_that_are_logged(run: Run) -> None:
    assert "`sampling/importance_sampling_ratio/min`" in PAGE
    rows = re.findall(r"^\| (`.+?) \|", PAGE, re.M)
    named = {f"fp8plan/{figure}" for row in rows for figure in re.findall(r"`(\w+)`", row)}
    elsewhere = {"fp8plan/threshold_low", "fp8plan/threshold_high", "fp8plan/weight_error"}  # bands and FP8 weights
    elsewhere.add("fp8plan/routing_differs")  # of router replay
    assert named - elsewhere <= set(run.history[0])
    assert len(named) > 10


# ------------------------------------------------------------------------------------------------ without a plan


def test_without_a_plan_it_is_trls_own_trainer(tmp_path: Path) -> None:
    """The same losses, rewards and weights after the same seed, bit for bit."""
    import trl

    from fp8plan.integrations.trl import GRPOTrainer

    found = []
    for kind in (trl.GRPOTrainer, GRPOTrainer):
        trainer = trainer_of(kind, tmp_path, use_vllm=False, vllm_mode="colocate", max_steps=2, seed=7)
        trainer.train()
        rows = [(row["loss"], row["reward"]) for row in trainer.state.log_history if "reward" in row]
        found.append((rows, {name: x.detach().clone() for name, x in trainer.model.named_parameters()}))
    (theirs, their_weights), (ours, our_weights) = found
    assert len(theirs) == 2
    assert ours == theirs
    assert all(torch.equal(their_weights[name], tensor) for name, tensor in our_weights.items())


def test_without_a_plan_trl_makes_its_own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl
    from trl.trainer import grpo_trainer

    from fp8plan.integrations.trl import GRPOTrainer

    class Asked(Exception):
        pass

    asked = []

    def engine(**settings: Any) -> None:
        asked.append({name: x for name, x in settings.items() if isinstance(x, (str, int, float, type(None)))})
        raise Asked

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", engine)
    for kind in (trl.GRPOTrainer, GRPOTrainer):
        with pytest.raises(Asked):
            trainer_of(kind, tmp_path)
    assert asked[0]["mode"] == "colocate"
    assert asked[0] == asked[1]
