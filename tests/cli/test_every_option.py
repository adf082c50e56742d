"""Every option of every command reaches what the command calls: the request of a plan, or the arguments of a function.

The functions behind the commands are replaced by ones that keep their arguments. Each option is typed with a value that
is not its default, and must be found there under its own name. An option without a row here is a failure, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
from command import RECORD, Done
from rich.console import Console
from trainer_files import GRPO_CONFIG, VERL_CONFIG
from typed import MODEL
from typed import PLAN as SMALL_PLAN

import fp8plan as package
from fp8plan import TopK, cli
from fp8plan.model.risk.remedies import Remedies

ABSENT = object()
REQUEST, OUTPUTS = "predict.request", "deliver.self"
TIMES = ["--train-s", "5", "--logprob-s", "2"]
TURNS = "--turns 7 --turn-tokens 300 --tool-tokens 600 --tool-s 2.5"
RATE = ["--learning-rate", "1e-6"]


class Row(NamedTuple):
    """An option as it is typed, with others that it needs, and where its value is found."""

    words: list[str]
    found: dict[str, Any]


def row(typed: str, **found: Any) -> Row:
    return Row(typed.split(), {name.replace("__", "."): value for name, value in found.items()})


def limit(typed: str, name: str, value: Any) -> Row:
    return Row(typed.split(), {f"{REQUEST}.limits.{name}": value})


def asked(typed: str, name: str, value: Any) -> Row:
    return Row(typed.split(), {f"{REQUEST}.{name}": value})


# Option -> its row, of both commands that plan.
PLANNING: dict[str, Row] = {
    "model": asked("Qwen/Qwen3-8B --gpu h200", "shape.name", "Qwen/Qwen3-8B"),
    "--gpu": asked("--gpu h100", "card.name", "h100_sxm"),
    "--workload": asked("--workload records.jsonl", "workload.response_lengths.values", (32, 40, 50)),
    "--prompts": asked("--prompts 3", "workload.prompts", 3),
    "--samples": asked("--samples 5", "workload.samples_per_prompt", 5),
    "--prompt-lengths": asked("--prompt-lengths fixed:77", "workload.prompt_lengths.value", 77),
    "--response-lengths": asked("--response-lengths fixed:99", "workload.response_lengths.value", 99),
    "--seed": asked("--seed 11", "workload.seed", 11),
    "--turns": asked(TURNS, "workload.turns.turns.value", 7),
    "--turn-tokens": asked(TURNS, "workload.turns.turn_tokens.value", 300),
    "--tool-tokens": asked(TURNS, "workload.turns.tool_tokens.value", 600),
    "--tool-s": asked(TURNS, "workload.turns.tool_s.value", 2.5),
    "--concurrent": asked(f"{TURNS} --concurrent 9", "workload.turns.concurrent", 9),
    "--reasoning-share": asked(f"{TURNS} --reasoning-share 0.5", "workload.turns.reasoning_share", 0.5),
    "--observed": asked("--observed records.jsonl", "observed.0.seconds", 1.0),
    "--gpus": asked("--gpus 6", "gpus", 6),
    "--gpus-per-node": asked("--gpus-per-node 3", "gpus_per_node", 3),
    "--tensor-parallel-size": limit("--tensor-parallel-size 4", "tensor_parallel_size", 4),
    "--data-parallel-size": limit("--data-parallel-size 7", "data_parallel_size", 7),
    "--expert-parallel": limit("--expert-parallel", "enable_expert_parallel", True),
    "--gpu-memory-utilization": limit("--gpu-memory-utilization 0.55", "gpu_memory_utilization", 0.55),
    "--max-model-len": limit("--max-model-len 30001", "max_model_len", 30001),
    "--max-num-seqs": limit("--max-num-seqs 97", "max_num_seqs", 97),
    "--max-num-batched-tokens": limit("--max-num-batched-tokens 9001", "max_num_batched_tokens", 9001),
    "--block-size": limit("--block-size 64", "block_size", 64),
    "--prefix-caching": limit("--no-prefix-caching", "enable_prefix_caching", False),
    "--async-scheduling": limit("--no-async-scheduling", "async_scheduling", False),
    "--enforce-eager": limit("--enforce-eager", "enforce_eager", True),
    "--num-gpu-blocks": limit("--num-gpu-blocks 5001", "num_gpu_blocks", 5001),
    "--max-cudagraph-capture-size": limit("--max-cudagraph-capture-size 256", "max_cudagraph_capture_size", 256),
    "--inside": asked("--inside verl-stock", "inside", "verl-stock"),
    "--engine-version": asked("--engine-version 0.31.0", "engine_version", "0.31.0"),
    "--host-loop-us": asked("--host-loop-us 400", "host_loop_s", pytest.approx(4e-4)),
    "--strict": asked("--strict", "strict", True),
    "--precision": asked("--precision fp8_kv --precision bf16", "precisions", ["fp8_kv", "bf16"]),
    "--accept": asked("--accept high", "budget.accept", "high"),
    "--kv-scales": Row(
        ["--kv-scales", "unit"], {f"{REQUEST}.kv_scales_calibrated": False, f"{OUTPUTS}.scales": "unit"}
    ),
    "--router-replay": asked("--router-replay", "remedies.router_replay", True),
    "--trainer-precision": asked("--trainer-precision fp8_block", "remedies.trainer_precision", "fp8_block"),
    "--keep-bf16": asked("--keep-bf16 2,1,o_proj", "remedies.keep_bf16", (2, 1, "o_proj")),
    "--train-s": Row(TIMES, {f"{REQUEST}.trainer.train_s": 5}),
    "--logprob-s": Row(TIMES, {f"{REQUEST}.trainer.logprob_s": 2}),
    "--train-tokens-per-s": asked("--train-tokens-per-s 8 --logprob-s 2", "trainer.train_tokens_per_s", 8),
    "--logprob-tokens-per-s": asked("--logprob-tokens-per-s 9 --train-s 5", "trainer.logprob_tokens_per_s", 9),
    "--link": Row([*TIMES, "--link", "25Gb/s"], {f"{REQUEST}.link": "25Gb/s", f"{REQUEST}.sync.link": "25Gb/s"}),
    "--learning-rate": asked("--learning-rate 2e-6", "learning_rate", 2e-6),
    "--optimizer": Row([*RATE, "--optimizer", "muon"], {f"{REQUEST}.optimizer": "muon"}),
    "--top-k": Row([*RATE, "--top-k", "20MB"], {f"{REQUEST}.top_k": TopK(nbytes=20e6)}),
    "--json": Row(["--json", "plan.json"], {f"{OUTPUTS}.as_json": "plan.json"}),
    "--emit": Row(
        ["--emit", "verl=verl.txt"],
        {f"{OUTPUTS}.emissions": [("verl", "verl.txt")], f"{REQUEST}.target": "verl"},
    ),
    "--all": Row(["--all"], {f"{OUTPUTS}.every": True}),
    "--plot": Row(["--plot", "plan.png"], {f"{OUTPUTS}.plot": Path("plan.png")}),
}
DRAFT = "--acceptance 0.7"
CONFIGURED = {
    "--grpo-config": asked("--grpo-config grpo.py:args", "inside", "trl"),
    "--verl-config": asked("--verl-config verl.yaml", "target", "verl"),
}


def tuning() -> dict[str, Row]:
    """The rows of `tune`: those of `plan`, and its own."""
    own = {
        "--max-lag": Row([*TIMES, "--max-lag", "9"], {f"{REQUEST}.trainer.max_lag": 9}),
        "--acceptance": asked(DRAFT, "speculation.acceptance", 0.7),
        "--num-speculative-tokens": asked(f"{DRAFT} --num-speculative-tokens 5", "speculation.tokens", 5),
        "--speculative-method": asked(f"{DRAFT} --speculative-method mtp", "speculation.method", "mtp"),
    }
    kept = Row(["--prefix-caching"], {f"{REQUEST}.keep": {"enable_prefix_caching"}})
    return _under("search", PLANNING | own | {"--prefix-caching": kept})


def _under(function: str, rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows for a command whose request goes to another function than `predict`."""
    return {
        option: Row(words, {path.replace("predict.", f"{function}."): value for path, value in found.items()})
        for option, (words, found) in rows.items()
    }


