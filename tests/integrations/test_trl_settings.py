"""The meaning of TRL's settings together with a plan, and what is refused before an engine starts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import TRL_LIMITS, plan
from tiny_models import cpu_plan
from trl_runs import SETTINGS, model, share_of_even, trainer_of

from fp8plan import schemas
from fp8plan.errors import ConfigError
from fp8plan.integrations.common import announce, check_model
from fp8plan.model.distributions import Trace
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.apply.engine.options import options_of, remarks
from fp8plan.runtime.this_host import said
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Thresholds
from fp8plan.runtime.watch.mismatch.sampling import Sampling

pytestmark = pytest.mark.trl

# ------------------------------------------------------------------------------------------------ refused


def refused(match: str, tmp_path: Path, **settings: Any) -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match=match):
        trainer_of(GRPOTrainer, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"plan": "fast"}, r"plan is 'fast', and there is no such file; allowed: \"auto\", a Plan, the path"),
        ({"plan": 3}, r"plan is 3; allowed: \"auto\""),
        ({"plan": "auto", "use_vllm": False}, r"use_vllm is False; type: GRPOConfig\(use_vllm=True"),
        ({"plan": "auto", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size is 2; allowed: 1"),
        ({"plan": "auto", "use_liger_kernel": True}, "no plan has run; type: use_liger_kernel=False, or plan=None"),
        ({"choice": "fp8_kv"}, "plan is None; type: plan='auto'"),
        (
            {"plan": "auto", "top_p": 0.9},
            r"sampling: top_p 0.9: .* \(0.9 to 1\) times .*; set top_p=1.0; .* GRPOTrainer\(.*allow_biased_sampling=T",
        ),
        (
            {"plan": "auto", "top_k": 20, "min_p": 0.1},
            "top_k 20 and min_p 0.1: .*; set top_k=0 and min_p=0.0; to train",
        ),
        ({"plan": "auto", "repetition_penalty": 1.1}, "repetition_penalty 1.1: .* unknown factor; set repetition_pen"),
        ({"plan": "auto", "generation_kwargs": {"logit_bias": {3: 1.0}}}, "a logit_bias: .*; set no logit_bias"),
        ({"plan": "auto", "generation_kwargs": {"temperature": 0.5}}, "divides its logits by 1, .*divide them by 0.5"),
        ({"plan": "auto", "vllm_structured_outputs_regex": "[0-9]+"}, "constraints on tokens: vLLM renormalises"),
    ],
)
def test_what_a_plan_does_not_go_with_is_refused_at_once(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    refused(match, tmp_path, policy="/nowhere", **settings)


@pytest.mark.parametrize(
    "more",
    [
        {"top_p": 0.9, "allow_biased_sampling": True},
        {"top_p": 0.9, "vllm_importance_sampling_correction": False},
        {"temperature": 0.7, "generation_kwargs": {"stop": ["\n"], "seed": 3}},
    ],
)
def test_a_biased_sampling_goes_on_where_it_is_allowed_or_nothing_is_weighted(
    more: dict[str, Any], tmp_path: Path
) -> None:
    refused("plan is 'fast'", tmp_path, policy="/nowhere", plan="fast", **more)  # which is looked at after the sampling


def test_the_sampling_is_that_of_the_config_at_the_temperature_that_trl_scores_at(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from fp8plan.integrations.trl.settings import sampling_in

    args = GRPOConfig(str(tmp_path), temperature=0.7, top_p=0.9, generation_kwargs={"top_p": 0.8, "n": 2}, bf16=False)
    assert sampling_in(args) == Sampling(temperature=0.7, top_p=0.8, trainer_temperature=0.7)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("plam", "plan"), ("chioce", "choice"), ("sink", "sinks"), ("train_datset", "train_dataset")],
)
def test_a_misspelt_argument_is_answered_by_the_one_that_was_meant(misspelt: str, meant: str) -> None:
    from fp8plan.integrations.trl import GRPOTrainer

    with pytest.raises(ConfigError, match=rf"GRPOTrainer takes no {misspelt} \(did you mean {meant}\?\); allowed: "):
        GRPOTrainer("/nowhere", share_of_even, **{misspelt: "auto"})


def test_what_a_plan_chose_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    made = replace(KV, reasons=("Choose fp8_kv: it is faster.", "More."))
    announce(made, made, None)
    announce(made, "/a/plan.json", "bf16")
    assert capsys.readouterr().out.splitlines() == [
        f"fp8plan: plan=a Plan: fp8_kv for {KV.model} on cpu",
        "fp8plan: Choose fp8_kv: it is faster.",
        f"fp8plan: plan=/a/plan.json, choice='bf16': bf16 for {KV.model} on cpu",
        "fp8plan: without choice: Choose fp8_kv: it is faster.",
    ]


def test_a_host_that_was_timed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    made = replace(KV, reasons=("Choose fp8_kv.",), warnings=("CPUs differ", said(4.15e-4, "by the server")))
    announce(made, made, None)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "fp8plan: host loop measured by the server: 415 µs, kept for a day; `fp8plan doctor --host` measures it anew"
    ]


@pytest.mark.parametrize(("answer", "loop_s"), [({"host_loop_s": 4e-4}, 4e-4), ({}, None)])
def test_a_server_tells_its_host(answer: dict[str, float], loop_s: float | None) -> None:
    """Servers of earlier versions tell none."""
    from fp8plan.integrations.trl.client import Served
    from fp8plan.integrations.trl.mixin import loop_of

    assert loop_of(Served("", {}, {"facts": answer})) == loop_s
    assert loop_of(Served("", {}, None)) is None


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_times_the_host_for_all(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    from fp8plan.integrations.trl import mixin

    def sent(values: list[float | None]) -> None:
        assert values == [3e-4 if first else None]
        values[0] = 3e-4

    monkeypatch.setattr(mixin, "host_loop_s", lambda: 3e-4)
    monkeypatch.setattr(mixin, "broadcast_object_list", sent)
    process = SimpleNamespace(accelerator=SimpleNamespace(is_main_process=first))
    assert mixin.Planned._host_loop_s(process) == 3e-4


def test_a_servers_options_are_read_from_its_configuration() -> None:
    """As vLLM writes it: `GET /server_info?config_format=json`."""
    plain: dict[str, Any] = {
        "speculative_config": None,
        "lora_config": None,
        "model_config": {"logits_processors": None, "hf_overrides": {}, "model_impl": "auto"},
        "parallel_config": {"pipeline_parallel_size": 1, "enable_dbo": False, "nnodes": 1},
        "scheduler_config": {"policy": "fcfs", "long_prefill_token_threshold": 0, "enable_chunked_prefill": True},
    }
    assert remarks(options_of(plain)) == remarks(options_of({})) == ()
    for change, says in (
        ({"speculative_config": {"method": "ngram"}}, "speculative_config=.*the guard is off"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"scheduler_config": {"policy": "priority"}}, "scheduling_policy='priority'"),
        ({"model_config": {"logits_processors": ["a:B"]}}, "logits_processors"),
    ):
        (said,) = remarks(options_of(plain | change))
        assert re.search(says, said)
    assert len(remarks(options_of(plain | {"lora_config": {"max_loras": 1}}))) == 2


def limits_checked(longest: int, **trainer: Any) -> None:
    """Check a server's longest request for a trainer with prompts of at most 8 tokens, and completions of 16."""
    from fp8plan.integrations.trl.mixin import Planned

    lengths = {"prompt_lengths": Trace((5, 8), "prompts of the dataset")}
    process: Any = SimpleNamespace(_prompt_lengths=lambda: lengths, **trainer)
    generation: Any = SimpleNamespace(max_completion_length=16)
    Planned._check_limits(process, generation, EngineLimits(max_model_len=longest))


