"""The settings of vLLM that levers print, as vLLM itself reads them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path

import pytest
from installed_vllm import serve_parser

from fp8plan.model.configs import bundled_configs
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.emit.vllm import precision_words, serve_command, vllm_env, vllm_kwargs
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.levers import FP8_PARTS, levers
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload

WORK = Workload(20, 16, Fixed(64), LogNormal(200, 0.9, 1500))


@pytest.mark.parametrize("gpu", ["h200", "b200", "rtx4090", "a100"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-FP8"])
def test_the_words_of_a_precision_lead_from_any_other_one_to_what_emit_prints(model: str, gpu: str) -> None:
    """As vLLM takes the last of a flag, the other engine's command and the words must make this engine's command."""
    for own in map(find_precision, PRESETS):
        setup = EngineSetup(model, gpu, own)
        whole = shlex.split(serve_command(vllm_kwargs(setup), vllm_env(setup)))
        for other in map(find_precision, PRESETS):
            before = replace(setup, precision=other)
            start = shlex.split(serve_command(vllm_kwargs(before), vllm_env(before)))
            words = shlex.split(precision_words(setup, other))
            assert set(words) <= set(whole)
            assert set(whole) <= {*start, *words}


@pytest.mark.vllm
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "nvidia/Nemotron-H-8B-Base-8K"])
def test_vllm_starts_with_each_setting_that_a_lever_prints(model: str, tmp_path: Path) -> None:
    from vllm import EngineArgs

    (tmp_path / "config.json").write_text(json.dumps(bundled_configs()[model]))
    tuned = search(TuneRequest(model, "h200", WORK))
    every = levers(tuned, tuned.scene())
    printed = {lever.name: lever.words["vllm"] for lever in every if "--" in lever.words.get("vllm", "")}
    assert set(FP8_PARTS.values()) <= set(printed)
    for name, words in printed.items():
        flags = dropwhile(lambda word: not word.startswith("--"), shlex.split(words))
        args = serve_parser().parse_args(["--model", str(tmp_path), *flags])
        if name == "router replay":  # the engine needs a GPU
            assert args.enable_return_routed_experts, words
            continue
        config = EngineArgs.from_cli_args(args).create_engine_config()
        assert (config.quant_config is not None) == (name == FP8_PARTS["weights"]), words
        assert (config.cache_config.cache_dtype == "fp8") == (name == FP8_PARTS["kv"]), words
