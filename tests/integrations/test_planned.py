"""The plan of a trainer's configuration alone: it is the one that plan="auto" makes, and what it lacks is said."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_files import VERL_CONFIG
from trl_runs import PROMPT, SETTINGS, dataset, model, share_of_even, trainer_of
from verl_config import composed
from verl_parts import config, small

from fp8plan import cli
from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal, Trace
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.apply.vllm_versions import check_vllm_version

OURS = "actor_rollout_ref.rollout.custom.fp8plan"
VERSION = check_vllm_version().partition("+")[0]


def typed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit code of `fp8plan plan`, and what it printed on stdout and stderr."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fp8plan", "plan", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), *capsys.readouterr()


# ------------------------------------------------------------------------------------------------ TRL

GRPO = f"""
from trl import GRPOConfig
from trl_runs import dataset
args = GRPOConfig("out", **{SETTINGS})
def made():
    of_engine = {{"use_vllm": True, "vllm_gpu_memory_utilization": 0.4}}
    return GRPOConfig("out", **of_engine, num_generations=4, max_completion_length=512)
"""


def grpo(folder: Path) -> Path:
    """A user's file."""
    (folder / "grpo.py").write_text(GRPO)
    return folder / "grpo.py"


class Started(Exception):
    pass


def chosen_from(folder: Path, **settings: Any) -> Plan:
    """The plan that a trainer with plan="auto" makes, before its engine starts."""
    from fp8plan.integrations.trl import GRPOTrainer
    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    made: list[Plan] = []

    def start(plan: Plan, path: str, **settings: Any) -> None:
        made.append(plan)
        raise Started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutEngine, "from_plan", start)
        with pytest.raises(Started):
            trainer_of(GRPOTrainer, folder, plan="auto", **settings)
    return made[0]


@pytest.mark.trl
def test_a_plan_of_a_grpo_config_is_the_one_that_auto_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import planned

    auto = chosen_from(tmp_path)
    logged = capsys.readouterr().out
    args = GRPOConfig(str(tmp_path), **SETTINGS)
    plan = planned(args, dataset(), model=model(), gpu="cpu", engine_version=VERSION)
    table = capsys.readouterr().out
    assert plan == auto
    assert (plan.workload["max_prompt_tokens"], plan.limits.max_num_seqs, plan.inside) == (PROMPT, 32, "trl")
    assert "rollout s" in table
    assert table in logged
    words = [model(), "--gpu", "cpu", "--engine-version", VERSION]
    code, out, _ = typed(capsys, *words, "--grpo-config", f"{grpo(tmp_path)}:args,dataset", "--json")
    assert code == 0
    assert Plan.from_json(out) == plan
    assert typed(capsys, *words, "--grpo-config", f"{grpo(tmp_path)}:args,dataset")[1].strip() == table.strip()


