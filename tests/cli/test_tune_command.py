"""`fp8plan tune`: the options of plan, results alone on stdout, and a plan that other commands take."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from html import escape
from pathlib import Path

from command import Done, refused
from typed import MODEL, PLAN

from fp8plan.cli import plan, tune
from fp8plan.model.plan.plan import Plan

TUNE = ["tune", *PLAN[1:]]
MANY = [*TUNE, "--prompts", "75", "--samples", "8"]


def test_tune_has_the_options_of_plan() -> None:
    shared = inspect.signature(plan.plan_command).parameters
    own = inspect.signature(tune.tune_command).parameters
    assert set(own) - set(shared) == {"max_lag", "acceptance", "tokens", "method"}
    assert set(shared) - set(own) == {"grpo_config", "verl_config"}


def test_a_tuned_plan_is_printed_written_and_emitted(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan(*MANY, "--json", "plan.json", "--emit", "vllm")
    assert done.code == 0
    engine = json.loads(done.out)["engine_args"]
    saved = Plan.from_json(Path("plan.json").read_text())
    assert engine == saved.vllm_kwargs()
    assert engine["max_cudagraph_capture_size"] == engine["max_num_seqs"] == saved.limits.max_num_seqs > 512
    for target in ("verl", "trl"):
        assert fp8plan("emit", "plan.json", target).code == 0


def test_a_limit_that_is_given_stays(fp8plan: Callable[..., Done]) -> None:
    words = ["--max-num-seqs", "100", "--max-num-batched-tokens", "9000", "--no-prefix-caching"]
    limits = json.loads(fp8plan(*MANY, *words, "--json").out)["limits"]
    assert (limits["max_num_seqs"], limits["max_num_batched_tokens"]) == (100, 9000)
    assert limits["enable_prefix_caching"] is False
    ceiling = json.loads(fp8plan(*TUNE, "--gpu-memory-utilization", "0.5", "--json").out)["limits"]
    assert ceiling["gpu_memory_utilization"] == 0.5


def test_the_lag_of_asynchronous_training_is_bounded(fp8plan: Callable[..., Done]) -> None:
    times = ["--train-s", "3", "--logprob-s", "1", "--max-lag", "3"]
    work = ["--prompts", "8", "--response-lengths", "lognormal:mean=200,sigma=0.9,max=900"]
    levers = json.loads(fp8plan(*TUNE, *work, *times, "--json").out)["tune"]["levers"]
    (lever,) = [lever for lever in levers if "fully" in lever["lever"]]
    assert "max_staleness=3" in lever["words"]["trl"]
    refused(fp8plan(*TUNE, *times[:-1], "0"), "max_lag is 0")


def test_bad_input_is_refused_as_by_plan(fp8plan: Callable[..., Done]) -> None:
    refused(fp8plan(*TUNE, "--max-num-seqs", "0"), "max_num_seqs is 0")
    refused(fp8plan("tune", MODEL, "--gpu", "nothing"), "nothing")
    refused(fp8plan(*TUNE, "--plot", "x.svg"), "cannot plot to x.svg", ".png or .html")


def test_drafts_are_weighed_with_an_acceptance(fp8plan: Callable[..., Done]) -> None:
    words = ["--acceptance", "0.7", "--num-speculative-tokens", "2", "--speculative-method", "ngram_gpu"]
    levers = json.loads(fp8plan(*MANY, *words, "--json").out)["tune"]["levers"]
    (lever,) = [lever for lever in levers if lever["lever"] == "speculative decoding by ngram_gpu, 2 drafts"]
    assert lever["setting"] == "2.19 tokens a step at an acceptance of 0.7"
    refused(fp8plan(*TUNE, "--num-speculative-tokens", "2"), "give --acceptance 0.6")
    refused(fp8plan(*TUNE, "--acceptance", "70"), "acceptance is 70")


def test_a_picture_is_the_waterfall_and_its_page_has_the_levers_and_the_plan(fp8plan: Callable[..., Done]) -> None:
    done = fp8plan(*MANY, "--plot", "tuned.png")
    assert done.code == 0
    assert Path("tuned.png").read_bytes().startswith(b"\x89PNG")
    assert fp8plan(*MANY, "--plot", "tuned.html").code == 0
    page = Path("tuned.html").read_text()
    levers = json.loads(fp8plan(*MANY, "--json").out)["tune"]["levers"]
    assert all(escape(lever["lever"]) in page for lever in levers)
    for heading in ("Levers", "To the physical limit", "Speed", "Mismatch", "Settings"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<svg ") == 2
    assert "<script" not in page
