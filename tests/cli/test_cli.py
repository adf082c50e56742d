"""The command line: one clear line and exit code 2 for bad input, results alone on stdout, notes on stderr."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from synthetic import PRIOR, batch_fields, nature, write_folder
from synthetic import SMALL as TINY
from typed import MODEL, PLAN, SMALL

import fp8plan as package
from fp8plan import cli
from fp8plan.cli import outputs
from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile import library
from fp8plan.model.profile.profile import Profile
from fp8plan.runtime.measure import calibrate, machine
from fp8plan.runtime.measure.cells import jobs as cells

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = {
    "model": MODEL,
    "gpu": "h200",
    "engine": "vllm",
    "engine_version": "0.26.0",
    "precision": "bf16",
    "prompt_lengths": [16, 16, 20],
    "response_lengths": [32, 40, 50],
    "seconds": 1.0,
}


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fp8plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """Run the command line in this process, in an empty folder, with the shipped datasheet profile only."""
    sheet = library.profiles_path() / "datasheet.json"
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "datasheet.json").write_text(sheet.read_text())
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(library, "profiles_path", lambda: tmp_path / "profiles")

    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["fp8plan", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Done(code, *capsys.readouterr())

    return run


def refused(done: Done, *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that starts with the program's name and holds the parts."""
    assert done.code == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("fp8plan: ")
    for part in parts:
        assert part in line


# Bad input of `plan`: what is typed after PLAN, and what the one line must hold: what was given, and the way out.
BAD_PLANS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown GPU": (["--gpu", "h300"], ("'h300'", "nearest: h800, h200_sxm", "a100_sxm", "auto")),
    "negative length": (["--response-lengths", "fixed:-5"], ("-5", "allowed: ", "1 to ")),
    "negative prompt length": (["--prompt-lengths", "fixed:-5"], ("-5", "allowed: ", "1 to ")),
    "no length": (["--response-lengths", "fixed:0"], ("fixed length is 0", "allowed: ")),
    "NaN length": (["--response-lengths", "fixed:nan"], ("'fixed:nan'", "fixed:TOKENS", "lognormal:mean=TOKENS")),
    "NaN mean": (["--response-lengths", "lognormal:mean=nan,sigma=1,max=9"], ("mean is nan", "finite")),
    "negative mean": (["--response-lengths", "lognormal:mean=-7,sigma=1,max=9"], ("mean is -7", "allowed: ")),
    "NaN sigma": (["--response-lengths", "lognormal:mean=5,sigma=nan,max=9"], ("sigma is nan", "at least 0")),
    "negative max": (["--response-lengths", "lognormal:mean=5,sigma=1,max=-9"], ("max is -9", "allowed: ")),
    "infinite max": (["--response-lengths", "lognormal:mean=5,sigma=1,max=inf"], ("max=inf", "max=TOKENS")),
    "no max": (["--response-lengths", "lognormal:mean=5,sigma=1"], ("mean=5,sigma=1'", "max=TOKENS")),
    "unknown field": (["--response-lengths", "lognormal:mean=5,sigma=1,max=9,min=2"], ("min=2", "max=TOKENS")),
    "absurd length": (["--response-lengths", f"fixed:{10**30}"], (str(10**30), "allowed: ")),
    "unknown lengths": (["--response-lengths", "uniform:1,2"], ("'uniform:1,2'", "fixed:TOKENS", ".jsonl")),
    "no trace": (["--response-lengths", "absent.jsonl"], ("absent.jsonl", "there is no")),
    "longer than max_model_len": (["--max-model-len", "40"], ("48 tokens", "max_model_len is 40", "raise")),
    "beyond the context": (["--max-model-len", "100000"], ("100000", "at most 40960", "config.json")),
    "one request can never fit": (["--num-gpu-blocks", "2"], ("num_gpu_blocks 2", "48 tokens", "3 blocks", "raise")),
    "KV pool larger than the GPU": (
        ["--num-gpu-blocks", str(10**12)],
        ("num_gpu_blocks 1000000000000", "GiB of KV cache", "has 140 GiB", "allowed: at most "),
    ),
    "FP8 weights cut inside a block": (
        ["--tensor-parallel-size", "16", "--precision", "fp8_block"],
        ("down_proj has 192 inputs", "tensor_parallel_size 16", "multiples of 128", "allowed: 1, 2, 4, 8"),
    ),
    "idle replicas": (["--data-parallel-size", "100000"], ("100000 replicas for", "allowed: at most ")),
    "GPUs without requests": (["--gpus", "100000"], ("100000 replicas for", "allowed: at most ")),
    "no GPU in a node": (["--gpus-per-node", "0"], ("gpus_per_node is 0", "at least 1")),
    "no KV pool": (["--num-gpu-blocks", "0"], ("num_gpu_blocks is 0", "at least 1")),
    "FP8 on an A100": (["--precision", "fp8_block", "--gpu", "a100"], ("fp8_block", "no FP8 tensor cores", "use bf16")),
    "FP8 KV on an A100": (["--precision", "fp8_kv", "--gpu", "a100"], ("fp8_kv", "no FP8 tensor cores", "use bf16")),
    "unknown precision": (["--precision", "int4"], ("'int4'", ", ".join(PRESETS))),
    "TP does not divide the heads": (["--tensor-parallel-size", "3"], ("3", "16 attention heads", "1, 2, 4, 8, 16")),
    "TP 0": (["--tensor-parallel-size", "0"], ("tensor_parallel_size is 0", "at least 1")),
    "DP negative": (["--data-parallel-size", "-1"], ("data_parallel_size is -1", "at least 1")),
    "--gpus and TP": (["--gpus", "4", "--tensor-parallel-size", "2"], ("--gpus", "give ")),
    "--gpus and DP": (["--gpus", "4", "--data-parallel-size", "2"], ("--gpus", "give ")),
    "--gpus 0": (["--gpus", "0"], ("gpus is 0", "at least 1")),
    "only the datasheet under --strict": (["--strict"], ("h200_sxm", "0.26.0", "leave --strict out")),
    "plot to svg": (["--plot", "picture.svg"], ("picture.svg", ".png or .html")),
    "plot to no folder": (["--plot", "absent/picture.png"], ("absent/picture.png", "no folder")),
    "emit for another engine": (["--emit", "sglang"], ("'sglang'", "vllm, verl, trl")),
    "emit what TRL cannot do": (
        ["--emit", "trl", "--precision", "fp8_block"],
        ("TRL", "fp8_block", "--precision bf16 "),
    ),
    "unknown risk": (["--accept", "extreme"], ("--accept is 'extreme'", "low, moderate, high")),
    "unknown KV scales": (["--kv-scales", "none"], ("'none'", "calibrated, unit")),
    "two outputs on stdout": (["--json", "--emit", "vllm"], ("--json and --emit vllm", "--emit TARGET=FILE")),
    "two settings on stdout": (["--emit", "verl", "--emit", "vllm"], ("--emit verl and --emit vllm", "TARGET=FILE")),
    "two outputs in a file": (["--json", "a.json", "--emit", "vllm=./a.json"], ("a.json", "2 times", "of its own")),
    "JSON to no folder": (["--json", "absent/plan.json"], ("absent/plan.json", "no folder absent")),
    "settings to a folder": (["--emit", "verl=."], ("cannot write .", "is a folder")),
    "settings to nothing": (["--emit", "verl="], ("--emit verl names no file", "leave = out")),
    "JSON to nothing": (["--json="], ("--json names no file", "leave = out")),
    "a misspelt target with a file": (["--emit", "vrl=a"], ("'vrl'", "vllm, verl, trl")),
    "JSON to another suffix": (["--json", "plan"], ("(plan)", "fp8plan plan --help")),
    "NaN memory": (["--gpu-memory-utilization", "nan"], ("nan", "above 0, at most 1")),
    "too much memory": (["--gpu-memory-utilization", "1.5"], ("1.5", "above 0, at most 1")),
    "more requests than budget": (["--max-num-seqs", "99999"], ("99999", "16384", "allowed: ")),
    "block size 0": (["--block-size", "0"], ("block_size is 0", "at least 1")),
    "no prompts": (["--prompts", "0"], ("prompts is 0", "at least 1")),
    "no samples": (["--samples", "-2"], ("-2", "at least 1")),
    "negative seed": (["--seed", "-1"], ("seed is -1", "at least 0")),
    "negative training time": (["--train-s", "-1"], ("train_s is -1", "at least 0")),
    "NaN training time": (["--train-s", "nan"], ("train_s is nan", "at least 0")),
    "training time twice": (["--train-s", "1", "--train-tokens-per-s", "5"], ("train_s", "give one of them")),
    "log-probs twice": (["--logprob-s", "1", "--logprob-tokens-per-s", "5"], ("logprob_s", "give one of them")),
    "no log-probs": (["--train-s", "1"], ("log-probs", "--logprob-s")),
    "no training": (["--logprob-tokens-per-s", "9"], ("training", "--train-s")),
    "only a bandwidth": (["--sync-gb-per-s", "9"], ("training and the log-probs", "--train-s", "--logprob-s")),
    "NaN bandwidth": (["--sync-gb-per-s", "nan"], ("--sync-gb-per-s is nan", "above 0")),
    "no bandwidth": (["--sync-gb-per-s", "0"], ("--sync-gb-per-s is 0", "above 0")),
}