ENGINE = "RolloutStream.engine"
LIMITS, SETTINGS = "probe.limits", "probe.settings"
ROWS: dict[str, dict[str, Row]] = {
    "plan": PLANNING | CONFIGURED,
    "tune": tuning(),
    "emit": {
        "plan": Row(["other.json", "vllm"], {"emit.self.seed": 7}),
        "target": Row(["plan.json", "verl"], {"emit.target": "verl"}),
        "--choice": row("--choice fp8_kv", emit__choice="fp8_kv"),
        "--kv-scales": row("--kv-scales calibrated", emit__kv_scales="calibrated"),
        "--output": row("--output out.txt", write__writers=["out.txt"]),
    },
    "monitor": {
        "file": row("other.jsonl", watch__reader__path=Path("other.jsonl")),
        "--once": row("--once", watch=ABSENT),
        "--steps": row("--steps 7", watch__steps=7),
        "--every": row("--every 2.5", watch__every_s=2.5),
    },
    "report": {
        "file": row("other.jsonl", write_report__source=Path("other.jsonl")),
        "--output": row("--output page.html", write_report__target=Path("page.html")),
    },
    "validate": {
        "file": row("other.jsonl", read_run__path=Path("other.jsonl")),
        "--strict": row("--strict", validate__strict=True),
        "--include-first": row("--include-first", read_run__include_first=True),
        "--json": row("--json", is_json=True),
    },
    "import": {
        "trainer": Row(["trl", "run"], {"RolloutStream.trainer": "trl"}),
        "folder": Row(["verl", "other"], {"RolloutStream.folder": Path("other")}),
        "--tokenizer": row("--tokenizer words", RolloutStream__tokenizer="words"),
        "--tools": row("--tools tools.json", RolloutStream__tools=Path("tools.json")),
        "--log": row("--log run.log", RolloutStream__log=Path("run.log")),
        "--last": row("--last 6", RolloutStream__last=6),
        "--model": Row(["--model", MODEL], {f"{ENGINE}.model": MODEL}),
        "--gpu": Row(["--gpu", "h100"], {f"{ENGINE}.gpu": "h100"}),
        "--precision": Row(["--precision", "fp8_kv"], {f"{ENGINE}.precision": "fp8_kv"}),
        "--engine-version": Row(["--engine-version", "0.31.0"], {f"{ENGINE}.engine_version": "0.31.0"}),
        "--inside": Row(["--inside", "own"], {f"{ENGINE}.inside": "own"}),
        "--tensor-parallel-size": Row(["--tensor-parallel-size", "4"], {f"{ENGINE}.tensor_parallel": 4}),
        "--data-parallel-size": Row(["--data-parallel-size", "7"], {f"{ENGINE}.data_parallel": 7}),
        "--expert-parallel": Row(["--expert-parallel"], {f"{ENGINE}.expert_parallel": True}),
        "--gpu-memory-utilization": Row(["--gpu-memory-utilization", "0.4"], {f"{ENGINE}.gpu_memory_utilization": 0.4}),
        "--max-model-len": Row(["--max-model-len", "301"], {f"{ENGINE}.max_model_len": 301}),
        "--max-num-seqs": Row(["--max-num-seqs", "97"], {f"{ENGINE}.max_num_seqs": 97}),
        "--max-num-batched-tokens": Row(["--max-num-batched-tokens", "901"], {f"{ENGINE}.max_num_batched_tokens": 901}),
        "--prefix-caching": Row(["--no-prefix-caching"], {f"{ENGINE}.enable_prefix_caching": False}),
        "--enforce-eager": Row(["--enforce-eager"], {f"{ENGINE}.enforce_eager": True}),
        "--output": row("--output records.jsonl", write__writers=["records.jsonl"]),
    },
    "doctor": {
        "target": row("other.log", doctor__target="other.log"),
        "--engine": Row(["--engine"], {"self_test.gpu": None}),
        "--host": Row(["--host"], {"time_host": {}}),
        "--prompts": row("run.jsonl --prompts prompts.jsonl", doctor__prompts=Path("prompts.jsonl")),
        "--gpu": row("run.jsonl --gpu h100", doctor__gpu="h100"),
        "--precision": row("run.jsonl --precision fp8_kv", doctor__precision="fp8_kv"),
        "--trainer-precision": row("run.jsonl --trainer-precision bf16", doctor__trainer_precision="bf16"),
        "--api-key": row("run.jsonl --api-key secret", doctor__api_key="secret"),
        "--timeout": row("run.jsonl --timeout 33", doctor__timeout_s=33),
        "--json": row("run.jsonl --json", is_json=True),
    },
    "probe": {
        "model": row("Qwen/Qwen3-8B --gpu h200", probe__model_path="Qwen/Qwen3-8B"),
        "--precision": row("--precision fp8_kv --precision bf16", probe__precisions=["fp8_kv", "bf16"]),
        "--gpu": row("--gpu h100", probe__gpu__name="h100_sxm"),
        "--prompts": row("--prompts prompts.jsonl", probe__prompts=[[1, 2, 3]]),
        "--most-prompts": row("--most-prompts 6", probe__most_prompts=6),
        "--trainer-precision": row("--trainer-precision fp8_block", probe__remedies=[Remedies(False, "fp8_block")]),
        "--router-replay": row("--router-replay", probe__remedies=[Remedies(), Remedies(router_replay=True)]),
        "--keep-bf16": row("--keep-bf16 1,2", probe__remedies=[Remedies(keep_bf16=(1, 2))]),
        "--samples": Row(["--samples", "7"], {f"{SETTINGS}.samples": 7}),
        "--max-tokens": Row(["--max-tokens", "99"], {f"{SETTINGS}.max_tokens": 99}),
        "--temperature": Row(["--temperature", "0.8"], {f"{SETTINGS}.temperature": 0.8}),
        "--seed": Row(["--seed", "11"], {f"{SETTINGS}.seed": 11}),
        "--kv-scales": Row(["--kv-scales", "unit"], {f"{SETTINGS}.kv_scales": "unit"}),
        "--after": Row(["--after", "trained"], {f"{SETTINGS}.after": "trained"}),
        "--top-k": Row(["--after", "trained", "--top-k", "20MB"], {f"{SETTINGS}.top_k": TopK(nbytes=20e6)}),
        "--gpu-memory-utilization": Row(["--gpu-memory-utilization", "0.4"], {f"{LIMITS}.gpu_memory_utilization": 0.4}),
        "--tensor-parallel-size": Row(["--tensor-parallel-size", "4"], {f"{LIMITS}.tensor_parallel_size": 4}),
        "--max-num-seqs": Row(["--max-num-seqs", "97"], {f"{LIMITS}.max_num_seqs": 97}),
        "--num-gpu-blocks": Row(["--num-gpu-blocks", "501"], {f"{LIMITS}.num_gpu_blocks": 501}),
        "--enforce-eager": Row(["--enforce-eager"], {f"{LIMITS}.enforce_eager": True}),
        "--attention-backend": row(
            "--attention-backend TRITON_ATTN", probe__vllm_kwargs__attention_backend="TRITON_ATTN"
        ),
        "--json": row("--json", is_json=True),
    },
    "calibrate": {
        "--gpu": row("--gpu h100", measure__card__name="h100_sxm", calibrate__card__name="h100_sxm"),
        "--output": row("--output mine", measure__folder=Path("mine"), calibrate__folder=Path("mine")),
        "--grid": row("--grid full", measure__grid="full"),
        "--fit-only": row("--fit-only --output mine", measure=ABSENT),
    },
    "profiles": {"--json": row("--json", is_json=True)},
    "models": {"--json": row("--json", is_json=True)},
}
# The words of each command, which a row's own words follow. Words that begin with an argument replace them.
BASE: dict[str, list[str]] = {
    "plan": [MODEL, "--gpu", "h200"],
    "tune": [MODEL, "--gpu", "h200"],
    "emit": ["plan.json", "vllm"],
    "monitor": ["run.jsonl"],
    "report": ["run.jsonl"],
    "validate": ["records.jsonl"],
    "import": ["verl", "run"],
    "probe": [MODEL, "--gpu", "h200"],
    "calibrate": ["--gpu", "h200"],
}

