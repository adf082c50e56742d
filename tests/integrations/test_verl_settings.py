"""The meaning of verl's configuration to fp8plan, what is refused, and how verl finds the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import plans
import pytest
from trl_runs import model
from verl_config import composed
from verl_parts import NAMED, config, planned, small
from vllm_server import ROOT, entry_points

import fp8plan
from fp8plan.errors import ConfigError
from fp8plan.integrations.request import MEAN_SHARE, SIGMA, words_of
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.emit.trainers import VERL
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.risk.remedies import TRAINER_PRECISIONS, Remedies
from fp8plan.model.workload import Workload
from fp8plan.runtime.apply.vllm_versions import check_vllm_version
from fp8plan.runtime.this_host import said
from fp8plan.runtime.watch.mismatch.sampling import Sampling

pytestmark = pytest.mark.verl

OURS = "actor_rollout_ref.rollout.custom.fp8plan"


# ------------------------------------------------------------------------------------------------ the plugin


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process in which verl finds the entry points of pyproject.toml."""
    paths = [str(entry_points(folder)), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Code in a fresh process."""
    env = environment(folder) | env
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_the_entry_point_is_the_plugin() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    assert list(points) == ["fp8plan"]
    loaded = EntryPoint("fp8plan", points["fp8plan"], "verl.plugins").load()
    assert loaded.NAME == "fp8plan"


@pytest.mark.slow
def test_import_verl_registers_the_rollout_and_imports_nothing_more(tmp_path: Path) -> None:
    done = run(
        "import sys, verl\n"
        "assert 'verl.workers.rollout.base' not in sys.modules, 'verl is as light as before'\n"
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as client\n"
        "assert client['fp8plan', 'async'] == client['vllm', 'async']\n"
        "assert 'vllm' not in sys.modules\n"
        "from fp8plan.integrations.verl import plugin\n"
        "from verl.utils.config import validate_config\n"
        "assert validate_config.func is plugin.validated\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


ANOTHER_VERSION = """
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_rollout_replica_class("fp8plan").__name__)
from fp8plan.integrations.verl import settings
settings.version = lambda package: "0.10.0"
get_rollout_replica_class("fp8plan")(0, None, None)
"""


@pytest.mark.vllm
def test_another_version_of_verl_is_an_error_at_the_rollouts_first_use(tmp_path: Path) -> None:
    import warm_processes

    code, printed, errors = tmp_path / "code.py", tmp_path / "printed", tmp_path / "errors"
    code.write_text(ANOTHER_VERSION)
    env = environment(tmp_path)
    warm_processes.program(warm_processes.script, str(code), log=printed, errors=errors, env=env).join(120)
    assert printed.read_text().splitlines()[-1:] == ["PlannedReplica"], errors.read_text()
    assert (
        errors.read_text()
        .rstrip()
        .endswith(
            "ConfigError: verl 0.10.0 with rollout.name=fp8plan is not supported; allowed: 0.9.1; type: pip install "
            "'verl[verl-core]==0.9.1', or actor_rollout_ref.rollout.name=vllm"
        )
    )


@pytest.mark.parametrize("named", ["vllm", "fp8plan"])
def test_the_trainer_is_planned_where_the_rollout_is(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.integrations.verl import plugin

    made: list[Any] = []
    trainer = SimpleNamespace(planned_class=lambda stock: lambda config: made.append((stock, config)))
    monkeypatch.setitem(sys.modules, "fp8plan.integrations.verl.trainer", trainer)
    told = config(f"actor_rollout_ref.rollout.name={named}")
    stock = SimpleNamespace
    registry: dict[str, Any] = {"sync": stock}
    plugin._trainers(SimpleNamespace(trainer_base=SimpleNamespace(TRAINER_REGISTRY=registry)))
    found = registry["sync"](config=told)
    assert made == ([] if named == "vllm" else [(stock, told)])
    assert named == "fp8plan" or found.config is told


@pytest.mark.parametrize("named", ["vllm", "fp8plan"])
def test_verls_legacy_trainer_is_refused_where_verl_checks_its_configuration(named: str) -> None:
    """verl's main does that before it starts Ray."""
    from verl.utils import config as of_verl

    from fp8plan.integrations.verl import plugin

    seen: list[Any] = []
    module = SimpleNamespace(validate_config=lambda config, **roles: seen.append((config, roles)))
    plugin.REGISTRIES[of_verl.__name__](module)
    roles = {"use_reference_policy": False, "use_critic": False}
    current, legacy = (config(f"actor_rollout_ref.rollout.name={named}", f"trainer.use_v1={x}") for x in (True, False))
    module.validate_config(config=current, **roles)
    assert seen == [(current, roles)]
    if named == "vllm":
        module.validate_config(config=legacy, **roles)
        assert seen[1:] == [(legacy, roles)]
        return
    with pytest.raises(
        ConfigError, match=r"rollout\.name=fp8plan with trainer\.use_v1=False, .*type trainer\.use_v1=True"
    ):
        module.validate_config(config=legacy, **roles)