@pytest.mark.parametrize(("words", "parts"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_input_is_one_clear_line(fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]) -> None:
    refused(fp8plan(*PLAN, *words), *parts)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "Qwen3-9B"])
def test_an_unknown_model_gets_the_nearest_names(fp8plan: Callable[..., Done], name: str) -> None:
    refused(fp8plan("plan", name, "--gpu", "h200"), repr(name), "Qwen/Qwen3-8B", "fp8plan models", "config.json")


def test_a_folder_without_config_is_refused(fp8plan: Callable[..., Done]) -> None:
    refused(fp8plan("plan", "./absent", "--gpu", "h200"), "absent/config.json", "hub id")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"model_type": "qwen3", ', ("not valid JSON", "download")),
        ("[]", ("list",)),
        ('{"model_type": "qwen3"}', ("'hidden_size' is missing", "whole number")),
        ('{"model_type": "deepseek_v3", "kv_lora_rank": 512}', ("MLA", "not modelled", "qwen3_moe")),
    ],
)
def test_a_corrupt_config_is_refused_by_file(fp8plan: Callable[..., Done], text: str, parts: tuple[str, ...]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(text)
    refused(fp8plan("plan", "./model", "--gpu", "h200", *SMALL), "model/config.json", *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("no lengths", "at least one row")),
        (b"\n  \n", ("no lengths", "at least one row")),
        (b"5\nmany\n", ("line 2", '"response_length"')),
        (b'5\n\n{"tokens": 7}\n', ("line 3", '"response_length"')),
        (b"5\n-3\n", ("row 2", "-3", "allowed: ")),
        (b"5\nNaN\n", ("line 2", "NaN", "allowed: ")),
        (b"5\n2.5\n", ("row 2", "2.5", "whole")),
        (b'5\n"7"\n', ("row 2", "'7'", "allowed: ")),
        (b"true\n", ("row 1", "True", "allowed: ")),
        (b"\xff\xfe5\n", ("cannot read", "utf-8")),
    ],
)
def test_a_bad_trace_is_refused_by_row(fp8plan: Callable[..., Done], content: bytes, parts: tuple[str, ...]) -> None:
    Path("trace.jsonl").write_bytes(content)
    refused(fp8plan(*PLAN, "--response-lengths", "trace.jsonl"), "trace.jsonl", *parts)