# What the commands call: the module, the class there or "", the name, and the answer of its stand-in.
CALLED: tuple[tuple[str, str, str, Any], ...] = (
    ("fp8plan.model.plan.planner", "", "predict", None),
    ("fp8plan.cli.request", "PlanOutputs", "deliver", None),
    ("fp8plan.model.tune.search", "", "search", MagicMock()),
    ("fp8plan.model.tune.answer", "Answer", "of", MagicMock(to_dict=dict)),
    ("fp8plan.model.plan.plan", "Plan", "emit", "settings"),
    ("fp8plan.cli.console", "", "write", None),
    ("fp8plan.views.run", "", "watch", None),
    ("fp8plan.views.run", "", "begin", None),
    ("fp8plan.views.run", "", "RunView", "view"),
    ("fp8plan.views.run_page", "", "write_report", None),
    ("fp8plan.model.validate.records", "", "read_run", MagicMock(notes=[])),
    ("fp8plan.model.validate.validate", "", "validate", MagicMock(to_dict=dict, warnings=[])),
    ("fp8plan.views.measured", "", "validation_report", "report"),
    ("fp8plan.importers.records", "", "RolloutStream", MagicMock(notes=[])),
    ("fp8plan.runtime.apply.doctor.doctor", "", "doctor", MagicMock(to_dict=dict, faults=[])),
    ("fp8plan.runtime.apply.doctor.self_test", "", "self_test", MagicMock(faults=[])),
    ("fp8plan.views.findings", "", "doctor_report", "report"),
    ("fp8plan.runtime.this_host", "", "time_host", 3e-4),
    (
        "fp8plan.runtime.measure.probe.probe",
        "",
        "probe",
        MagicMock(to_dict=dict, findings=[MagicMock(error="")]),
    ),
    ("fp8plan.runtime.measure.probe.sampling", "", "checkpoint_manifest", {}),
    ("fp8plan.views.findings", "", "probe_report", "report"),
    ("fp8plan.runtime.measure.calibrate", "", "measure", None),
    ("fp8plan.runtime.measure.rollouts.jobs", "", "engine_version", "0.33.0"),
    ("fp8plan.model.calibrate.profile_of", "", "measured_version", "0.33.0"),
    ("fp8plan.model.calibrate.profile_of", "", "calibrate", KeyboardInterrupt()),  # so that no profile is written
)
PLAN = package.plan(MODEL, "h200", package.Workload(2, 2, 16, 32), precisions=["bf16", "fp8_kv"])
Seen = dict[str, Any]  # name of a function -> its arguments