def test_a_verl_without_its_registries_is_heard_and_goes_on(
    warnings_of: Callable[[ModuleType], list[str]],
) -> None:
    from fp8plan.integrations.verl import plugin

    said = warnings_of(plugin)
    plugin._registered(plugin._client, SimpleNamespace(__name__="verl.workers.rollout.base"))  # type: ignore[arg-type]
    (text,) = said
    assert "fp8plan does not know this verl (verl.workers.rollout.base: " in text
    assert "type: pip install 'fp8plan[verl]'" in text


def test_a_server_that_no_trainer_of_ours_has_told_a_plan_says_so() -> None:
    from fp8plan.integrations.verl.settings import handed_on

    with pytest.raises(ConfigError, match=r"rollout\.name=fp8plan has no plan: .*trainer\.use_v1=True"):
        handed_on({"other": 1})


# ------------------------------------------------------------------------------------------------ the settings


def settings(*overrides: str) -> Any:
    from fp8plan.integrations.verl.settings import settings_in

    return settings_in(config(*overrides))


def test_hydra_composes_the_settings() -> None:
    overrides = (f"+{OURS}.plan=plan.json", f"+{OURS}.choice=fp8_kv", f"+{OURS}.limit_kl=0.1")
    assert config(*overrides) == composed([NAMED, *overrides])
    found = settings(*overrides)
    assert (found.plan, found.choice, found.limit_kl, found.accept) == ("plan.json", "fp8_kv", 0.1, None)
    assert settings().plan is None


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ([f"+{OURS}.plam=a"], rf"{OURS} takes no plam \(did you mean plan\?\); allowed: plan, thresholds, target_kl"),
        ([f"+{OURS}.target_kll=1"], rf"{OURS} takes no target_kll \(did you mean target_kl\?\)"),
        (
            [f"+{OURS}=moderate"],
            rf"{OURS} is 'moderate'; allowed: an object with named keys, such as \+{OURS}\.accept=moderate",
        ),
        ([f"+{OURS}.accept=all"], "accept"),
        ([f"+{OURS}.accept=low", f"+{OURS}.plan=a"], "has plan and accept; allowed: one of them"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        settings(*overrides)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("actor_rollout_ref.rollout.quantization=fp8", "quantization is fp8; allowed: null, as the precision"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", "data_parallel_size is 2; allowed: 1"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "pipeline_model_parallel_size is 2; allowed: 1"),
        ("actor_rollout_ref.rollout.dtype=float16", "dtype is float16; allowed: bfloat16"),
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "allowed: processed_logprobs"),
        ("++actor_rollout_ref.rollout.qat.enable=True", "qat is on"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded", "delta_sharded; allowed: one that"),
        ("actor_rollout_ref.model.lora_rank=8", "LoRA adapter; allowed: one that is merged"),
        (
            "algorithm.rollout_correction.bypass_mode=True",
            r"computes no log-probs of the trainer .* type algorithm\.rollout_correction\.bypass_mode=False; or type",
        ),
        ("algorithm.rollout_correction=null", "rollout_correction is null"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=16", "is 16; allowed: 8, a node's"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seq=8",
            r"rollout\.engine_kwargs\.vllm takes no max_num_seq \(did you mean max_num_seqs\?\)",
        ),
        ("distillation.enabled=True", "teacher_model.inference.name is fp8plan; allowed: vllm"),
        (
            "reward.reward_model.enable=True",
            r"reward_model\.rollout\.name is missing, .* type reward\.reward_model\.rollout\.name=vllm$",
        ),
        (
            "actor_rollout_ref.rollout.top_p=0.8",
            rf"rollout: top_p 0.8: .*\(0.8 to 1\).*; set top_p=1.0; .* type \+{OURS}\.allow_biased_sampling=True",
        ),
        ("actor_rollout_ref.rollout.top_k=50", "rollout: top_k 50: .* set top_k=0; to train on it all the same"),
    ],
)
def test_what_fp8plans_rollouts_do_not_go_with_is_refused(override: str, match: str) -> None:
    from fp8plan.integrations.verl.settings import refuse

    with pytest.raises(ConfigError, match=match):
        refuse(config(override))
    refuse(config())


def test_a_biased_sampling_goes_on_where_it_is_allowed_or_nothing_is_weighted() -> None:
    from fp8plan.integrations.verl.settings import refuse, sampling_in

    biased = "actor_rollout_ref.rollout.top_p=0.8"
    for more in ("allow_biased_sampling=True", "correct=False"):
        refuse(config(biased, f"+{OURS}.{more}"))
    found = config(biased, "actor_rollout_ref.rollout.temperature=0.6")
    assert sampling_in(found.actor_rollout_ref.rollout) == Sampling(top_p=0.8, temperature=0.6, trainer_temperature=0.6)