@pytest.mark.parametrize("more", [{"tools": [print]}, {"tools": [], "environment_factories": {"a": print}}])
def test_a_server_that_is_too_short_for_turns_of_tools_is_refused(more: dict[str, Any]) -> None:
    """TRL asks for a whole completion in each turn, and the server answers 400."""
    limits_checked(40, **more)
    with pytest.raises(ConfigError, match="max_model_len is 39, and turns of tools need 40: a prompt of 8 and twice"):
        limits_checked(39, **more)


@pytest.mark.parametrize("more", [{}, {"tools": None}, {"tools": [], "environment_factories": None}])
def test_without_tools_a_server_may_be_shorter(more: dict[str, Any]) -> None:
    limits_checked(24, **more)


@pytest.mark.parametrize("seen", ["_is_vlm", "is_vision_model"])
def test_a_policy_that_takes_images_is_refused(seen: str) -> None:
    from fp8plan.integrations.trl.mixin import Planned

    process: Any = SimpleNamespace(**{seen: True})
    with pytest.raises(ConfigError, match=r"takes images, .*; type: processing_class=AutoTokenizer\.from_pretrained"):
        Planned._generation(process, mode="colocate")


KV = cpu_plan("fp8_kv")


@pytest.mark.parametrize(
    ("given", "settings", "match"),
    [
        (plan(limits=TRL_LIMITS), {}, "the plan is for h200_sxm, and this trainer's engine runs on the CPU"),
        (
            KV,
            {"vllm_max_model_length": 64},
            r"length is 64, and the plan has 256; type: vllm_max_model_length=256, or plan again",
        ),
        (
            KV,
            {},
            "the plan is for Qwen/Qwen3-8B, and the model is .*36 layers of width 4096, and 3 layers of width 256",
        ),
        (KV, {"max_completion_length": 256}, "max_completion_length is 256, and the plan's longest request has 256"),
        (replace(KV, choices=tuple(replace(c, tensor_parallel=2) for c in KV.choices)), {}, "has 2 GPUs; allowed: 1"),
    ],
)
def test_a_plan_of_another_engine_is_refused(given: Plan, settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    refused(match, tmp_path, plan=given, **settings)


@pytest.mark.vllm
def test_a_model_that_cannot_be_planned_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=1024, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(model()).save_pretrained(tmp_path / "opt")
    refused("model_type 'opt' is not modelled", tmp_path, plan="auto", policy=str(tmp_path / "opt"))


def test_another_trl_is_refused_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.integrations.trl import settings as internals

    monkeypatch.setattr(internals, "version", lambda package: "1.17.0")
    refused(r"TRL 1\.17\.0 with a plan is not supported; allowed: 1\.16; type: pip install 'trl==1\.16\.\*'", tmp_path,
            plan="auto", policy="/nowhere")  # fmt: skip


def test_importing_fp8plan_does_not_import_trl() -> None:
    code = "import sys, fp8plan, fp8plan.integrations; fp8plan.plan; fp8plan.Monitor; print('trl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    "lacks",
    [
        "import sys; sys.modules['trl'] = None",
        "import sys; sys.modules['trl.generation.vllm_client'] = None",
        "import trl.generation.vllm_client as client; del client.VLLMClient",
    ],
)
def test_a_missing_or_unknown_trl_is_one_clear_error(lacks: str) -> None:
    code = f"{lacks}\nfrom fp8plan.integrations.trl import GRPOTrainer"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "ConfigError: TRL is not installed, or is one that fp8plan does not know (" in said
    assert said.rstrip().endswith("; type: pip install 'fp8plan[trl]'")