def stand_in(seen: Seen, function: Callable[..., Any], name: str, answer: Any) -> Callable[..., Any]:
    """A function that keeps its arguments."""
    parameters = signature(function)

    def called(*arguments: Any, **options: Any) -> Any:
        seen[name] = parameters.bind(*arguments, **options).arguments
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return called


@pytest.fixture
def seen_of(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], Seen]:
    """Run a command with some words, and return the arguments of all that it called."""
    seen: Seen = {}
    modules = [import_module(module) for module, *_ in CALLED]  # all of them before one holds another's stand-in
    for module, (_, owner, name, answer) in zip(modules, CALLED, strict=True):
        place = getattr(module, owner) if owner else module
        function = getattr(place, name)
        monkeypatch.setattr(place, name, stand_in(seen, function, name, answer))
    monkeypatch.setattr("fp8plan.cli.run.Console", lambda: Console(force_terminal=True))
    for name in ("records.jsonl", "run.jsonl", "other.jsonl"):
        Path(name).write_text(json.dumps(RECORD) + "\n")
    Path("prompts.jsonl").write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    Path("grpo.py").write_text(GRPO_CONFIG)
    Path("verl.yaml").write_text(VERL_CONFIG)
    Path("plan.json").write_text(PLAN.to_json())
    Path("other.json").write_text(replace(PLAN, seed=7).to_json())
    Path("mine").mkdir()

    def run(command: str, words: list[str]) -> Seen:
        seen.clear()
        out = fp8plan(*command.split(), *words).out
        if "write" in seen:
            seen["write"]["writers"] = list(seen["write"]["writers"])
        return seen | {"is_json": is_json(out)}

    return run


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def at(seen: Seen, path: str) -> Any:
    """The value at a path of keys, indices and attributes; ABSENT if there is none."""
    value: Any = seen
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(name, ABSENT)
        elif name.isdecimal():
            value = value[int(name)] if len(value) > int(name) else ABSENT
        else:
            value = getattr(value, name, ABSENT)
    return value


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below the program, with the words that call it."""
    for name, command in group.commands.items():
        yield " ".join((*path, name)), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def options_of(command: Any) -> list[str]:
    """The longest name of each option, and the name of each argument."""
    parameters = [x for x in command.params if x.name != "help"]
    return [x.name if x.param_type_name == "argument" else max(x.opts, key=len) for x in parameters]


PROGRAM = dict(commands(cli.program()))
EVERY = [(command, option) for command, each in PROGRAM.items() for option in options_of(each)]


def test_every_command_and_option_has_a_row() -> None:
    assert len(EVERY) > 140
    assert {command: set(rows) for command, rows in ROWS.items()} == {
        command: set(options_of(each)) for command, each in PROGRAM.items()
    }


@pytest.mark.parametrize(("command", "option"), EVERY, ids=[" ".join(each) for each in EVERY])
def test_an_option_reaches_what_the_command_calls(
    seen_of: Callable[[str, list[str]], Seen], command: str, option: str
) -> None:
    words, found = ROWS[command][option]
    base = BASE.get(command, [])
    usual = seen_of(command, base)
    before = {path: at(usual, path) for path in found}
    typed = seen_of(command, [*base, *words] if words[0].startswith("-") else words)
    for path, value in found.items():
        assert at(typed, path) == value, path
        assert before[path] != value, f"{path}: not another value than without the option"


def test_the_report_and_the_picture_get_their_options(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = {}

    def draw(prediction: Any, target: Path, kv_scales: str) -> None:
        seen["kv_scales"] = kv_scales
        target.touch()

    monkeypatch.setattr("fp8plan.views.plan_page.draw", draw)
    report = import_module("fp8plan.views.report")
    monkeypatch.setattr(report, "plan_report", stand_in(seen, report.plan_report, "plan_report", "report"))
    assert fp8plan(*SMALL_PLAN, "--all", "--plot", "plan.png", "--kv-scales", "calibrated").code == 0
    assert (seen["plan_report"]["every"], seen["kv_scales"]) == (True, "calibrated")
    assert fp8plan(*SMALL_PLAN, "--plot", "plan.png").code == 0
    assert (seen["plan_report"]["every"], seen["kv_scales"]) == (False, "unit")