def test_another_rollout_backend_is_verls_own() -> None:
    from verl.workers.rollout.base import get_rollout_class

    with pytest.raises(AssertionError, match="Rollout fp8plan-sglang with mode async not found"):
        get_rollout_class("fp8plan-sglang")


# ------------------------------------------------------------------------------------------------ the plan


def plan_of(told: Any) -> Plan:
    from fp8plan.integrations.verl.settings import plan_of, settings_in

    return plan_of(told, settings_in(told))


@pytest.mark.parametrize("loop_s", [None, 5e-4])
def test_a_plan_made_from_verls_configuration_equals_one_made_by_hand(
    monkeypatch: pytest.MonkeyPatch, loop_s: float | None
) -> None:
    """loop_s: of the trainer's host, if that has the GPU"""
    monkeypatch.setattr("fp8plan.integrations.request.host_loop_s", lambda: loop_s)
    monkeypatch.setattr("fp8plan.model.hardware._product_of_this_machine", lambda: "NVIDIA H200")
    found = plan_of(
        config(
            "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
            "actor_rollout_ref.rollout.max_num_seqs=256",
            "actor_rollout_ref.rollout.n=8",
            "data.train_batch_size=32",
            "data.max_prompt_length=512",
            "data.max_response_length=4096",
            "trainer.n_gpus_per_node=8",
            f"+{OURS}.gpu=h200",
            f"+{OURS}.accept=high",
        )
    )
    limits = EngineLimits(
        gpu_memory_utilization=0.6,
        max_model_len=40960,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        tensor_parallel_size=2,
        data_parallel_size=4,
    )
    by_hand = fp8plan.plan(
        "Qwen/Qwen3-8B",
        "h200",
        Workload(32, 8, Fixed(512), LogNormal(MEAN_SHARE * 4096, SIGMA, 4096)),
        limits=limits,
        target="verl",
        budget=RiskBudget(accept="high"),
        engine_version=check_vllm_version().partition("+")[0],
        host_loop_s=loop_s,
    )
    note = () if loop_s is None else (said(loop_s),)
    assert found == replace(by_hand, warnings=(*by_hand.warnings, *note))


def limits_of(told: Any, gpu: str) -> EngineLimits:
    """The limits of a plan for verl's configuration."""
    from fp8plan.integrations.verl.settings import rollouts_of, settings_in

    words = words_of(rollouts_of(told, settings_in(told)), {PlanRequest: {"gpu": gpu}})
    return PlanRequest.of(words, workload=Workload(**words[Workload])).engine


def test_a_limit_that_verl_leaves_to_vllm_is_derived() -> None:
    rollout = "actor_rollout_ref.rollout"
    told = config(
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        f"{rollout}.max_num_seqs=null",
        f"{rollout}.max_num_batched_tokens=512",
        "trainer.n_gpus_per_node=2",
    )
    assert (limits_of(told, "h200").max_num_seqs, limits_of(told, "l40s").max_num_seqs) == (512, 256)


def test_engines_on_their_own_gpus_are_counted_there() -> None:
    told = config(
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=101",
    )
    limits = limits_of(told, "h200")
    assert (limits.data_parallel_size, limits.tensor_parallel_size, limits.num_gpu_blocks) == (6, 4, 100)


def of_file(folder: Path, plan: Plan, *overrides: str) -> Any:
    (folder / "plan.json").write_text(plan.to_json())
    return small(f"+{OURS}.plan={folder}/plan.json", *overrides)


def test_the_plan_of_a_file_is_taken_with_its_choice(tmp_path: Path) -> None:
    given = planned("fp8_kv")
    assert plan_of(of_file(tmp_path, given)) == given
    other = plan_of(of_file(tmp_path, given, f"+{OURS}.choice=bf16"))
    assert other.choices[other.chosen].precision == "bf16"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["actor_rollout_ref.rollout.max_num_seqs=16"], r"is 16, and the plan has 8; type: .*max_num_seqs=8"),
        (["actor_rollout_ref.rollout.max_model_len=512"], "max_model_len is 512, and the plan has 256"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size is 2"),
        (["data.max_response_length=512"], r"are 576 tokens together, and the plan's longest request has 256"),
    ],
)  # fmt: skip
def test_a_plan_of_another_engine_is_refused(tmp_path: Path, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=f"{match}.*or plan again: fp8plan plan MODEL"):
        plan_of(of_file(tmp_path, planned("fp8_kv"), *overrides))


REPLAY = (
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
)