@pytest.mark.trl
def test_a_plan_for_a_server_is_the_one_that_auto_makes(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer, planned

    args = GRPOConfig(str(tmp_path), **(SETTINGS | {"vllm_mode": "server"}))
    limits = EngineLimits(max_model_len=512, max_num_seqs=16, tensor_parallel_size=2)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.args, trainer._router_replay = args, None
    trainer._prompt_lengths = dict  # type: ignore[method-assign]
    generation: Any = SimpleNamespace(model=SimpleNamespace(name_or_path="Qwen/Qwen3-8B"))
    trainer._plan_for(generation, "h200", None, limits)
    plan = planned(args, model="Qwen/Qwen3-8B", gpu="h200", limits=limits, engine_version=VERSION)
    assert trainer.plan == plan
    assert (plan.inside, plan.workload["max_prompt_tokens"]) == ("server", 512 - args.max_completion_length)


@pytest.mark.trl
def test_typed_options_go_before_a_grpo_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file asks for BF16, TRL's default, which needs a GPU where it trains."""
    words = ["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", f"{grpo(tmp_path)}:made", "--json"]
    usual = Plan.from_json(typed(capsys, *words)[1])
    limits, work = usual.limits, usual.workload
    assert (work["prompts"], work["samples"], work["max_response_tokens"]) == (2, 4, 512)
    assert (limits.gpu_memory_utilization, limits.max_num_seqs, limits.max_model_len) == (0.4, 8, 40960)
    more = ["--prompts", 16, "--gpu-memory-utilization", 0.7, "--response-lengths", 64, "--accept", "high"]
    plan = Plan.from_json(typed(capsys, *words, *more)[1])
    assert (plan.workload["prompts"], plan.workload["samples"], plan.workload["max_response_tokens"]) == (16, 4, 64)
    assert (plan.limits.gpu_memory_utilization, plan.limits.max_num_seqs, plan.inside) == (0.7, 64, "trl")
    turns = ["--turns", 2, "--turn-tokens", 32, "--tool-tokens", 8, "--tool-s", 1]
    assert "turns" in Plan.from_json(typed(capsys, *words, *turns)[1]).workload
    Path(tmp_path / "seen.jsonl").write_text('{"prompt_length": 7, "response_length": 9}\n')
    seen = Plan.from_json(typed(capsys, *words, "--response-lengths", tmp_path / "seen.jsonl")[1]).workload
    assert seen["max_prompt_tokens"] == 7
    assert len({c.layout for c in Plan.from_json(typed(capsys, *words, "--gpus", 2)[1]).choices}) > 1


@pytest.mark.trl
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--gpu", "h200", "--grpo-config", "FILE:args"],
            "names no model; type one, a hub id or a folder, and",
        ),
        (["Qwen/Qwen3-8B", "--grpo-config", "FILE:args"], "gpu 'auto' "),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "FILE"], "allowed: FILE.py:ARGS or FILE.py:ARGS,DATASET"),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "no.py:args"], "no.py is no Python file"),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "FILE:arg"], "AttributeError: .*no attribute 'arg'; mend"),
        (
            ["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "FILE:args,dataset"],
            "tokenizer of 'Q.*: .*--prompt-lengths",
        ),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "lacks.py:args"], "No module named 'rewards'; type: pip "),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "FILE:dataset"], "names a Dataset; allowed: a GRPOConfig"),
        (["Qwen/Qwen3-8B", "--gpu", "h200", "--grpo-config", "a:b", "--verl-config", "c"], "allowed: one of them"),
        (["--verl-config", "sglang.yaml"], "rollout.name is sglang, .*; allowed: vllm, fp8plan"),
        (["--verl-config", "nameless.yaml"], "rollout.name is missing, .*; allowed: vllm, fp8plan"),
        (["--verl-config", "no.yaml"], "no.yaml is not verl's composed configuration: .*No such file.* --cfg job"),
        (["--verl-config", "part.yaml"], "part.yaml is not verl's composed configuration: Missing key .*; type: "),
        (["Qwen/Qwen3-8B"], "Missing option '--gpu'"),
    ],
)
def test_what_a_configuration_lacks_is_one_clear_error(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacks.py").write_text("import rewards\n")
    (tmp_path / "sglang.yaml").write_text(VERL_CONFIG.replace("name: vllm", "name: sglang"))
    (tmp_path / "nameless.yaml").write_text(VERL_CONFIG.replace("name: vllm", 'name: "???"'))
    (tmp_path / "part.yaml").write_text("data: {train_batch_size: 8}\n")
    code, out, error = typed(capsys, *(word.replace("FILE", str(grpo(tmp_path))) for word in words))
    assert (code, out) == (2, "")
    assert re.search(says, error.splitlines()[-1]), error


@pytest.mark.trl
def test_a_configuration_without_an_engine_and_a_misspelt_field_are_refused(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import planned

    with pytest.raises(ConfigError, match="use_vllm is False"):
        planned(GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), model="Qwen/Qwen3-8B", gpu="h200")
    with pytest.raises(ConfigError, match=r"planned takes no limit \(did you mean limits"):
        planned(GRPOConfig(str(tmp_path), **SETTINGS), model="Qwen/Qwen3-8B", gpu="h200", limit=1)


@pytest.mark.trl
def test_a_dry_run_prints_the_plan_and_ends_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer, planned
    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    monkeypatch.setattr(RolloutEngine, "from_plan", lambda *_, **__: pytest.fail("an engine starts"))
    args = GRPOConfig(str(tmp_path), **SETTINGS)
    with pytest.raises(SystemExit) as end:
        GRPOTrainer(model(), share_of_even, args, dataset(), plan="auto", dry_run=True)
    assert end.value.code == 0
    printed = capsys.readouterr().out
    planned(args, dataset(), model=model(), gpu="cpu", engine_version=VERSION)
    assert capsys.readouterr().out in printed
    assert printed.endswith("fp8plan: dry_run: no engine and no training was started\n")
    with pytest.raises(ConfigError, match="dry_run belong to a plan"):
        GRPOTrainer(model(), share_of_even, args, dataset(), dry_run=True)


def test_prompts_that_nobody_has_told_fit_the_engine() -> None:
    from fp8plan.integrations.request import Rollouts, words_of
    from fp8plan.model.plan.request import PlanRequest
    from fp8plan.model.workload import Workload

    def lengths(rollouts: Rollouts, **work: Any) -> Any:
        typed = {PlanRequest: {"model": "Qwen/Qwen3-8B", "gpu": "h200"}, Workload: work}
        return words_of(rollouts, typed)[Workload]

    assert lengths(Rollouts(16, 8, 100))["prompt_lengths"] == Fixed(1024)
    assert lengths(Rollouts(16, 8, 100, longest_prompt=64))["prompt_lengths"] == Fixed(64)
    assert lengths(Rollouts(16, 8, 100, limits={"max_model_len": 512}))["prompt_lengths"] == Fixed(412)
    assert lengths(Rollouts(16, 8, 100, whole_context=False))["prompt_lengths"] == Fixed(1024)
    told = Trace((3,), "prompts")
    assert lengths(Rollouts(16, 8, 100), prompt_lengths=told)["prompt_lengths"] == told
    few = lengths(Rollouts(4, 8, 100))
    assert (few["prompts"], few["samples_per_prompt"], few["response_lengths"]) == (1, 4, LogNormal(30.0, 0.9, 100))


# ------------------------------------------------------------------------------------------------ verl


BIG = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.n=8",
    "data.train_batch_size=32",
    "data.max_response_length=4096",
    f"+{OURS}.gpu=h200",
    f"+{OURS}.accept=high",
)


