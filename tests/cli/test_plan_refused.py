"""Bad input of `fp8plan plan`: one clear line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Done, refused
from typed import PLAN, SMALL

from fp8plan.model.precision import PRESETS
from fp8plan.version import DEFAULT_VERSION, LAST, RANGE

TURNS = ["--turns", "8", "--turn-tokens", "300", "--tool-tokens", "600", "--tool-s", "2.5"]
# Bad input of `plan`: what is typed after PLAN, and what the one line must hold: what was given, and the way out.
BAD_PLANS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown GPU": (["--gpu", "h300"], ("'h300'", "nearest: h800, h200_sxm", "a100_sxm", "auto")),
    "a card of another memory": (
        ["--gpu", "a100-20gb"],
        ("'a100-20gb'", "nearest: a100_sxm", "--gpu datasheet:memory_"),
    ),
    "a card without its bandwidth": (
        ["--gpu", "datasheet:memory_gib=24,bf16_tflops=165,sms=128,compute_capability=8.9"],
        ("lacks bandwidth_gb_s", "for example: --gpu datasheet:memory_gib="),
    ),
    "all of the memory": (["--gpu-memory-utilization", "1"], ("is 1, 139.80 GiB", "allowed: at most 0.99; type 0.97")),
    "more requests than the default budget": (
        ["--max-num-seqs", "20000"],
        ("max_num_seqs is 20000", "16384, vLLM's default on NVIDIA H200", "give max_num_batched_tokens 20000 too"),
    ),
    "max_model_len as vLLM's auto": (["--max-model-len", "-1"], ("max_model_len is -1", "leave it out")),
    "negative length": (["--response-lengths", "fixed:-5"], ("-5", "allowed: ", "1 to ")),
    "negative prompt length": (["--prompt-lengths", "fixed:-5"], ("-5", "allowed: ", "1 to ")),
    "no length": (["--response-lengths", "fixed:0"], ("fixed number is 0", "allowed: ")),
    "NaN length": (["--response-lengths", "fixed:nan"], ("'fixed:nan'", "fixed:TOKENS", "lognormal:mean=TOKENS")),
    "NaN mean": (["--response-lengths", "lognormal:mean=nan,sigma=1,max=9"], ("mean is nan", "finite")),
    "negative mean": (["--response-lengths", "lognormal:mean=-7,sigma=1,max=9"], ("mean is -7", "allowed: ")),
    "NaN sigma": (["--response-lengths", "lognormal:mean=5,sigma=nan,max=9"], ("sigma is nan", "at least 0")),
    "negative max": (["--response-lengths", "lognormal:mean=5,sigma=1,max=-9"], ("max is -9", "allowed: ")),
    "infinite max": (["--response-lengths", "lognormal:mean=5,sigma=1,max=inf"], ("max=inf", "max=TOKENS")),
    "no max": (["--response-lengths", "lognormal:mean=5,sigma=1"], ("mean=5,sigma=1'", "max=TOKENS")),
    "unknown field": (["--response-lengths", "lognormal:mean=5,sigma=1,max=9,min=2"], ("min=2", "max=TOKENS")),
    "absurd length": (["--response-lengths", f"fixed:{10**30}"], (str(10**30), "allowed: ")),
    "turns alone": (["--turns", "8"], ("need --turn-tokens, --tool-tokens, --tool-s", "type: --turns 8")),
    "a part of turns": (["--concurrent", "8"], ("turns need --turns, --turn-tokens", "type: --turns 8")),
    "a negative tool": (
        [*TURNS[:4], "--tool-tokens", "fixed:-1", *TURNS[6:]],
        ("tool_tokens: fixed number is -1", "0 to"),
    ),
    "a negative wait": ([*TURNS[:6], "--tool-s", "fixed:-1"], ("tool_s: fixed number is -1", "0 to 86,400")),
    "turns and lengths": (TURNS, ("the turns have lengths of their own", "(--response-lengths, or --turns)")),
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
        ["--tensor-parallel-size", "16", "--precision", "fp8_block", "--emit", "verl"],
        ("down_proj has 192 inputs", "tensor_parallel_size 16", "multiples of 128", "allowed: 1, 2, 4, 8"),
    ),
    "idle replicas": (["--data-parallel-size", "100000"], ("100000 replicas for", "allowed: at most ")),
    "GPUs without requests": (["--gpus", "100000"], ("100000 replicas for", "allowed: at most ")),
    "no GPU in a node": (["--gpus-per-node", "0"], ("gpus_per_node is 0", "at least 1")),
    "no KV pool": (["--num-gpu-blocks", "0"], ("num_gpu_blocks is 0", "at least 1")),
    "FP8 weights on an A100": (
        ["--precision", "fp8_block", "--gpu", "a100"],
        ("fp8_block", "fp8plan does not model FP8 weights", "use bf16"),
    ),
    "unknown precision": (["--precision", "int4"], ("'int4'", ", ".join(PRESETS))),
    "TP does not divide the heads": (["--tensor-parallel-size", "3"], ("3", "16 attention heads", "1, 2, 4, 8, 16")),
    "TP 0": (["--tensor-parallel-size", "0"], ("tensor_parallel_size is 0", "at least 1")),
    "DP negative": (["--data-parallel-size", "-1"], ("data_parallel_size is -1", "at least 1")),
    "--gpus and TP": (["--gpus", "4", "--tensor-parallel-size", "2"], ("--gpus", "give ")),
    "--gpus and DP": (["--gpus", "4", "--data-parallel-size", "2"], ("--gpus", "give ")),
    "--gpus 0": (["--gpus", "0"], ("gpus is 0", "at least 1")),
    "only the datasheet under --strict": (["--strict"], ("h200_sxm", DEFAULT_VERSION, "leave --strict out")),
    "plot to svg": (["--plot", "picture.svg"], ("picture.svg", ".png or .html")),
    "plot to no folder": (["--plot", "absent/picture.png"], ("absent/picture.png", "no folder")),
    "emit for another engine": (["--emit", "sglang"], ("'sglang'", "vllm, verl, trl")),
    "emit for a vLLM that is not started": (
        ["--emit", "vllm", "--engine-version", "0.26"],
        ("the plan is of vLLM 0.26.0", f"allowed: {RANGE}", f"--engine-version {LAST}"),
    ),
    "emit what TRL cannot do": (
        ["--emit", "trl", "--precision", "fp8_block", "--tensor-parallel-size", "2", "--data-parallel-size", "2"],
        ("TRL", "no FP8 weights", "it is one replica"),
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
    "JSON to another suffix": (
        ["--json", "one.txt"],
        ("--json is 'one.txt'", "ends in .json", "type: --json plan.json"),
    ),
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
    "only a link": (["--link", "9GB/s"], ("link is '9GB/s'", "--learning-rate", "--train-s", "--logprob-s")),
    "a link without unit": (["--link", "9", "--learning-rate", "1e-6"], ("link is '9'", "type: 25Gb/s")),
    "a link in words": (["--link", "fast", "--learning-rate", "1e-6"], ("link is 'fast'", "GB/s")),
    "negative rate": (["--learning-rate", "-1"], ("learning_rate is -1", "at least 0")),
    "an unknown optimiser": (["--learning-rate", "1", "--optimizer", "sgd"], ("'sgd'", "adamw, muon")),
    "only top-k": (["--top-k", "20MB"], ("top_k is 20MB", "--learning-rate")),
    "top-k in words": (["--learning-rate", "1e-6", "--top-k", "few"], ("top_k is 'few'", "20MB or residual=1e-3")),
    "a share above 1": (["--learning-rate", "1e-6", "--top-k", "7"], ("share is 7", "up to 1")),
    "few bytes": (["--learning-rate", "1e-6", "--top-k", "1KB"], ("nbytes is 1000", "for this model: more than")),
    "only an optimiser": (["--optimizer", "muon"], ("optimizer is 'muon'", "--learning-rate")),
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--turns", "80"], "allowed: at most 40960 (max_position_embeddings); lower --turns, or shorten "),
        (["--max-model-len", "99"], "max_model_len is 99; lower --turns, or shorten "),
    ],
)
def test_turns_that_are_too_long_name_their_options(
    fp8plan: Callable[..., Done], changed: list[str], told: str
) -> None:
    turns = TURNS if changed[0] != "--turns" else TURNS[2:]
    done = fp8plan(*PLAN[:4], "--prompts", 2, *turns, *changed)
    refused(done, told, "--prompt-lengths, --turn-tokens and --tool-tokens")


def test_drafts_of_turns_are_not_modelled(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan("tune", *PLAN[1:4], "--prompts", 2, *TURNS, "--acceptance", 0.6)
    refused(done, "the workload has turns, for which drafts are not modelled", "leave --acceptance out")


@pytest.mark.parametrize(("words", "parts"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_input_is_one_clear_line(fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]) -> None:
    refused(fp8plan(*PLAN, *words), *parts)


@pytest.mark.parametrize("target", ["vllm", "verl", "trl"])
def test_where_nothing_is_within_the_budget_only_a_named_choice_is_emitted(
    fp8plan: Callable[..., Done], target: str
) -> None:
    low = ("plan", "Qwen/Qwen3-30B-A3B", "--gpu", "h100", *SMALL, "--accept", "low", "--precision", "fp8_block")
    parts = ("fp8_block is moderate", "allowed: low", "--accept moderate", f"plan.json {target} --choice fp8_block")
    done = fp8plan(*low, "--emit", target)
    assert done.code == 2
    assert done.out == ""
    assert all(part in done.err for part in parts)
    saved = fp8plan(*low, "--json", "plan.json")
    assert saved.code == 0
    assert "No precision stays within the risk budget" in " ".join(saved.out.split())
    refused(fp8plan("emit", "plan.json", target), *parts)
    assert fp8plan("emit", "plan.json", target, "--choice", "fp8_block").code == 0


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
        ('{"model_type": "llama", "kv_lora_rank": 512}', ("MLA", "not modelled", "qwen3_moe")),
    ],
)
def test_a_corrupt_config_is_refused_by_file(fp8plan: Callable[..., Done], text: str, parts: tuple[str, ...]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(text)
    refused(fp8plan("plan", "./model", "--gpu", "h200", *SMALL), "model/config.json", *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("no numbers", "at least one row")),
        (b"\n  \n", ("no numbers", "at least one row")),
        (b"5\nmany\n", ("line 2", '"response_length"')),
        (b'5\n\n{"tokens": 7}\n', ("line 3", '"response_length"')),
        (b"5\n-3\n", ("row 2", "-3", "allowed: ")),
        (b"5\nNaN\n", ("row 2", "nan", "allowed: ")),
        (b"5\n2.5\n", ("row 2", "2.5", "whole")),
        (b'5\n"7"\n', ("row 2", "'7'", "allowed: ")),
        (b"true\n", ("row 1", "True", "allowed: ")),
        (b"\xff\xfe5\n", ("line 1", "utf-8")),
    ],
)
def test_a_bad_trace_is_refused_by_row(fp8plan: Callable[..., Done], content: bytes, parts: tuple[str, ...]) -> None:
    Path("trace.jsonl").write_bytes(content)
    refused(fp8plan(*PLAN, "--response-lengths", "trace.jsonl"), "trace.jsonl", *parts)


def test_a_model_that_does_not_fit_is_refused_with_ways_out(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan("plan", "meta-llama/Llama-3.1-70B", "--gpu", "l40s", *SMALL)
    refused(done, "Llama-3.1-70B", "in fp8_block does not fit NVIDIA L40S", "GiB", "try tensor_parallel_size 2")