@pytest.mark.parametrize("package", ["requests", "vllm"])
def test_without_vllm_there_is_a_table_and_one_clear_error(package: str) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from fp8plan.integrations.trl import planned\nfrom fp8plan.integrations.trl import GRPOTrainer"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "ConfigError: GRPOTrainer needs vLLM, which is not installed (" in said
    assert said.rstrip().endswith("call fp8plan.integrations.trl.planned")


# ------------------------------------------------------------------------------------------------ the correction


def args(**changed: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(use_cpu=True, bf16=False, **{f"vllm_importance_sampling_{k}": v for k, v in changed.items()})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, CorrectionSettings()),  # TRL's defaults: the plan's
        ({"mode": "token_truncate", "clip_max": 4.0}, CorrectionSettings(thresholds=Thresholds(4.0))),
        ({"mode": "sequence_truncate"}, CorrectionSettings("sequence", thresholds=Thresholds(3.0))),
        (
            {"mode": "token_mask", "clip_min": 0.5, "clip_max": 4.0},
            CorrectionSettings("token", "icepop", Thresholds(None, (0.5, 4.0))),
        ),
        ({"mode": "sequence_mask", "clip_max": 3.0}, CorrectionSettings()),  # as the defaults
        (
            {"mode": "sequence_mask", "clip_min": 0.0},
            CorrectionSettings("sequence", "icepop", Thresholds(None, (sys.float_info.min, 3.0))),
        ),
        (
            {"mode": "sequence_mask", "clip_min": 0.25},
            CorrectionSettings("sequence", "icepop", Thresholds(None, (0.25, 3.0))),
        ),
        ({"correction": False}, CorrectionSettings(level=None, thresholds=Thresholds(None))),
    ],
)
def test_trls_settings_decide_the_correction_where_the_user_changed_them(
    changed: dict[str, Any], expected: CorrectionSettings
) -> None:
    from fp8plan.integrations.trl import trainer as correction

    told = args(**changed)
    assert correction.correction_of(told) == expected


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"mode": "token_truncate", "clip_min": 0.5}, "clip_min 0.5 and clip_max 3.0; allowed with a plan"),
        ({"mode": "token_truncate", "clip_min": 0.5, "clip_max": None}, "clip_max None; allowed with a plan"),
    ],
)
def test_a_truncation_from_below_is_refused(changed: dict[str, Any], match: str) -> None:
    from fp8plan.integrations.trl import trainer as correction

    with pytest.raises(ConfigError, match=match):
        correction.correction_of(args(**changed))