def test_a_plan_with_router_replay_wants_verls() -> None:
    """verl's FSDP engine has no router replay, whatever the rollout returns."""
    from fp8plan.integrations.verl.settings import _plan_faults, remedies_in

    megatron = composed(["model_engine=megatron", NAMED, *REPLAY])
    assert remedies_in(megatron).router_replay
    for words in (["model_engine=megatron", NAMED, REPLAY[0]], ["model_engine=megatron", NAMED, REPLAY[1]]):
        assert not remedies_in(composed(words)).router_replay
    fsdp = small(REPLAY[0])
    assert not remedies_in(fsdp).router_replay
    plan = planned("bf16")
    replaying = replace(plan, remedies=replace(plan.remedies, router_replay=True))
    assert list(_plan_faults(plan, fsdp)) == []
    (fault,) = _plan_faults(replaying, fsdp)
    assert all(word in fault for word in ("model_engine=megatron", *REPLAY))
    assert not [fault for fault in _plan_faults(replaying, megatron) if "replay" in fault]


def test_a_plan_made_for_a_verl_that_replays_counts_on_it() -> None:
    words = ["model_engine=megatron", NAMED, *REPLAY, f"+{OURS}.gpu=h200", f"+{OURS}.accept=high"]
    words += ["actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B", "trainer.n_gpus_per_node=2", "data.train_batch_size=8"]
    words += ["data.max_response_length=512", "data.max_prompt_length=128"]
    assert plan_of(composed(words)).remedies.router_replay
    assert not plan_of(composed([word for word in words if "router_replay" not in word])).remedies.router_replay


def test_sizes_that_are_no_whole_blocks_are_refused_in_fp8(tmp_path: Path) -> None:
    ragged = replace(planned("fp8_block"), model=model("ragged"))
    with pytest.raises(ConfigError, match=r"with FP8 weights verl takes multiples of 128"):
        plan_of(of_file(tmp_path, ragged))
    path = f"actor_rollout_ref.model.path={model('ragged')}"
    assert plan_of(of_file(tmp_path, ragged, path, f"+{OURS}.choice=fp8_kv"))


@pytest.mark.parametrize("precision", TRAINER_PRECISIONS)
def test_remedies_that_a_plan_writes_are_read(precision: str) -> None:
    from fp8plan.integrations.verl.settings import _plan_faults, remedies_in

    made = plans.plan(model="Qwen/Qwen3-30B-A3B", remedies=Remedies(True, precision))
    told = composed(made.verl_overrides())
    assert remedies_in(told) == made.remedies
    assert not [fault for fault in _plan_faults(made, told) if "router replay" in fault or "trains in" in fault]
    without = composed(replace(made, remedies=Remedies(True)).verl_overrides())
    faults = [fault for fault in _plan_faults(made, without) if "trains in" in fault]
    assert len(faults) == (precision != "bf16")
    for fault in faults:
        words = " ".join(VERL.words(Remedies(trainer_precision=precision)))
        assert (
            f"trains in bf16, and the plan expects {precision}; type: model_engine=megatron {words}, or plan" in fault
        )


def test_an_fp8_trainer_needs_a_plan_that_knows_it() -> None:
    from fp8plan.integrations.verl.settings import _plan_faults, remedies_in

    made = plans.plan()
    trained = composed(replace(made, remedies=Remedies(trainer_precision="fp8_tensor")).verl_overrides())
    (fault,) = [fault for fault in _plan_faults(made, trained) if "trains in" in fault]
    todo = "leave override_transformer_config.fp8 out, or plan with --trainer-precision fp8_tensor"
    assert f"type: {todo}" in fault
    trained.actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe = "mxfp8"
    with pytest.raises(ConfigError, match="fp8_recipe is 'mxfp8'; allowed: blockwise"):
        remedies_in(trained)


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(planned("fp8_kv"), model="Qwen/Qwen3-8B")
    with pytest.raises(
        ConfigError, match=r"is for Qwen/Qwen3-8B, and the model is .*; plan again: fp8plan plan .* cpu"
    ):
        plan_of(of_file(tmp_path, other))
    unread = "actor_rollout_ref.model.path=hdfs://models/mine"  # by the trainer alone
    assert plan_of(of_file(tmp_path, other, unread))


def test_what_is_handed_on_reaches_a_server_as_verl_makes_its_configuration() -> None:
    from verl.utils.config import omega_conf_to_dataclass

    from fp8plan.integrations.verl.settings import hand_on, handed_on

    told, plan = small("+actor_rollout_ref.rollout.custom.mine=1"), planned("fp8_kv")
    hand_on(told, plan.to_json(), 256)
    rollout = omega_conf_to_dataclass(told.actor_rollout_ref.rollout)
    assert Plan.from_json(handed_on(rollout.custom)) == plan
    assert (rollout.custom["mine"], rollout.calculate_log_probs, rollout.max_model_len) == (1, True, 256)