def test_a_model_that_does_not_fit_is_refused_with_ways_out(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan("plan", "meta-llama/Llama-3.1-70B", "--gpu", "l40s", *SMALL)
    refused(done, "Llama-3.1-70B", "does not fit NVIDIA L40S", "GiB", "try tensor_parallel_size 4")


def test_a_profile_of_another_version_is_used_with_a_note_and_refused_under_strict(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fp8plan.model.hardware import gpu

    measured = replace(library.load_profile(gpu("h200"))[0], kind="calibrated", engine_version="0.26.0")
    path = tmp_path / "profiles" / "h200_sxm" / "vllm-0.26.0" / "profile.json"
    path.parent.mkdir(parents=True)
    path.write_text(measured.to_json())
    exact = fp8plan(*PLAN, "--json", "--strict")
    assert (exact.code, exact.err) == (0, "")
    near = fp8plan(*PLAN, "--json", "--engine-version", "0.27.1")
    assert near.code == 0
    assert "0.27.1" in near.err
    assert "0.26.0" in near.err
    ratio = [first_choice(done)["makespan_high_s"] / first_choice(done)["makespan_s"] for done in (exact, near)]
    assert ratio[1] > ratio[0]
    refused(fp8plan(*PLAN, "--engine-version", "0.27.1", "--strict"), "0.27.1", "0.26.0", "leave --strict out")


# A profile that cannot be used, or is asked for what it did not measure


def own_profile(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    """The profile of an H200 and vLLM 0.26.0 that `fp8plan calibrate` left in the user's folder."""
    monkeypatch.setenv("FP8PLAN_PROFILES", str(folder))
    path = library.profile_path(folder, "h200_sxm", "0.26.0")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


MEASURED = replace(PRIOR, kind="calibrated", source="a test", hull={"engine steps": {"sampled_requests": (1, 4)}})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MEASURED.to_json()[:-30], ("is not JSON",)),
        ("[]", ("list", "JSON object")),
        (MEASURED.to_json().replace('"calibrated"', '"guessed"'), ("'guessed'", "calibrated")),
        (MEASURED.to_json().replace('"hull"', '"hulk"'), ("'hull' is missing",)),
    ],
)
def test_a_corrupt_profile_is_refused_by_file_and_not_passed_over(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    path = own_profile(monkeypatch, tmp_path / "own", text)
    for words in (PLAN, [*PLAN, "--strict"], [*PLAN, "--engine-version", "0.27.0"], ["profiles"]):
        refused(fp8plan(*words), str(path), *parts)


def test_outside_of_what_was_measured_is_said_and_marked(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured with 4 requests at most: 2 x 2 lie inside, 4 x 2 outside. --strict is about versions alone."""
    own_profile(monkeypatch, tmp_path / "own", MEASURED.to_json())
    inside, outside = (fp8plan(*PLAN, "--strict", "--json", "--prompts", prompts) for prompts in (2, 4))
    for done, extrapolated in ((inside, False), (outside, True)):
        answer = json.loads(done.out)
        assert {choice["extrapolated"] for choice in answer["choices"]} == {extrapolated}
        assert any("outside of what the profile h200_sxm/vllm-0.26.0" in x for x in answer["reasons"]) is extrapolated
        assert done.err == ""
    assert "outside of what the profile" in " ".join(fp8plan(*PLAN, "--prompts", 4).out.split())
    Path("records.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD | batch_fields(0, model=MODEL)))
    rows = json.loads(fp8plan("validate", "records.jsonl", "--strict", "--json").out)["records"]
    assert [row["extrapolated"] for row in rows] == [False, True]


def test_a_kernel_that_was_not_measured_is_named_with_the_command(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = {x: v for x, v in PRIOR.coefficients.items() if not x.startswith("attention.fp8")}
    known = {x: v for x, v in PRIOR.log_covariance.items() if x in kept}
    partly = replace(MEASURED, coefficients=kept, log_covariance=known)
    own_profile(monkeypatch, tmp_path / "own", partly.to_json())
    assert fp8plan(*PLAN, "--precision", "bf16").code == 0
    refused(fp8plan(*PLAN, "--precision", "fp8_kv"), "attention.fp8", "not measured", "fp8plan calibrate --gpu auto")


# Calibrating

CALIBRATE = ["calibrate", "--gpu", "h200"]


def calibrated_by_hand(folder: Path, **changes: Any) -> Path:
    """A folder of measurements of a GPU that is not the datasheet's."""
    runs = [batch_fields(1, longest=900), batch_fields(2, requests=60, **changes)]
    return write_folder(folder, nature(11), runs)


def test_a_calibration_prints_its_errors_and_plans_use_it(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, shipped = tmp_path / "own", tmp_path / "profiles"
    folder = calibrated_by_hand(library.profile_path(own, "h200_sxm", "0.26.0").parent)
    (shipped / "h200_sxm" / "vllm-0.26.0").mkdir(parents=True)
    (shipped / "h200_sxm" / "vllm-0.26.0" / "profile.json").write_text(replace(MEASURED, source="shipped").to_json())

    done = fp8plan(*CALIBRATE, "--fit-only", "--output", folder)
    assert done.code == 0
    header, row = (next(x for x in done.out.splitlines() if x.strip().startswith(y)) for y in ("kernel", "engine"))
    assert header.split() == ["kernel", "rows", "unseen", "before", "after", "held", "out", "worst"]
    before, after = (float(x.rstrip("%")) for x in row.split()[4:6])
    assert after < 2 < before
    assert "2 rollouts of 1 engines, measured on GPU-synthetic" in " ".join(done.out.split())
    assert done.err.splitlines()[-1] == f"written: {folder / 'profile.json'}"

    def source() -> str:
        answer = json.loads(fp8plan("plan", TINY, *PLAN[2:], "--json", "--strict").out)
        return str(answer["profile"]["source"])

    assert source() == "shipped"
    monkeypatch.setenv("FP8PLAN_PROFILES", str(own))
    assert "GPU-synthetic" in source()
    listed = json.loads(fp8plan("profiles", "--json").out)
    assert [x["path"] for x in listed][:2] == [str(x / "h200_sxm/vllm-0.26.0/profile.json") for x in (own, shipped)]


def test_a_calibration_goes_where_plans_look_for_it(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path / "own"))
    monkeypatch.setattr(cells, "engine_version", lambda: "0.26.0")
    asked = []

    def measure(folder: Path, card: Any, grid: str) -> None:
        asked.append((card.name, grid))
        calibrated_by_hand(folder)

    monkeypatch.setattr(calibrate, "measure", measure)
    assert fp8plan(*CALIBRATE, "--grid", "full").code == 0
    assert asked == [("h200_sxm", "full")]
    written = library.profile_path(tmp_path / "own", "h200_sxm", "0.26.0")
    assert Profile.from_json(written.read_text()).kind == "calibrated"
    assert fp8plan(*PLAN, "--strict").code == 0


def test_a_calibration_without_a_gpu_says_so(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    refused(fp8plan("calibrate"), "gpu 'auto' needs nvidia-ml-py", "h200_sxm")
    monkeypatch.setattr(cells, "engine_version", lambda: "0.26.0")
    monkeypatch.setattr(calibrate.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 2))
    done = fp8plan(*CALIBRATE, "--output", tmp_path / "new")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith("fp8plan: gemm could not be measured (exit status 2); the notes above")
    assert not (tmp_path / "new" / "profile.json").exists()


def test_a_calibration_without_vllm_says_what_to_install(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise machine.PackageNotFoundError(package)

    monkeypatch.setattr(machine, "version", absent)
    refused(fp8plan(*CALIBRATE), "vLLM is not installed", "pip install 'fp8plan[vllm]'")


def test_a_fit_needs_measurements_of_one_version(fp8plan: Callable[..., Done], tmp_path: Path) -> None:
    refused(fp8plan(*CALIBRATE, "--fit-only"), "--fit-only needs --output")
    command = f"fp8plan calibrate --output {tmp_path}"
    refused(fp8plan(*CALIBRATE, "--fit-only", "--output", tmp_path), "no measured rollouts", command)
    folder = calibrated_by_hand(tmp_path / "two", engine_version="0.27.0")
    refused(fp8plan(*CALIBRATE, "--fit-only", "--output", folder), "vLLM 0.26.0 and 0.27.0", "move")
    refused(fp8plan(*CALIBRATE, "--grid", "huge"), "--grid", "quick", "fp8plan calibrate --help")


def first_choice(done: Done) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(done.out)["choices"][0]
    return choice


# Bad records of `validate`: changes to RECORD, and what the line must hold beside the line's number.
BAD_RECORDS: dict[str, tuple[str | dict[str, Any], tuple[str, ...]]] = {
    "cut off": ('{"model": ', ("not JSON",)),
    "a list": ("[1]", ("list", "JSON object")),
    "no seconds": ({"seconds": None}, ("lacks seconds", "response_lengths")),
    "negative seconds": ({"seconds": -1}, ("seconds is -1", "above 0")),
    "NaN seconds": ({"seconds": float("nan")}, ("NaN", "finite")),
    "seconds in words": ({"seconds": "fast"}, ("seconds is 'fast'", "a number")),
    "NaN anywhere": ({"reward": float("nan")}, ("NaN", "null")),
    "negative length": ({"response_lengths": [1, -2, 3]}, ("response_lengths", "-2", "1 to ")),
    "NaN length": ({"prompt_lengths": [1, float("nan"), 3]}, ("NaN",)),
    "fractional length": ({"prompt_lengths": [1, 1.5, 3]}, ("prompt_lengths", "1.5", "whole")),
    "no lengths": ({"prompt_lengths": [], "response_lengths": []}, ("prompt_lengths", "empty")),
    "fewer responses": ({"response_lengths": [3]}, ("3 prompt_lengths", "1 response_lengths", "as many")),
    "fewer ids": ({"prompt_ids": [1, 1]}, ("2 prompt_ids", "3 requests", "one per request")),
    "lengths as text": ({"response_lengths": "abc"}, ("response_lengths", "'abc'", "a list")),
    "beyond max_model_len": ({"max_model_len": 40}, ("70 tokens", "max_model_len is 40", "raise")),
    "unknown GPU": ({"gpu": "h300"}, ("'h300'", "nearest: h800, h200_sxm")),
    "GPU as a number": ({"gpu": 200}, ("gpu is 200", "text")),
    "unknown precision": ({"precision": "int4"}, ("'int4'", "fp8_block")),
    "unknown model": ({"model": "Qwen3-9B"}, ("'Qwen3-9B'", "Qwen/Qwen3-8B")),
    "another engine": ({"engine": "sglang"}, ("'sglang'", "vllm")),
    "FP8 KV on an A100": ({"gpu": "a100", "precision": "fp8_kv"}, ("fp8_kv", "no FP8 tensor cores")),
    "TP does not divide": ({"tensor_parallel": 3}, ("16 attention heads", "1, 2, 4, 8, 16")),
    "half a replica": ({"data_parallel": 1.5}, ("data_parallel is 1.5", "whole number")),
    "no replica": ({"data_parallel": 0}, ("data_parallel_size is 0", "at least 1")),
    "pool in words": ({"kv_cache_tokens": "all"}, ("kv_cache_tokens is 'all'", "whole number")),
    "pool of one block": ({"kv_cache_tokens": 16}, ("kv_cache_tokens is 16", "two blocks")),
    "pool below one request": ({"kv_cache_tokens": 64}, ("70 tokens", "raise num_gpu_blocks")),
}


@pytest.mark.parametrize(("changes", "parts"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_bad_record_is_refused_by_line(
    fp8plan: Callable[..., Done], changes: str | dict[str, Any], parts: tuple[str, ...]
) -> None:
    bad = changes if isinstance(changes, str) else json.dumps(RECORD | changes)
    Path("records.jsonl").write_text(f"{json.dumps(RECORD)}\n\n{bad}\n")
    refused(fp8plan("validate", "records.jsonl", "--json"), "line 3", *parts)


@pytest.mark.parametrize(
    ("content", "part"), [(None, "there is no record file"), (b"", "no records"), (b"\xff\n", "utf-8")]
)
def test_a_record_file_that_cannot_be_used(fp8plan: Callable[..., Done], content: bytes | None, part: str) -> None:
    if content is not None:
        Path("records.jsonl").write_bytes(content)
    refused(fp8plan("validate", "records.jsonl"), "records.jsonl", part)


def test_validate_leaves_out_a_monitors_steps_without_a_rollout(fp8plan: Callable[..., Done]) -> None:
    """Several steps may train on one rollout: only the first of them has its time and its lengths."""
    facts = {name: value for name, value in RECORD.items() if name != "seconds" and "lengths" not in name}
    step = {"step": 1, "metrics": {"rollout_corr/kl": 1e-3}}
    lines = [RECORD | step, facts | step, RECORD, step | {"seconds": None}]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = fp8plan("validate", "records.jsonl", "--json")
    assert len(json.loads(done.out)["records"]) == 2
    assert "note: 2 of 4 lines are left out: a Monitor's steps without a rollout" in done.err.splitlines()
    Path("records.jsonl").write_text(json.dumps(RECORD))
    assert "left out" not in fp8plan("validate", "records.jsonl").err
    for other, part in (
        (step | {"seconds": 1.0}, "line 2 of records.jsonl lacks model"),
        (facts, "line 2 of records.jsonl lacks prompt_lengths, response_lengths, seconds"),
    ):
        Path("records.jsonl").write_text("\n".join(map(json.dumps, (step, other))))
        refused(fp8plan("validate", "records.jsonl"), part)
    Path("records.jsonl").write_text(json.dumps(step))
    refused(fp8plan("validate", "records.jsonl"), "no records, only 1 step", "rollout=")


def test_validate_reads_a_run_that_is_being_written(fp8plan: Callable[..., Done]) -> None:
    """A torn last line is of a process that was killed, or that writes; a broken one before it is an error."""
    record = json.dumps(RECORD)
    Path("records.jsonl").write_text(f"{record}\n{record[:-40]}")
    done = fp8plan("validate", "records.jsonl", "--json")
    assert len(json.loads(done.out)["records"]) == 1
    assert "note: line 2, the last one, is left out: it breaks off" in done.err.splitlines()
    Path("records.jsonl").write_text(record[:-1] + ",}")  # nothing else is there: not a run, but one that is wrong
    refused(fp8plan("validate", "records.jsonl"), "line 1 of records.jsonl is not JSON")
    Path("records.jsonl").write_text(f"{record}\n{record[:-40]}\n{record}\n")
    refused(fp8plan("validate", "records.jsonl"), "line 2 of records.jsonl is not JSON")


def test_validate_refuses_another_version_under_strict(fp8plan: Callable[..., Done]) -> None:
    Path("records.jsonl").write_text(json.dumps(RECORD | {"engine_version": "0.31.0"}))
    assert fp8plan("validate", "records.jsonl").code == 0
    refused(fp8plan("validate", "records.jsonl", "--strict"), "line 1", "0.31.0", "leave --strict out")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan"], ("fp8plan plan --help",)),
        (["plan", MODEL], ("--gpu", "fp8plan plan --help")),
        ([*PLAN, "--wrong"], ("--wrong", "fp8plan plan --help")),
        ([*PLAN, "--prompts", "1.5"], ("--prompts", "integer", "fp8plan plan --help")),
        (["guess"], ("guess", "fp8plan --help")),
        (["validate"], ("fp8plan validate --help",)),
    ],
)
def test_a_usage_error_is_one_clear_line(
    fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]
) -> None:
    refused(fp8plan(*words), *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("plan", "validate", "profiles", "models")),
        (["--help"], ("plan", "validate", "profiles", "models")),
        (["plan", "--help"], ("--gpu", "--precision", "--emit")),
    ],
)
def test_help_goes_to_stdout(fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]) -> None:
    done = fp8plan(*words)
    assert (done.code, done.err) == (0, "")
    assert all(part in done.out for part in parts)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), commands(typer.main.get_command(cli.app)), ids=lambda x: str(x))