def test_trls_own_ratio_and_the_monitors_are_one_where_the_thresholds_are() -> None:
    """TRL's own formulas, in each of its modes, give the same for these log-probs."""
    from fp8plan.integrations.trl import trainer as correction
    from fp8plan.runtime.watch.controller.fit import constant
    from fp8plan.runtime.watch.monitor.monitor import Monitor

    chance = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 20, generator=chance)
    train = rollout + 0.4 * torch.randn(6, 20, generator=chance)
    mask = torch.arange(20) < torch.tensor([20, 3, 7, 20, 1, 12])[:, None]
    token = torch.exp((train - rollout) * mask)
    sequence = torch.exp(((train - rollout) * mask).sum(-1, keepdim=True)).expand_as(token)
    expected = {
        "token_truncate": token.clamp(max=1.2),
        "sequence_truncate": sequence.clamp(max=1.2),
        "token_mask": token * ((token >= 0.8) & (token <= 1.2)),
        "sequence_mask": sequence * ((sequence >= 0.8) & (sequence <= 1.2)),
    }
    for mode, wanted in expected.items():
        told = args(mode=mode, clip_max=1.2, clip_min=0.8 if mode.endswith("mask") else None)
        settings = correction.correction_of(told)
        monitor = Monitor(settings, constant(settings, None))
        ratio = correction.ratio_of(monitor.step(train, rollout, mask), mask)
        assert torch.allclose(ratio, torch.where(mask, wanted, 1.0), rtol=1e-5), mode
    measured = Monitor(correction.correction_of(args(correction=False))).step(train, rollout, mask)
    assert torch.equal(correction.ratio_of(measured, mask), torch.ones(6, 20))
    assert measured.mismatch.k3 > 0.01
    assert measured.metrics[schemas.TIS] is None  # nothing is cut


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_trls_losses_get_from_a_plans_ratio_what_trls_own_gives(mode: str) -> None:
    """VESPO sums the ratio's logarithm over all positions, also over padding and the output of tools."""
    import trl

    from fp8plan.integrations.trl import trainer as correction
    from fp8plan.runtime.watch.controller.fit import constant
    from fp8plan.runtime.watch.monitor.monitor import Monitor

    chance = torch.Generator().manual_seed(1)
    rollout = -1 - torch.rand(6, 20, generator=chance)
    completion = (torch.arange(20) < torch.tensor([20, 3, 7, 20, 1, 0])[:, None]).long()
    tool = torch.ones(6, 20).long()
    tool[0, 5:9] = 0
    mask = completion * tool
    noise = 0.03 * torch.randn(6, 20, generator=chance)
    train = torch.where(mask.bool(), rollout + noise, -3.0)  # a model scores padding, too
    own = torch.exp((train - rollout) * mask)
    own = own.clamp(max=3.0) if mode == "token_truncate" else own.masked_fill((own < 0.2) | (own > 3.0), 0.0)
    told = args(mode=mode, clip_max=3.0, clip_min=None if mode == "token_truncate" else 0.2)
    settings = correction.correction_of(told)
    monitor = Monitor(settings, constant(settings, None))
    ratio = correction.ratio_of(monitor.step(train, rollout, mask), mask)
    assert torch.allclose(ratio, own, rtol=1e-5)  # everywhere, so that no loss can tell them apart
    phi = [
        trl.GRPOTrainer.get_gamma_weights(
            torch.tensor([1.0, -1, 1, -1, 1, -1])[:, None], torch.zeros(6, 20), mask, each
        )
        for each in (own, ratio)
    ]
    assert torch.allclose(*phi, rtol=1e-4)
    assert (phi[0] > 0.5).all()


