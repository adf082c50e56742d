"""Bad input over all commands and the Python interface: one clear line that says what was given, and no traceback.

`test_cli.py` and the tests of each module hold more of them beside what they belong to; these are the ones that a
user's hand slips into: missing words, folders in the place of files, files of another kind, numbers as text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from typed import MODEL, PLAN, SMALL, replacing

import fp8plan
from fp8plan import cli
from fp8plan.version import DEFAULT_VERSION

RECORD: dict[str, Any] = command.RECORD | {
    "prompt_lengths": [16, 16],
    "response_lengths": [32, 40],
}
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def files(folder: Path) -> None:
    """Write the files that the commands below are given."""
    (folder / "folder.jsonl").mkdir()
    (folder / "folder.json").mkdir()
    (folder / "folder.png").mkdir()
    (folder / "folder.html").mkdir()
    (folder / "empty.jsonl").write_text("")
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 8)
    (folder / "binary.parquet").write_bytes(bytes(range(256)) * 8)
    (folder / "numbers.jsonl").write_text("1\n2\n")
    (folder / "null.jsonl").write_text("null\n")
    (folder / "lists.jsonl").write_text("[1, 2]\n")
    (folder / "other.json").write_text('{"hello": "world"}')
    (folder / "other.jsonl").write_text('{"hello": "world"}\n')
    (folder / "monitor.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    (folder / "lengths.csv").write_text("response_length\n5\n")
    for name, change in RECORDS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(RECORD | change) + "\n")
    for name, change in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG | change))
    (folder / "nested" / "config.json").mkdir(parents=True)
    import pandas as pd

    pd.DataFrame({"tokens": [1, 2]}).to_parquet(folder / "other.parquet")


RECORDS: dict[str, dict[str, Any]] = {
    "no_seconds": {"seconds": None},
    "nan_seconds": {"seconds": float("nan")},
    "negative_length": {"response_lengths": [32, -4]},
    "uneven": {"response_lengths": [32]},
    "text_lengths": {"response_lengths": "32 40"},
    "other_gpu": {"gpu": "h300"},
    "other_precision": {"precision": "int4"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "text_size": {"hidden_size": "large"},
    "no_layers": {"num_hidden_layers": 0},
    "endless_layers": {"num_hidden_layers": 10**12},
    "endless_width": {"hidden_size": 10**400},
    "listed_width": {"hidden_size": [1024]},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
    "uneven_heads": {"num_key_value_heads": 7},
    "odd_heads": {"head_dim": 7},
    "no_number": {"rms_norm_eps": float("nan")},
    "short_context": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "negative_vocabulary": {"vocab_size": -1},
    "null_heads": {"num_attention_heads": None},
    "unknown_type": {"model_type": "wonderformer"},
}

# Name -> (what is typed, what the line must hold).
COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    # no or wrong words
    "no model": (["plan"], ("Missing argument", "fp8plan plan --help")),
    "no GPU": (["plan", MODEL], ("--gpu", "fp8plan plan --help")),
    "empty model": (["plan", "", "--gpu", "h200"], ("model is ''", "give a hub id, such")),
    "empty GPU": (["plan", MODEL, "--gpu", ""], ("unknown GPU ''", "known: h200_sxm, h100_sxm, h800, h100_nvl")),
    "unknown command": (["plna", MODEL], ("No such command 'plna'. Did you mean 'plan'?", "type: fp8plan --help")),
    "unknown option": (
        [*PLAN, "--promtps", "3"],
        (
            "No such option: --promtps (Possible options: --plot, --prompt-lengths, --prompts)",
            "type: fp8plan plan --help",
        ),
    ),
    "option without value": ([*PLAN, "--seed"], ("Option '--seed' requires an argument", "type: fp8plan --help")),
    "one word too many": (["models", "all"], ("Got unexpected extra argument(s) (all)", "type: fp8plan models --help")),
    # numbers that are none
    "prompts in words": (
        [*PLAN, "--prompts", "many"],
        (
            "Invalid value for '--prompts': Input should be a valid integer",
            "(given: 'many')",
            "type: fp8plan plan --help",
        ),
    ),
    "half a prompt": (
        [*PLAN, "--prompts", "1.5"],
        (
            "Invalid value for '--prompts': Input should be a valid integer",
            "(given: '1.5')",
            "type: fp8plan plan --help",
        ),
    ),
    "prompts beyond all": ([*PLAN, "--prompts", "1" + "0" * 30], ("1" + "0" * 30, "allowed")),
    "samples beyond all": ([*PLAN, "--samples", "1000000000"], ("1000000000", "allowed")),
    "negative max_model_len": ([*PLAN, "--max-model-len", "-5"], ("max_model_len", "-5")),
    "no slots": ([*PLAN, "--max-num-seqs", "0"], ("max_num_seqs", "0")),
    "no budget": ([*PLAN, "--max-num-batched-tokens", "0"], ("max_num_batched_tokens", "0")),
    "odd block": ([*PLAN, "--block-size", "17"], ("block_size", "17")),
    "no memory": ([*PLAN, "--gpu-memory-utilization", "0"], ("gpu_memory_utilization", "0")),
    "hardly any memory": (
        [*PLAN, "--gpu-memory-utilization", "0.001"],
        (
            "Qwen/Qwen3-0.6B in fp8_block does not fit NVIDIA H200 with tensor_parallel_size 1",
            "try a higher gpu_memory_utilization",
        ),
    ),
    "infinite training": (
        [*PLAN, "--train-s", "inf", "--logprob-s", "1"],
        ("train_s is inf", "allowed: a number of seconds"),
    ),
    "negative bandwidth": (
        [*PLAN, "--learning-rate", "1e-6", "--link", "-3GB/s"],
        ("link is '-3GB/s'", "type: 25Gb/s"),
    ),
    "GPUs below one": (
        [*PLAN, "--gpus", "-1"],
        ("gpus is -1", "allowed: a whole number of at least 1, or leave it out"),
    ),
    "GPUs beyond all": (
        [*PLAN, "--gpus", "1000000000000"],
        ("1000000000000 replicas for 4 requests leave 999999999996 without any", "allowed: at most 4 replicas"),
    ),
    "replicas beyond all": (
        [*PLAN, "--data-parallel-size", "1000000000"],
        ("1000000000 replicas for 4 requests leave 999999996 without any", "allowed: at most 4 replicas"),
    ),
    "more replicas than requests": (
        [*PLAN, "--data-parallel-size", "5"],
        ("5 replicas for 4 requests leave 1 without any", "allowed: at most 4 replicas"),
    ),
    "TP beyond all": (
        [*PLAN, "--tensor-parallel-size", "1000000"],
        (
            "tensor_parallel_size 1000000 does not divide Qwen/Qwen3-0.6B: it has 16 attention heads",
            "allowed: 1, 2, 4, 8",
        ),
    ),
    "KV blocks beyond the GPU": ([*PLAN, "--num-gpu-blocks", "1000000000000"], ("1000000000000", "num_gpu_blocks")),
    "KV blocks beyond any host": (
        [*PLAN, "--gpu", "cpu", "--engine-version", "0.30.0", "--num-gpu-blocks", "1000000000000"],
        ("1000000000000", "num_gpu_blocks", "at most"),
    ),
    "sigma beyond all": (
        [*PLAN, "--response-lengths", "lognormal:mean=5,sigma=1e308,max=9"],
        ("lognormal sigma is 1e+308", "allowed: at least 0, at"),
    ),
    # versions and precisions
    "version in words": (
        [*PLAN, "--engine-version", "newest"],
        ("engine_version is 'newest'", "allowed: a version of vllm", DEFAULT_VERSION),
    ),
    "empty version": (
        [*PLAN, "--engine-version", ""],
        ("engine_version is ''", "allowed: a version of vllm", DEFAULT_VERSION),
    ),
    "empty precision": (
        [*PLAN, "--precision", ""],
        ("unknown precision ''", "allowed: bf16, fp8_block, fp8_kv, fp8_block+fp8_kv"),
    ),
    # lengths
    "lognormal of nothing": ([*PLAN, "--response-lengths", "lognormal:"], ("'lognormal:'", "mean=TOKENS")),
    "mean twice": (
        [*PLAN, "--response-lengths", "lognormal:mean=5,mean=6,sigma=1,max=9"],
        ("mean", "lognormal:mean=5,mean=6"),
    ),
    "lengths in CSV": ([*PLAN, "--response-lengths", "lengths.csv"], ("lengths.csv", ".jsonl or .parquet")),
    "lengths in a folder": (
        [*PLAN, "--response-lengths", "folder.jsonl"],
        (
            "cannot read the trace file folder.jsonl: [Errno 21] Is a directory: 'folder.jsonl'",
            "give a file of JSON lines",
        ),
    ),
    "broken parquet": ([*PLAN, "--response-lengths", "binary.parquet"], ("binary.parquet", "parquet")),
    "parquet of other columns": ([*PLAN, "--response-lengths", "other.parquet"], ("other.parquet", "tokens")),
    "lists of lengths": ([*PLAN, "--response-lengths", "lists.jsonl"], ("lists.jsonl", "row 1", "allowed")),
    "workload of a Monitor without an engine": (
        ["plan", MODEL, "--gpu", "h200", "--workload", "monitor.jsonl"],
        ("no line of monitor.jsonl has prompt_lengths", "a Monitor knows rollouts from its engine"),
    ),
    # machines
    "GPUs in the name": ([*PLAN, "--gpu", "8xH100"], ("gpu is '8xH100'", "type --gpu h100_sxm --gpus 8")),
    "GPUs after the name": ([*PLAN, "--gpu", "RTX 4090 x 2"], ("type --gpu rtx_4090 --gpus 2",)),
    "tokens in thousands": ([*PLAN, "--max-model-len", "32k"], ("given: '32k'); type 32000 or 32768",)),
    "a share in percent": ([*PLAN, "--gpu-memory-utilization", "90%"], ("given: '90%'); type 0.9",)),
    "a comma in a number": ([*PLAN, "--prompts", "1,024"], ("given: '1,024'); type 1024",)),
    "minutes": ([*PLAN, "--train-s", "2min"], ("given: '2min'); type 120",)),
    "lengths in thousands": (
        [*PLAN, "--response-lengths", "8k"],
        ("type 8000 or 8192; allowed: TOKENS or fixed:TOKENS",),
    ),
    "an option of vLLM": ([*PLAN, "--tp", "2"], ("No such option: --tp; type --tensor-parallel-size",)),
    "a model after a flag": (["plan", "--model", MODEL], ("No such option: --model; the model stands alone",)),
    "a GPU that is like none": ([*PLAN, "--gpu", "tpu-v7"], ("unknown GPU 'tpu-v7'; known: h200_sxm",)),
    "a GPU without CUDA": ([*PLAN, "--gpu", "mi300x"], ("does not plan for 'mi300x': ROCm", "allowed: an NVIDIA GPU")),
    "no GPU here": ([*PLAN, "--gpu", "auto"], ("no NVIDIA GPU here", "name one of")),
    "two CPUs": (
        [*PLAN, "--gpu", "cpu", "--tensor-parallel-size", "2"],
        ("tensor_parallel_size is 2, data_parallel_size 1", "allowed on a CPU: 1"),
    ),
    "a cluster of CPUs": (
        [*PLAN, "--gpu", "cpu", "--gpus", "4"],
        ("tensor_parallel_size is 1, data_parallel_size 4", "allowed on a CPU: 1"),
    ),
    "verl on a CPU": (
        [*PLAN, "--gpu", "cpu", "--engine-version", "0.30.0", "--emit", "verl"],
        ("verl runs vLLM on GPUs, and this plan is for a CPU", "allowed: --emit vllm"),
    ),
    # models
    "a folder as config.json": (
        ["plan", "./nested", "--gpu", "h200"],
        ("nested/config.json: cannot be read (Is a directory)", "give a folder with a"),
    ),
    "size in words": (["plan", "./text_size", "--gpu", "h200"], ("text_size/config.json", "hidden_size", "large")),
    "no layers": (["plan", "./no_layers", "--gpu", "h200"], ("config.json", "num_hidden_layers", "0")),
    "layers beyond all": (
        ["plan", "./endless_layers", "--gpu", "h200"],
        ("field 'num_hidden_layers' is 1000000000000", "allowed: at most 10,000"),
    ),
    "width beyond all": (
        ["plan", "./endless_width", "--gpu", "h200"],
        ("field 'hidden_size' is 1000", "allowed: at most 1,000,000,000,000"),
    ),
    "width in a list": (
        ["plan", "./listed_width", "--gpu", "h200"],
        ("field 'hidden_size' is [1024]", "allowed: a whole number of at least 1"),
    ),
    "quantised already": (
        ["plan", "./quantised", "--gpu", "h200"],
        ("already quantised", "name the BF16 model instead", "or give a folder whose config.json lacks"),
    ),
    "beyond the context": (
        ["plan", "nvidia/Nemotron-H-8B-Base-8K", "--gpu", "h200"],
        ("allowed: at most 8192", "shorten --prompt-lengths and --response-lengths"),
    ),
    "heads that no kernel takes": (
        ["plan", "./odd_heads", "--gpu", "h200"],
        ("field 'head_dim' is 7", "allowed: a multiple of 8, or an even number of at least 32"),
    ),
    "a number that is none": (["plan", "./no_number", "--gpu", "h200"], ("field 'rms_norm_eps' is NaN", "a number")),
    "beyond a context that is scaled": (
        ["plan", "./short_context", "--gpu", "h200", *SMALL, "--response-lengths", "fixed:81905"],
        ("max_model_len 81921", "allowed: at most 81920 (max_position_embeddings 40960, times 2 by its linear"),
    ),
    "a name without end": (["plan", "x" * 5000, "--gpu", "h200"], ("(5,000 characters)", "give a hub id, such as")),
    "the home of nobody": (["plan", "~nouser/x", "--gpu", "h200"], ("~nouser/x: there is no such user", "give a hub")),
    "a page of another hub": (
        ["plan", "https://example.org/Qwen/Qwen3-8B", "--gpu", "h200"],
        ("not a page of a model on the hub", "give a hub id, such as Qwen/Qwen3-8B"),
    ),
    "uneven heads": (["plan", "./uneven_heads", "--gpu", "h200"], ("config.json", "7", "16")),
    "negative vocabulary": (["plan", "./negative_vocabulary", "--gpu", "h200"], ("vocab_size", "-1")),
    "heads of null": (["plan", "./null_heads", "--gpu", "h200"], ("num_attention_heads", "whole number")),
    "unknown architecture": (["plan", "./unknown_type", "--gpu", "h200"], ("wonderformer", "qwen3")),
    # outputs
    "JSON to no folder": (
        [*PLAN, "--json", "absent/plan.json"],
        ("cannot write absent/plan.json: there is no folder absent",),
    ),
    "settings to no folder": (
        [*PLAN, "--emit", "vllm=absent/vllm.json"],
        ("cannot write absent/vllm.json: there is no folder absent",),
    ),
    "settings for nobody": ([*PLAN, "--emit", "=vllm.json"], ("target is ''", "allowed: vllm, verl, trl")),
    "settings to nowhere": ([*PLAN, "--emit", "vllm="], ("--emit vllm", "no file")),
    "JSON onto a folder": (
        [*PLAN, "--json", "folder.json"],
        ("cannot write folder.json: it is a folder", "give the name of a"),
    ),
    "picture onto a folder": (
        [*PLAN, "--plot", "folder.png"],
        ("cannot write folder.png: it is a folder", "give the name of a"),
    ),
    # emit
    "emit nothing": (["emit"], ("Missing argument 'PLAN.json'", "type: fp8plan emit --help")),
    "emit from no file": (
        ["emit", "absent.json", "verl"],
        ("cannot read absent.json: No such file or directory", "give a file that can"),
    ),
    "emit from a folder": (
        ["emit", "folder.json", "verl"],
        ("cannot read folder.json: Is a directory", "give a file that can"),
    ),
    "emit from records": (
        ["emit", "other.jsonl", "verl"],
        ("not a plan: it has no schema_version; to make one, type: fp8plan plan MODEL",),
    ),
    "emit from another file": (["emit", "other.json", "verl"], ("other.json", "fp8plan plan")),
    "emit from a binary file": (
        ["emit", "binary.jsonl", "verl"],
        (
            "cannot read binary.jsonl: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte",
            "give a file that can",
        ),
    ),
    # validate
    "validate nothing": (["validate"], ("Missing argument", "fp8plan validate --help")),
    "validate no file": (["validate", "absent.jsonl"], ("there is no record file absent.jsonl",)),
    "validate a folder": (
        ["validate", "folder.jsonl"],
        ("cannot read the record file folder.jsonl: [Errno 21] Is a directory", "give a file of JSON lines"),
    ),
    "validate a binary file": (
        ["validate", "binary.jsonl"],
        ("line 1 of binary.jsonl is not JSON", "mend or delete that line"),
    ),
    "validate an empty file": (["validate", "empty.jsonl"], ("empty.jsonl has no records", "it needs one JSON object")),
    "validate numbers": (["validate", "numbers.jsonl"], ("numbers.jsonl", "line 1")),
    "validate other objects": (
        ["validate", "other.jsonl"],
        (
            "line 1 of other.jsonl lacks model, gpu, engine_version",
            "a record needs model, gpu",
        ),
    ),
    "validate null": (["validate", "null.jsonl"], ("line 1 of null.jsonl is null; allowed: a JSON object",)),
    "no seconds": (["validate", "no_seconds.jsonl"], ("no_seconds.jsonl", "seconds")),
    "seconds that are no number": (["validate", "nan_seconds.jsonl"], ("nan_seconds.jsonl", "seconds", "nan")),
    "negative response": (["validate", "negative_length.jsonl"], ("negative_length.jsonl", "-4")),
    "uneven lengths": (["validate", "uneven.jsonl"], ("uneven.jsonl", "response_lengths")),
    "lengths as text": (["validate", "text_lengths.jsonl"], ("text_lengths.jsonl", "response_lengths")),
    "a record of an unknown GPU": (["validate", "other_gpu.jsonl"], ("other_gpu.jsonl", "h300")),
    "a record of an unknown precision": (
        ["validate", "other_precision.jsonl"],
        ("line 1: unknown precision 'int4'", "allowed: bf16, fp8_block, fp8_kv, fp8_block+fp8_kv"),
    ),
    # monitor and report
    "watch a folder": (
        ["monitor", "--once", "folder.jsonl"],
        ("cannot read folder.jsonl: Is a directory", "give the file of a"),
    ),
    "watch no file": (
        ["monitor", "--once", "absent.jsonl"],
        ("cannot read absent.jsonl: No such file or directory", "give the file of a"),
    ),
    "watch a binary file": (
        ["monitor", "--once", "binary.jsonl"],
        ("binary.jsonl has no record of a Monitor", "give the run file of"),
    ),
    "watch other objects": (
        ["monitor", "--once", "other.jsonl"],
        ("other.jsonl has no record of a Monitor", "give the run file of"),
    ),
    "watch no step": (
        ["monitor", "--steps", "0", "other.jsonl"],
        (
            "Invalid value for '--steps': Input should be greater than or equal to 1 (given: '0')",
            "type: fp8plan monitor --help",
        ),
    ),
    "watch without a pause": (
        ["monitor", "--every", "0", "other.jsonl"],
        (
            "Invalid value for '--every': Input should be greater than or equal to 0.05 (given: '0')",
            "type: fp8plan monitor --help",
        ),
    ),
    "report no file": (
        ["report", "absent.jsonl"],
        ("cannot read absent.jsonl: No such file or directory", "give the file of a"),
    ),
    "report a binary file": (
        ["report", "binary.jsonl"],
        ("binary.jsonl has no record of a Monitor", "for a page of a"),
    ),
    "report an empty file": (["report", "empty.jsonl"], ("empty.jsonl has no record of a Monitor", "for a page of a")),
    # calibrate and profiles
    "fit nothing": (
        ["calibrate", "--gpu", "h200", "--fit-only"],
        ("--fit-only needs --output, the folder of the measurements",),
    ),
    "fit an absent folder": (
        ["calibrate", "--gpu", "h200", "--fit-only", "--output", "absent"],
        ("absent/steps has no measured rollouts", "type: fp8plan calibrate --output absent"),
    ),
    "fit a file": (
        ["calibrate", "--gpu", "h200", "--fit-only", "--output", "other.json"],
        ("other.json/steps has no measured rollouts", "type: fp8plan calibrate --output other.json"),
    ),
    "unknown grid": (
        ["calibrate", "--gpu", "h200", "--grid", "huge"],
        (
            "Invalid value for '--grid': Value error, 'huge' is not one of 'quick', 'full' (given: 'huge')",
            "type: fp8plan calibrate --help",
        ),
    ),
    # probe: all of these are found before an engine starts
    "probe nothing": (["probe"], ("Missing argument", "fp8plan probe --help")),
    "probe without samples": (
        ["probe", MODEL, "--gpu", "cpu", "--samples", "0"],
        ("samples is 0", "allowed: a whole number of"),
    ),
    "probe without tokens": (["probe", MODEL, "--gpu", "cpu", "--max-tokens", "0"], ("max_tokens", "0")),
    "probe below zero": (["probe", MODEL, "--gpu", "cpu", "--temperature", "-1"], ("temperature", "-1")),
    "probe with no prompts": (
        ["probe", MODEL, "--gpu", "cpu", "--prompts", "absent.jsonl"],
        ("there is no file of prompts absent.jsonl", "give a file of JSON lines"),
    ),
    "probe with empty prompts": (
        ["probe", MODEL, "--gpu", "cpu", "--prompts", "empty.jsonl"],
        ("empty.jsonl holds no prompts", 'allowed: lines like {"prompt_token_ids": [...]}'),
    ),
    "probe with other objects": (
        ["probe", MODEL, "--gpu", "cpu", "--prompts", "other.jsonl"],
        (
            "line 1 of other.jsonl is {'hello': 'world'}",
            'allowed: {"prompt_token_ids": [...]}, {"messages": [{"role":',
        ),
    ),
    "probe with a binary file": (
        ["probe", MODEL, "--gpu", "cpu", "--prompts", "binary.jsonl"],
        ("line 1 of binary.jsonl is not JSON", "allowed: "),
    ),
    "probe with unknown scales": (["probe", MODEL, "--gpu", "cpu", "--kv-scales", "none"], ("none", "calibrated")),
    "probe another GPU": (
        ["probe", MODEL, "--gpu", "h200"],
        ("h200_sxm was asked for, and NVML finds no NVIDIA GPU on this machine", "allowed: a machine with one"),
    ),
    "probe in int4": (
        ["probe", MODEL, "--gpu", "cpu", "--precision", "int4"],
        ("unknown precision 'int4'", "allowed: bf16, fp8_block, fp8_kv, fp8_block+fp8_kv"),
    ),
}


# Found by what reads the folder, after vLLM was found.
ABSENT = pytest.param(
    ["probe", "./absent", "--gpu", "cpu"], ("absent",), id="probe an absent folder", marks=pytest.mark.vllm
)
CASES = [*(pytest.param(*case, id=name) for name, case in COMMANDS.items()), ABSENT]


@pytest.mark.parametrize(("words", "parts"), CASES)
def test_a_bad_command_is_one_clear_line(
    words: list[str],
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["fp8plan", *replacing(words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2, out + err
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("fp8plan: ")
    for part in parts:
        assert part in line
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written, nothing lost"


WORKLOAD = fp8plan.Workload(2, 2, fp8plan.Fixed(16), fp8plan.Fixed(32))
HALF = np.zeros((2, 3), np.float32)


def planned() -> Any:
    return fp8plan.plan(MODEL, "h200", WORKLOAD)


CALLS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "plan(None)": (
        lambda: fp8plan.plan(None, "h200", WORKLOAD),
        ("model is None", "allowed: ModelShape or str or Path"),
    ),  # type: ignore[arg-type]
    "GPU of 5": (lambda: fp8plan.plan(MODEL, 5, WORKLOAD), ("gpu is 5", "allowed: Gpu or str")),  # type: ignore[arg-type]
    "a workload of text": (
        lambda: fp8plan.plan(MODEL, "h200", "32 x 16"),
        ("workload is '32 x 16'", "allowed: Workload"),
    ),  # type: ignore[arg-type]
    "unknown option": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, gpu_count=8),
        ("plan() got an unexpected keyword argument 'gpu_count'",),
    ),  # type: ignore[call-arg]
    "precision of 8": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, precisions=[8]),
        ("precisions is [8]", "allowed: some of bf16, fp8_block", "fp8_kv"),
    ),  # type: ignore[list-item]
    "no precisions": (lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, precisions=[]), ("precisions", "[]")),
    "GPUs as text": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, gpus="8"),
        ("gpus is '8'", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "half a GPU": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, gpus=2.5),
        ("gpus is 2.5", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "limits as a dict": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, limits={"max_num_seqs": 8}),
        ("limits is {'max_num_seqs': 8}", "allowed: EngineLimits or None"),
    ),  # type: ignore[arg-type]
    "budget as text": (
        lambda: fp8plan.plan(MODEL, "h200", WORKLOAD, budget="low"),
        ("budget is 'low'", "allowed: RiskBudget or None"),
    ),  # type: ignore[arg-type]
    "accept all": (lambda: fp8plan.RiskBudget(accept="all"), ("all", "low, moderate, high")),  # type: ignore[arg-type]
    "prompts as text": (
        lambda: fp8plan.Workload("32", 16, fp8plan.Fixed(5), fp8plan.Fixed(5)),
        ("prompts is '32'", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "half a prompt": (
        lambda: fp8plan.Workload(1.5, 16, fp8plan.Fixed(5), fp8plan.Fixed(5)),
        ("prompts is 1.5", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "negative length": (
        lambda: fp8plan.Workload(32, 16, 5, -5),
        ("response_lengths is -5", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "length as text": (
        lambda: fp8plan.Workload(32, 16, 5, "many"),
        ("response_lengths is 'many'", "allowed: a whole number of"),
    ),  # type: ignore[arg-type]
    "slots as text": (lambda: fp8plan.EngineLimits(max_num_seqs="8"), ("max_num_seqs", "'8'")),  # type: ignore[arg-type]
    "utilization None": (lambda: fp8plan.EngineLimits(gpu_memory_utilization=None), ("gpu_memory_utilization", "None")),  # type: ignore[arg-type]
    "half a slot": (lambda: fp8plan.EngineLimits(max_num_seqs=7.5), ("max_num_seqs", "7.5")),  # type: ignore[arg-type]
    "a plan of nothing": (lambda: fp8plan.Plan.from_json(""), ("plan", "fp8plan plan")),
    "a plan of None": (
        lambda: fp8plan.Plan.from_json(None),
        ("the plan is a NoneType", "allowed: text, as Plan.to_json writes"),
    ),  # type: ignore[arg-type]
    "a choice that is not there": (lambda: planned().select(99), ("there is no choice 99", "allowed: 0 to 3, or")),
    "an unknown choice": (
        lambda: planned().vllm_kwargs("int4"),
        ("the plan has no 'int4'", "allowed: bf16, fp8_block, fp8_kv, fp8_block+fp8_kv"),
    ),
    "half a choice": (lambda: planned().vllm_kwargs(1.5), ("choice is 1.5", "allowed: 0 to 3, or")),
    "train_s as text": (lambda: fp8plan.StepTimes(train_s="120"), ("train_s is '120'", "allowed: a number of seconds")),  # type: ignore[arg-type]
    "gpu of nothing": (lambda: fp8plan.find_gpu(None), ("gpu is None", "allowed: a name such as")),  # type: ignore[arg-type]
    "tis of NaN": (lambda: fp8plan.Thresholds(tis=float("nan")), ("tis is nan", "allowed: above 0, or None")),
    "tis as text": (lambda: fp8plan.Thresholds(tis="2"), ("tis is '2'", "allowed: above 0, or None")),  # type: ignore[arg-type]
    "a band of one": (lambda: fp8plan.Thresholds(band=(0.5,)), ("band is (0.5,)", "allowed: (low, high) with 0")),  # type: ignore[arg-type]
    "unknown level": (
        lambda: fp8plan.CorrectionSettings(level="word"),
        ("level is 'word'", "allowed: 'token', 'sequence', 'geometric', None"),
    ),  # type: ignore[arg-type]
    "settings of Monitor": (
        lambda: fp8plan.Monitor(settings=5),
        ("settings is 5", "allowed: a CorrectionSettings, such as"),
    ),  # type: ignore[arg-type]
    "a controller by name": (lambda: fp8plan.Monitor(controller="level"), ("controller", "'level'")),  # type: ignore[arg-type]
    "a controller's class": (
        lambda: fp8plan.Monitor(controller=fp8plan.LevelThresholds),
        (
            "controller is <class 'fp8plan.runtime.watch.controller.laws.LevelThresholds'>",
            "allowed: ConstantThresholds(), or another controller",
        ),
    ),  # type: ignore[arg-type]
    "a plan's file": (lambda: fp8plan.Monitor(plan="plan.json"), ("plan", "'plan.json'")),  # type: ignore[arg-type]
    "a guard of 3": (lambda: fp8plan.Monitor(guard=3), ("guard is 3", "allowed: a Guard, such as")),  # type: ignore[arg-type]
    "a state of None": (
        lambda: fp8plan.Monitor().load_state_dict(None),
        ("the monitor's state is None", "allowed: a Mapping, such as", "state_dict()"),
    ),  # type: ignore[arg-type]
    "a path as sink": (
        lambda: fp8plan.Monitor(sinks="run.jsonl"),
        ("sinks are 'run.jsonl'", "allowed: a list of sinks", "JsonLines"),
    ),  # type: ignore[arg-type]
    "one sink, not in a list": (
        lambda: fp8plan.Monitor(sinks=fp8plan.JsonLines("run.jsonl")),
        ("sinks are run file run.jsonl", "allowed: a list of sinks", "["),
    ),  # type: ignore[arg-type]
    "log-probs of None": (lambda: fp8plan.Monitor().step(None, None), ("train_logprobs", "None")),  # type: ignore[arg-type]
    "log-probs of two shapes": (
        lambda: fp8plan.Monitor().step(HALF, HALF[:, :2], HALF > 0),
        ("rollout_logprobs has shape (2, 2)", "allowed: that of train_logprobs, (2", "(2, 3)"),
    ),
    "a mask of another shape": (
        lambda: fp8plan.Monitor().step(HALF, HALF, HALF[:1] > 0),
        ("mask has shape (1, 3)", "allowed: that of train_logprobs, (2", "(2, 3)"),
    ),
    "lengths that do not add up": (
        lambda: fp8plan.Monitor().step(HALF.ravel(), HALF.ravel(), lengths=[2, 2]),
        ("lengths sum up to 4 and the log-probs are 6", "allowed: lengths of 0 or"),
    ),
    "verl's settings of None": (
        lambda: fp8plan.from_verl(None),
        ("the config is None", "allowed: a mapping, a DictConfig"),
    ),  # type: ignore[arg-type]
    "verl's settings as text": (
        lambda: fp8plan.from_verl("token"),
        ("the config is 'token'", "allowed: a mapping, a DictConfig"),
    ),  # type: ignore[arg-type]
    "slew below 1": (
        lambda: fp8plan.LevelThresholds(slew=(0.5, 2.0)),
        ("slew is (0.5, 2.0)", "allowed: two finite factors above 1"),
    ),
    "a run file of None": (lambda: fp8plan.JsonLines(None), ("the run file is None", "allowed: its path, such as")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "parts"), CALLS.values(), ids=CALLS)
def test_a_bad_call_is_one_clear_error(call: Callable[[], Any], parts: tuple[str, ...]) -> None:
    with pytest.raises((fp8plan.Fp8PlanError, TypeError)) as caught:
        call()
    if isinstance(caught.value, TypeError):  # Python's own word on a misspelt argument
        assert "unexpected keyword argument" in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