def test_help_at_80_columns_breaks_no_option_name_and_no_default(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    done = fp8plan(*path, "-h")
    assert (done.code, done.err) == (0, "")
    assert done.out == fp8plan(*path, "--help").out
    assert done.out.isascii()
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    words = done.out.split()
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name in [word.strip(",") for word in words], name
        default, shown = parameter.default, parameter.show_default
        if isinstance(shown, str):
            assert shown in " ".join(words), parameter.name
        elif isinstance(default, (str, int, float)) and not isinstance(default, bool):
            text = getattr(default, "value", default)
            assert {f"{text}]", f"{text};"} & set(words), parameter.name
    assert not any("..." in line for line in lines if path == () and not line.startswith("Usage"))


def test_every_way_to_install_an_extra_is_whole(fp8plan: Callable[..., Done]) -> None:
    assert "pip install 'fp8plan[aic]'" in fp8plan("profiles", "import-aic", "--help").out
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "fp8plan").rglob("*.py")]:
        text = path.read_text()
        for found in re.finditer(r"fp8plan\[(\w+)\]", text):
            assert found[1] in extras, path
            before, after = text[: found.start()], text[found.end() :]
            assert before.endswith("pip install '"), path
            assert after.startswith("'"), path


def test_the_version_is_that_of_the_package(fp8plan: Callable[..., Done]) -> None:
    assert fp8plan("--version") == Done(0, f"fp8plan {package.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "fp8plan", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"fp8plan {package.__version__}\n")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == package.__version__


def test_bash_completes_commands_and_options() -> None:
    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_FP8PLAN_COMPLETE": "complete_bash"}
        command = [sys.executable, "-m", "fp8plan"]
        done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, timeout=60)
        return done.stdout.split()

    assert complete("fp8plan pl") == ["plan"]
    assert complete("fp8plan plan --max-num-s") == ["--max-num-seqs"]