def started_with(told: Any) -> Plan:
    """The plan that verl's trainer makes."""
    from fp8plan.integrations.verl.settings import plan_of, settings_in

    return plan_of(told, settings_in(told))


@pytest.mark.verl
def test_a_machine_without_omegaconf_is_told_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fp8plan.integrations.verl.settings", raising=False)
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert "type: pip install omegaconf" in typed(capsys, "--verl-config", "run.yaml")[2]


@pytest.mark.verl
@pytest.mark.parametrize("told", [config(*BIG), small(f"+{OURS}.gpu=cpu")], ids=["H200s", "tiny"])
def test_a_plan_of_verls_configuration_is_the_one_that_its_trainer_makes(
    told: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from omegaconf import OmegaConf

    from fp8plan.integrations.verl import planned

    auto = started_with(told)
    assert planned(told, engine_version=VERSION) == auto
    table = capsys.readouterr().out
    for resolve in (False, True):  # as hydra leaves it, and with its interpolations resolved
        OmegaConf.save(told, tmp_path / "verl.yaml", resolve=resolve)
        words = ["--engine-version", VERSION, "--verl-config", tmp_path / "verl.yaml"]
        assert Plan.from_json(typed(capsys, *words, "--json")[1]) == auto
        assert typed(capsys, *words)[1].strip() == table.strip()


@pytest.mark.verl
def test_verls_own_rollouts_are_planned_and_typed_options_go_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from omegaconf import OmegaConf

    from fp8plan.integrations.verl import planned

    stock = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.quantization=fp8")
    told = composed([*stock, *BIG[:-1], f"+{OURS}.accept=low"])
    OmegaConf.save(told, tmp_path / "verl.yaml")
    words = ["--verl-config", tmp_path / "verl.yaml", "--json"]
    usual = Plan.from_json(typed(capsys, *words)[1])
    assert (usual.select().precision, usual.gpu, usual.limits.data_parallel_size) == ("bf16", "h200_sxm", 4)
    more = ["Qwen/Qwen3-4B", "--gpu", "h100", "--tensor-parallel-size", 4, "--accept", "moderate", "--prompts", 64]
    plan = Plan.from_json(typed(capsys, *more, *words)[1])
    assert (plan.model, plan.gpu, plan.limits.data_parallel_size) == ("Qwen/Qwen3-4B", "h100_sxm", 2)
    assert (plan.workload["prompts"], plan.workload["samples"]) == (64, 8)
    assert plan.select().precision != "bf16"
    planned(told)
    assert told.actor_rollout_ref.rollout.quantization == "fp8", "the configuration stays as it is"
    told.actor_rollout_ref.rollout.pipeline_model_parallel_size = 2
    OmegaConf.save(told, tmp_path / "verl.yaml")
    assert "pipeline_model_parallel_size is 2; allowed: 1" in typed(capsys, *words)[2]


@pytest.mark.verl
@pytest.mark.transfer_queue
def test_a_dry_run_in_verl_prints_the_plan_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own runner, without its Ray actor and its queue."""
    import transfer_queue
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import trainer_base

    from fp8plan.integrations.verl import plugin

    monkeypatch.setattr(transfer_queue, "init", lambda _: None)
    monkeypatch.setattr(transfer_queue, "close", lambda: None)
    registry = dict(trainer_base.TRAINER_REGISTRY)
    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", registry)
    if not any(hasattr(made, "func") for made in registry.values()):  # where no entry point was loaded
        plugin._trainers(SimpleNamespace(trainer_base=trainer_base))
    told = small(f"+{OURS}.gpu=cpu", f"+{OURS}.dry_run=True")
    TaskRunnerV1.__ray_metadata__.modified_class().run(told)
    printed = capsys.readouterr().out
    assert "rollout s" in printed
    assert "fp8plan: dry_run: no engine and no training was started\n" in printed