def test_the_prompts_of_a_chat_are_as_long_as_trl_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from fp8plan.integrations.trl import GRPOTrainer
    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    class Started(Exception):
        pass

    made: list[Plan] = []

    def engine(plan: Plan, path: str, **settings: Any) -> None:
        made.append(plan)
        raise Started

    monkeypatch.setattr(RolloutEngine, "from_plan", engine)
    tokenizer = AutoTokenizer.from_pretrained(model())
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    talk = [[{"role": "user", "content": " ".join(["w5"] * length)}] for length in (3, 4, 5, 6)]
    settings = GRPOConfig(output_dir=str(tmp_path), **SETTINGS)
    with pytest.raises(Started):
        GRPOTrainer(
            model(),
            share_of_even,
            settings,
            Dataset.from_dict({"prompt": talk}),
            processing_class=tokenizer,
            plan="auto",
        )
    assert made[0].workload["max_prompt_tokens"] == 8
    assert made[0].workload["prompt_lengths"]["rows"] == 4


def test_prompts_are_spread_over_the_dataset() -> None:
    from fp8plan.integrations.trl import request

    assert list(request.spread(0)) == []
    assert list(request.spread(3)) == [0, 1, 2]
    assert list(request.spread(1000, 4)) == [0, 250, 500, 750]
    rows = [{"prompt": "ab"}, {"prompt": "c"}]
    assert request.prompt_lengths(rows, lambda prompts: [[*map(ord, text)] for text in prompts]) == {
        "prompt_lengths": Trace((2, 1), "prompts of the dataset")
    }
    assert request.prompt_lengths(iter(rows), len) == {}


def test_a_checkpoint_of_the_same_size_passes_the_check_of_an_engine_that_keeps_layers() -> None:
    setup = EngineSetup("Qwen/Qwen3-8B", "h200", "fp8_block", remedies=Remedies(keep_bf16=(1, 1)))
    check_model(setup, "Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match=r"the plan is for Qwen/Qwen3-8B, and the model is Qwen/Qwen3-4B"):
        check_model(setup, "Qwen/Qwen3-4B")