def test_own_profiles_that_are_not_there_are_told(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8PLAN_PROFILES", str(tmp_path / "typo"))
    Path("records.jsonl").write_text(json.dumps(RECORD))
    for words in (PLAN, ["profiles"], ["validate", "records.jsonl"]):
        refused(fp8plan(*words), f"FP8PLAN_PROFILES is {tmp_path / 'typo'}", "no such folder", "unset FP8PLAN_PROFILES")
    (tmp_path / "typo").mkdir()
    for words in (PLAN, ["profiles"], ["validate", "records.jsonl"]):
        (line,) = [line for line in fp8plan(*words).err.splitlines() if "FP8PLAN_PROFILES" in line]
        assert line.startswith(f"note: FP8PLAN_PROFILES is {tmp_path / 'typo'}, which holds no profile")


def test_the_prompts_of_a_trace_are_used_and_said(fp8plan: Callable[..., Done]) -> None:
    Path("trace.jsonl").write_text("\n".join(f'{{"prompt_length": {n}, "response_length": 30}}' for n in (5, 5, 9, 9)))
    words = ["plan", MODEL, "--gpu", "h200", *SMALL[:4], "--response-lengths", "trace.jsonl", "--json"]
    done = fp8plan(*words)
    assert json.loads(done.out)["workload"]["max_prompt_tokens"] == 9
    assert "note: prompt lengths are those of trace.jsonl, too" in done.err
    assert "prompt lengths are those of trace.jsonl, too" in json.loads(done.out)["warnings"]
    assert [f"note: {warning}" for warning in json.loads(done.out)["warnings"]] == done.err.splitlines()
    given = fp8plan(*words, "--prompt-lengths", "fixed:16")
    assert json.loads(given.out)["workload"]["max_prompt_tokens"] == 16
    assert "note: trace.jsonl has prompt_length, too, which is not read" in given.err


def test_the_installed_command_behaves_the_same() -> None:
    command = [sys.executable, "-m", "fp8plan.cli"]
    good, bad = (
        subprocess.run([*command, *PLAN, "--json", "--precision", name], capture_output=True, text=True, timeout=60)
        for name in ("bf16", "int4")
    )
    assert good.returncode == 0
    assert [c["precision"] for c in json.loads(good.stdout)["choices"]] == ["bf16"]
    refused(Done(bad.returncode, bad.stdout, bad.stderr), "'int4'")


# Good input

PLAN_KEYS = (
    "schema_version fp8plan_version model gpu profile limits workload seed choices chosen thresholds reasons warnings "
    "budget kv_scales"
).split()
CHOICE_KEYS = (
    "precision tensor_parallel data_parallel available reason makespan_s makespan_low_s makespan_high_s "
    "output_tokens_per_s speedup speedup_low speedup_high rl_step_s step_speedup kv_cache_tokens preemptions "
    "tail_fraction kl_k3 kl_k3_low kl_k3_high ess_raw clip_fraction seq_reject_fraction risk unit_kv_scales "
    "extrapolated refused_by"
).split()


def test_plan_json_has_the_documented_shape_and_stdout_holds_nothing_else(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan(*PLAN, "--json", "--seed", "3")
    assert done.code == 0
    answer = json.loads(done.out)
    assert list(answer) == PLAN_KEYS
    assert list(answer["profile"]) == ["kind", "engine_version", "source"]
    assert list(answer["limits"]) == [f.name for f in fields(EngineLimits)]
    assert answer["seed"] == 3
    assert type(answer["chosen"]) is int
    assert answer["choices"][answer["chosen"]]["available"]
    assert [c["precision"] for c in answer["choices"]] == list(PRESETS)
    for choice in answer["choices"]:
        assert list(choice) == CHOICE_KEYS
        assert 0 < choice["makespan_low_s"] < choice["makespan_s"] < choice["makespan_high_s"]
        assert choice["risk"] in ("low", "moderate", "high")
        assert choice["rl_step_s"] is choice["step_speedup"] is None  # no trainer figures were given
        assert choice["extrapolated"] is True  # a datasheet profile measured nothing
    assert all(line.startswith("note: ") for line in done.err.splitlines())
    assert "uncalibrated" in done.err
    assert all(reason.endswith(".") for reason in answer["reasons"])


def test_an_a100_lists_fp8_as_unavailable_with_the_reason(fp8plan: Callable[..., Done]) -> None:
    words = [*PLAN, "--gpu", "a100"]
    answer = json.loads(fp8plan(*words, "--json").out)
    rows = {c["precision"]: c for c in answer["choices"]}
    assert list(rows) == list(PRESETS)
    assert answer["choices"][answer["chosen"]]["precision"] == "bf16"
    for name, row in rows.items():
        assert row["available"] is (name == "bf16")
        if name != "bf16":
            assert "no FP8 tensor cores" in row["reason"]
            given = ("precision", "tensor_parallel", "data_parallel", "available", "reason", "refused_by")
            assert {row[key] for key in CHOICE_KEYS if key not in given} == {None}
    assert not any("not worth it" in reason for reason in answer["reasons"])  # it was never an option
    table = fp8plan(*words).out
    assert "Not available: fp8_block, fp8_kv, fp8_block+fp8_kv: " in table
    assert table.count("no FP8 tensor cores") == 1


def test_the_table_holds_every_precision_the_choice_and_the_reasons(fp8plan: Callable[..., Done]) -> None:
    words = ["plan", "Qwen/Qwen3-8B", *PLAN[2:], "--response-lengths", "fixed:200"]
    answer = json.loads(fp8plan(*words, "--json").out)
    assert answer["chosen"] != 0  # so that the mark is seen to move
    out = fp8plan(*words).out
    chosen = answer["choices"][answer["chosen"]]["precision"]
    marked = [line.split()[1] for line in out.splitlines() if line.startswith("> ")]
    assert marked == [chosen] * 2  # how fast, and how risky
    for name in PRESETS:
        assert sum(line[2:].startswith(name + " ") for line in out.splitlines()) == 2
    for reason in answer["reasons"]:
        assert f"- {reason}" in out


def test_several_layouts_are_named_in_the_table(fp8plan: Callable[..., Done]) -> None:
    out = fp8plan(*PLAN, "--gpus", "2", "--train-s", "5", "--logprob-s", "0").out
    for cell in ("1x2", "2x1", "step s", "2 x h200_sxm"):
        assert cell in out


LOGNORMAL = ["--response-lengths", "lognormal:mean=40,sigma=1,max=200"]


def test_the_seed_decides_the_answer(fp8plan: Callable[..., Done]) -> None:
    runs = [fp8plan(*PLAN, *LOGNORMAL, "--json", "--seed", seed).out for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    makespans = [json.loads(out)["choices"][0]["makespan_s"] for out in runs]
    assert makespans[1] != makespans[2]


def test_every_limit_reaches_the_plan(fp8plan: Callable[..., Done]) -> None:
    """By its own option: no two are swapped, none is lost."""
    words = (
        "--gpu-memory-utilization 0.5 --max-model-len 100 --max-num-seqs 33 --max-num-batched-tokens 77 "
        "--block-size 32 --num-gpu-blocks 900 --no-prefix-caching --no-async-scheduling --enforce-eager "
        "--tensor-parallel-size 2 --data-parallel-size 3"
    )
    limits = json.loads(fp8plan(*PLAN, *words.split(), "--json").out)["limits"]
    assert limits == {
        "gpu_memory_utilization": 0.5,
        "max_model_len": 100,
        "max_num_seqs": 33,
        "max_num_batched_tokens": 77,
        "block_size": 32,
        "num_gpu_blocks": 900,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "scheduler_reserve_full_isl": True,
    }


def test_trainer_options_reach_the_step_time(fp8plan: Callable[..., Done]) -> None:
    def beyond_the_rollout(*words: object) -> float:
        given = "".join(str(word) for word in words)
        free = [word for part in ("train", "logprob") if f"--{part}" not in given for word in (f"--{part}-s", 0)]
        choice = first_choice(fp8plan(*PLAN, "--json", "--precision", "bf16", *words, *free))
        return float(choice["rl_step_s"]) - float(choice["makespan_s"])

    sync = beyond_the_rollout("--train-s", 0)
    assert beyond_the_rollout("--train-s", 5) == pytest.approx(5 + sync)
    assert beyond_the_rollout("--logprob-s", 3) == pytest.approx(3 + sync)
    tokens = 2 * 2 * (16 + 32)
    assert beyond_the_rollout("--train-tokens-per-s", 10) == pytest.approx(tokens / 10 + sync)
    assert beyond_the_rollout("--logprob-tokens-per-s", 20) == pytest.approx(tokens / 20 + sync)
    assert beyond_the_rollout("--sync-gb-per-s", 100) == pytest.approx(sync / 2)  # the default is 50


def test_one_run_writes_all_outputs(fp8plan: Callable[..., Done]) -> None:
    files = ["--json", "plan.json", "--emit", "verl=verl.args", "--emit", "vllm=vllm.json", "--plot", "plan.png"]
    done = fp8plan(*PLAN, *files)
    assert done.code == 0
    assert "KL k3" in done.out  # the table
    names = ["plan.json", "plan.png", "verl.args", "vllm.json"]
    assert sorted(x for x in done.err.splitlines() if x.startswith("written: ")) == [f"written: {x}" for x in names]
    assert sorted(path.name for path in Path.cwd().iterdir()) == names
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    for name, target in (("verl.args", "verl"), ("vllm.json", "vllm")):
        saved = fp8plan("emit", "plan.json", target)
        assert (saved.code, saved.err) == (0, "")
        assert saved.out == Path(name).read_text()
    assert fp8plan(*PLAN, "--json", "--emit", "verl=again.args").out == Path("plan.json").read_text()
    assert Path("again.args").read_text() == Path("verl.args").read_text()


def test_json_alone_prints_wherever_it_stands(fp8plan: Callable[..., Done]) -> None:
    first, last, dash, joined = (
        fp8plan("plan", *words).out
        for words in (
            ["--json", *PLAN[1:]],
            [*PLAN[1:], "--json"],
            [*PLAN[1:], "--json", "-", "--seed", "0"],
            [*PLAN[1:], "--json=-"],
        )
    )
    assert json.loads(first)["model"] == MODEL
    assert first == last == dash == joined
    assert fp8plan(*PLAN, "--json=any name").code == 0
    assert Path("any name").read_text() == first


def test_what_fails_leaves_every_file_as_it_was(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by a target, by a package that is missing, by a full disk: an older file stays, no other comes."""
    Path("plan.json").write_text("older")
    Path("plan.json").chmod(0o640)
    both = ["--json", "plan.json", "--emit", "verl=verl.args"]
    refused(fp8plan(*PLAN, *both, "--precision", "fp8_block", "--emit", "trl=trl.json"), "TRL cannot sync fp8_block")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        refused(fp8plan(*PLAN, *both, "--plot", "plan.png"), "pip install 'fp8plan[report]'")
    with monkeypatch.context() as patch:

        def full(path: Path, *_: object, **__: object) -> None:
            path.touch()
            raise OSError(28, "No space left on device")

        patch.setattr(Path, "write_text", full)
        refused(fp8plan(*PLAN, *both), "cannot write verl.args", "No space left on device", "nothing was written")
        refused(fp8plan(*PLAN, "--plot", "plan.html"), "cannot write plan.html: No space left on device; nothing was")
    assert [path.name for path in Path.cwd().iterdir()] == ["plan.json"]
    assert Path("plan.json").read_text() == "older"
    assert fp8plan(*PLAN, *both).code == 0
    assert json.loads(Path("plan.json").read_text())["model"] == MODEL
    assert Path("plan.json").stat().st_mode & 0o777 == 0o640
    assert fp8plan(*PLAN, "--emit", "verl=/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


def test_what_has_been_replaced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    real = Path.replace

    def replace_one(draft: Path, target: Path) -> Path:
        if target.name == "second":
            raise OSError(5, "Input/output error")
        return real(draft, target)

    monkeypatch.setattr(Path, "replace", replace_one)
    with pytest.raises(ConfigError, match=f"cannot write {second}: Input/output error; already written: {first}$"):
        outputs.write({first: outputs.text("1"), second: outputs.text("2")})
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="nothing was written"):
        outputs.write({second: outputs.text("2")})


def test_what_cannot_be_written_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "absent" / "plan.json")
    with pytest.raises(ConfigError, match=rf"cannot write {dangling}: there is no folder {tmp_path / 'absent'}$"):
        outputs.check([("--json", str(dangling))])
    with pytest.raises(ConfigError, match="File name too long"):
        outputs.check([("--json", str(tmp_path / ("n" * 256)))])
    (tmp_path / "old").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"permission denied in {tmp_path}; give a file"):
        outputs.check([("--json", str(tmp_path / "old"))])


@pytest.mark.parametrize("name", ["n" * 250, "n" * 245 + ".json", "a." + "n" * 250, "n" * 250 + ".html"])
def test_a_long_name_and_a_link_to_come_are_written(tmp_path: Path, name: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name)
    outputs.check([("--json", str(link))])
    outputs.write({str(link): outputs.text("content")})
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["link", name])
    assert (tmp_path / name).read_text() == "content\n"


def test_the_page_shows_the_settings_of_the_same_command(fp8plan: Callable[..., Done]) -> None:
    words = [*LARGE, "--prompts", "2", "--samples", "2", "--emit", "verl=verl.args", "--plot", "plan.html"]
    for more in (["--kv-scales", "calibrated"], ["--kv-scales", "unit", "--accept", "high"], []):
        assert fp8plan(*words, *more).code == 0
        assert Path("verl.args").read_text().strip() in html.unescape(Path("plan.html").read_text())


def test_a_saved_plan_is_emitted(fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8plan(*PLAN, "--json", "plan.json").code == 0
    kv, number = (fp8plan("emit", "plan.json", "vllm", "--choice", name).out for name in ("fp8_kv", 2))
    assert kv == number
    assert json.loads(kv)["engine_args"]["kv_cache_dtype"] == "fp8"
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path("plan.json").read_text()))
    done = fp8plan("emit", "-", "verl", "-o", "verl.args")
    assert (done.code, done.out, done.err) == (0, "", "written: verl.args\n")
    assert "actor_rollout_ref.rollout.name=vllm" in Path("verl.args").read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path("plan.json").read_text()))
    assert fp8plan("emit", "-", "verl").out == Path("verl.args").read_text()
    Path("torn.json").write_text(Path("plan.json").read_text()[:-50])
    for words, parts in {
        ("absent.json", "verl"): ("cannot read absent.json: No such file", "- for stdin"),
        (".", "verl"): ("cannot read .: Is a directory",),
        ("torn.json", "verl"): ("the plan is not JSON", "fp8plan plan MODEL --gpu GPU --json plan.json"),
        ("plan.json", "slime"): ("'slime'", "vllm, verl, trl"),
        ("plan.json", "verl", "--choice", "fp8"): ("no 'fp8'", "fp8_block+fp8_kv"),
        ("plan.json", "verl", "--choice", "9"): ("no choice 9", "0 to 3"),
        ("plan.json", "verl", "--choice", "9" * 5000): ("the plan has no '999", "fp8_block+fp8_kv"),
        ("plan.json", "verl", "--kv-scales", "x"): ("'x'", "calibrated, unit"),
        ("plan.json", "verl", "-o", "absent/x"): ("absent/x", "no folder"),
        ("plan.json", "verl", "-o", "./plan.json"): ("--output ./plan.json is the plan itself",),
        ("plan.json", "trl", "--choice", "fp8_block"): ("TRL cannot sync",),
        ("plan.json",): ("fp8plan emit --help",),
    }.items():
        refused(fp8plan("emit", *words), *parts)


LARGE = ["plan", "Qwen/Qwen3-32B", "--gpu", "h200", "--response-lengths", "fixed:9000", "--precision", "fp8_kv"]
LARGE += ["--precision", "bf16"]


def test_settings_are_planned_for_the_kv_scales_that_their_target_leaves(fp8plan: Callable[..., Done]) -> None:
    """FP8 KV of Qwen3-32B is of moderate risk with calibrated scales, and of high risk at 1.0."""
    assert fp8plan(*LARGE, "--json", "plan.json").code == 0
    saved = json.loads(Path("plan.json").read_text())
    assert (saved["kv_scales"], saved["budget"]["accept"]) == ("calibrated", "moderate")
    assert saved["choices"][saved["chosen"]]["precision"] == "fp8_kv"
    refused(fp8plan("emit", "plan.json", "verl"), "fp8_kv at 1.0", "risk is high", "accepts moderate", "unit")
    assert "is yours" in fp8plan("emit", "plan.json", "verl", "--kv-scales", "calibrated").out

    words = [*LARGE, "--json", "plan.json"]
    done = fp8plan(*words, "--emit", "verl")
    assert "kv_cache_dtype=fp8" not in done.out
    assert "note: K and V scales are 1.0, as --emit's targets leave them" in done.err
    saved = json.loads(Path("plan.json").read_text())
    assert (saved["kv_scales"], saved["choices"][saved["chosen"]]["precision"]) == ("unit", "bf16")
    told = fp8plan(*words, "--emit", "verl", "--kv-scales", "calibrated")
    assert "kv_cache_dtype=fp8" in told.out
    assert "note: K and V" not in told.err
    accepted = fp8plan(*words, "--emit", "verl", "--accept", "high")
    assert "kv_cache_dtype=fp8" in accepted.out
    assert "risk high" in accepted.out


def test_kv_scales_reach_the_risk(fp8plan: Callable[..., Done]) -> None:
    words = [*PLAN, "--json", "--precision", "fp8_kv", "--kv-scales"]
    calibrated, unit = (first_choice(fp8plan(*words, scales)) for scales in ("calibrated", "unit"))
    assert unit["kl_k3_high"] > calibrated["kl_k3_high"]


def test_emit_prints_what_its_target_reads(fp8plan: Callable[..., Done]) -> None:
    vllm = json.loads(fp8plan(*PLAN, "--emit", "vllm", "--precision", "fp8_block+fp8_kv").out)
    assert vllm["engine_args"]["kv_cache_dtype"] == "fp8"
    assert vllm["engine_args"]["quantization_config"]["linear"] == "fp8_per_block"
    assert shlex.split(vllm["command"])[1:4] == ["vllm", "serve", MODEL]
    trl = json.loads(fp8plan(*PLAN, "--emit", "trl", "--precision", "fp8_kv").out)
    assert trl["grpo_config"]["num_generations"] == 2
    verl = fp8plan(*PLAN, "--emit", "verl", "--precision", "fp8_block").out
    overrides = dict(word.split("=", 1) for word in shlex.split(verl.replace("\\\n", " "), comments=True))
    assert overrides["actor_rollout_ref.rollout.quantization"] == "fp8"
    assert overrides["actor_rollout_ref.rollout.n"] == "2"


@pytest.mark.parametrize(("model", "size"), [("Qwen/Qwen3-4B", 8), ("Qwen/Qwen3-30B-A3B", 4)])
def test_what_is_emitted_for_verl_is_what_verl_can_start(fp8plan: Callable[..., Done], model: str, size: int) -> None:
    words = ["plan", model, "--gpu", "h200", *SMALL, "--tensor-parallel-size", str(size), "--accept", "high"]
    done = fp8plan(*words, "--emit", "verl")
    assert done.code == 0
    assert "actor_rollout_ref.rollout.quantization=null" in done.out
    refused = fp8plan(*words, "--emit", "verl", "--precision", "fp8_block")
    assert refused.code == 2
    assert "and with FP8 weights verl takes multiples of 128" in refused.err


def test_plot_writes_a_picture_beside_the_answer(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan(*PLAN, "--json", "--plot", "picture.png")
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads(done.out)["model"] == MODEL


def test_a_local_folder_and_a_trace_work(fp8plan: Callable[..., Done]) -> None:
    from fp8plan.model.configs import bundled_configs

    folder = Path("models/mine").absolute()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(bundled_configs()[MODEL]))
    Path("trace.jsonl").write_text("30\n40\n50\n60\n")
    trace = ["--response-lengths", "trace.jsonl"]
    bundled, local = (json.loads(fp8plan("plan", m, *PLAN[2:], *trace, "--json").out) for m in (MODEL, folder))
    assert local["model"] == str(folder)  # so that an engine finds it
    assert bundled["model"] == MODEL
    assert local["choices"] == bundled["choices"]
    assert local["workload"]["max_response_tokens"] == 60
    assert local["workload"]["response_tokens"] == 180


def test_validate_json_has_the_documented_shape(fp8plan: Callable[..., Done]) -> None:
    lines = [RECORD, RECORD | {"precision": "fp8_block", "seconds": 0.8, "note": "kept"}]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, lines)))
    answer = json.loads(fp8plan("validate", "records.jsonl", "--json").out)
    assert list(answer) == [
        "records", "groups", "makespan_mape", "makespan_worst", "speedup_mae_points", "speedup_worst_points",
        "coverage", "interval_median_halfwidth",
    ]  # fmt: skip
    promised = {
        "predicted_s", "predicted_low_s", "predicted_high_s", "error", "predicted_kv_cache_tokens",
        "predicted_preemptions", "group",
    }  # fmt: skip
    assert all(promised <= row.keys() for row in answer["records"])
    assert answer["records"][1]["note"] == "kept"
    assert [len(group["speedups"]) for group in answer["groups"]] == [1]
    table = fp8plan("validate", "records.jsonl").out
    for text in ("fp8_block", "speed-up over bf16", "MAPE", "90% interval"):
        assert text in table


def test_an_import_without_the_tables_says_what_to_install(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    refused(fp8plan("profiles", "import-aic", "--gpu", "h100"), "aiconfigurator-core", "pip install 'fp8plan[aic]'")
    assert "import-aic" in fp8plan("profiles", "--help").out


def test_profiles_and_models_are_listed(fp8plan: Callable[..., Done]) -> None:
    (sheet,) = json.loads(fp8plan("profiles", "--json").out)
    assert (sheet["kind"], Path(sheet["path"]).name) == ("datasheet", "datasheet.json")
    assert "datasheet.json" in fp8plan("profiles").out
    models = {m["name"]: m for m in json.loads(fp8plan("models", "--json").out)}
    assert models["Qwen/Qwen3-8B"]["num_parameters"] == 8_190_735_360  # model card of Qwen3-8B: 8.2B
    assert "any GPU" in fp8plan("profiles").out
    out = fp8plan("models").out
    assert all(max(out.count(name.rpartition("/")[2]), out.count("-" + name.rpartition("-")[2])) for name in models)
    rows = [line.split() for line in out.splitlines() if "/" in line.split(" ")[0]]
    sizes = [tuple(row[1:]) for row in rows]
    assert len(set(sizes)) == len(sizes) < len(models)  # hub ids of one shape share a row
    assert ["-Base"] in [line.split() for line in out.splitlines()]
