"""Good input of `fp8plan plan` and `emit`: results alone on stdout, files whole or as they were, notes on stderr."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command import RECORD, Done, first_choice, refused
from typed import MODEL, PLAN, SMALL

from fp8plan.cli import console, request
from fp8plan.errors import ConfigError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.model.precision import PRESETS
from fp8plan.model.schedule.scheduler import NOT_COMPILED
from fp8plan.runtime.this_host import said


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


def test_without_a_c_compiler_a_note_says_why_it_takes_long(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NOT_COMPILED not in fp8plan(*PLAN).err
    monkeypatch.setattr(request, "compiled", lambda: None)
    assert fp8plan(*PLAN).err.splitlines()[0] == f"note: {NOT_COMPILED}"


def test_the_prompts_of_a_trace_are_used_and_said(fp8plan: Callable[..., Done]) -> None:
    Path("trace.jsonl").write_text("\n".join(f'{{"prompt_length": {n}, "response_length": 30}}' for n in (5, 5, 9, 9)))
    words = ["plan", MODEL, "--gpu", "h200", *SMALL[:4], "--response-lengths", "trace.jsonl", "--json"]
    done = fp8plan(*words)
    assert json.loads(done.out)["workload"]["max_prompt_tokens"] == 9
    assert "note: prompt lengths are those of trace.jsonl, too" in done.err
    assert "prompt lengths are those of trace.jsonl, too" in json.loads(done.out)["warnings"]
    saved = json.loads(done.out)
    assert [f"note: {told}" for told in (*saved["warnings"], saved["reasons"][0])] == done.err.splitlines()
    given = fp8plan(*words, "--prompt-lengths", "fixed:16")
    assert json.loads(given.out)["workload"]["max_prompt_tokens"] == 16
    assert "note: trace.jsonl has prompt_length, too, which is not read" in given.err


PLAN_KEYS = (
    "schema_version fp8plan_version model gpu profile limits workload seed choices chosen baseline thresholds reasons "
    "warnings budget remedies kv_scales anchor inside engine_version"
).split()


CHOICE_KEYS = (
    "precision tensor_parallel data_parallel available reason makespan_s makespan_low_s makespan_high_s "
    "output_tokens_per_s speedup_over_best speedup_over_best_low speedup_over_best_high step_speedup_over_best "
    "step_speedup_over_best_low step_speedup_over_best_high "
    "speedup speedup_low speedup_high rl_step_s step_speedup kv_cache_tokens preemptions "
    "tail_fraction kl_k3 kl_k3_low kl_k3_high ess_raw clip_fraction seq_reject_fraction risk unit_kv_scales "
    "extrapolated refused_by expert_parallel step_speedup_low step_speedup_high rests_on max_num_seqs "
    "remedy routed_experts turns"
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


def test_the_host_is_timed_where_the_planned_gpu_is(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines are left alone, and a host that the user tells, or that records tell, is taken."""
    here = "fp8plan.runtime.this_host"
    by_hand = json.loads(fp8plan(*PLAN, "--host-loop-us", "500", "--json").out)
    monkeypatch.setattr("fp8plan.model.hardware._product_of_this_machine", lambda: find_gpu("h200").product)
    monkeypatch.setattr(f"{here}.host_loop_s", lambda: 5e-4)
    done = fp8plan(*PLAN, "--json")
    assert "note: host loop measured here: 500 µs" in done.err
    timed = json.loads(done.out)
    assert timed["choices"] == by_hand["choices"]
    assert [note for note in timed["warnings"] if note not in by_hand["warnings"]] == [said(5e-4)]

    def never() -> float:
        raise AssertionError("the host was timed")

    monkeypatch.setattr(f"{here}.host_loop_s", never)
    assert json.loads(fp8plan(*PLAN, "--host-loop-us", "500", "--json").out) == by_hand
    Path("records.jsonl").write_text(json.dumps(RECORD | {"host_loop_s": 5e-4}))
    assert "host loop" not in fp8plan(*PLAN, "--observed", "records.jsonl").err
    assert "host loop" not in fp8plan("plan", MODEL, "--gpu", "h100", *SMALL).err


def test_a_slow_host_makes_a_rollout_longer(fp8plan: Callable[..., Done]) -> None:
    plans = [json.loads(fp8plan(*PLAN, "--json", *words).out) for words in ((), ("--host-loop-us", "2000"))]
    usual, slow = (answer["choices"][answer["chosen"]]["makespan_s"] for answer in plans)
    assert slow > 2 * usual
    refused = fp8plan(*PLAN, "--host-loop-us", "480000")
    assert refused.code == 2
    assert "--host-loop-us is 480000.0; allowed: microseconds, such as 300" in refused.err


def test_an_a100_lists_fp8_weights_as_unavailable_with_the_reason(fp8plan: Callable[..., Done]) -> None:
    words = [*PLAN, "--gpu", "a100"]
    answer = json.loads(fp8plan(*words, "--json").out)
    rows = {c["precision"]: c for c in answer["choices"]}
    assert list(rows) == list(PRESETS)
    for name, row in rows.items():
        assert row["available"] is (name in ("bf16", "fp8_kv"))
        if not row["available"]:
            assert row["reason"].startswith("fp8plan does not model FP8 weights on NVIDIA A100")
            given = (
                "precision",
                "tensor_parallel",
                "data_parallel",
                "expert_parallel",
                "available",
                "reason",
                "refused_by",
                "rests_on",
            )
            assert not row["rests_on"]
            assert {row[key] for key in CHOICE_KEYS if key not in given} == {None}
    table = " ".join(fp8plan(*words).out.split())
    assert "Not available: fp8_block, fp8_block+fp8_kv: " in table
    assert table.count("does not model FP8 weights") == 1


def test_the_table_holds_every_precision_the_choice_and_the_reasons(fp8plan: Callable[..., Done]) -> None:
    words = ["plan", "Qwen/Qwen3-8B", *PLAN[2:], "--response-lengths", "fixed:200"]
    answer = json.loads(fp8plan(*words, "--json").out)
    assert answer["chosen"] != 0  # so that the mark is seen to move
    out = fp8plan(*words).out
    chosen = answer["choices"][answer["chosen"]]["precision"]
    marked = [line.split()[1] for line in out.splitlines() if line.startswith("> ")]
    assert marked == [chosen] * 2  # how fast, and how risky
    for name in PRESETS:
        assert sum(line.startswith((f"  {name} ", f"> {name} ")) for line in out.splitlines()) == 2
    for reason in answer["reasons"]:
        assert f"- {reason}" in out


def test_several_layouts_are_named_in_the_table(fp8plan: Callable[..., Done]) -> None:
    out = fp8plan(*PLAN, "--gpus", "2", "--train-s", "5", "--logprob-s", "0").out
    for cell in ("1x2", "2x1", "step s", "2 x h200_sxm"):
        assert cell in out


def test_expert_parallelism_is_one_of_the_layouts_or_asked_for(fp8plan: Callable[..., Done]) -> None:
    words = ["plan", "Qwen/Qwen3-30B-A3B", *PLAN[2:], "--precision", "bf16"]
    out = fp8plan(*words, "--gpus", "2").out
    for cell in ("1x2", "2x1 ", "2x1 EP", "EP: expert parallelism"):
        assert cell in out
    alone = fp8plan(*words, "--tensor-parallel-size", "2", "--expert-parallel")
    assert "2 x h200_sxm (1 replica, TP 2 EP)" in alone.out
    assert "both --gpus and a layout are given" in fp8plan(*words, "--gpus", "2", "--expert-parallel").err
    assert "has no experts" in fp8plan(*PLAN, "--expert-parallel").err


@pytest.mark.parametrize("layout", [["--tensor-parallel-size", "1"], ["--data-parallel-size", "2"]])
def test_gpus_beside_a_layout_is_refused_even_if_it_is_the_usual_one(
    fp8plan: Callable[..., Done], layout: list[str]
) -> None:
    assert "both --gpus and a layout are given; give --gpus" in fp8plan(*PLAN, "--gpus", "2", *layout).err


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
        "--tensor-parallel-size 2 --data-parallel-size 3 --max-cudagraph-capture-size 48"
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
        "enable_expert_parallel": False,
        "max_cudagraph_capture_size": 48,
        "enable_return_routed_experts": False,
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
    assert beyond_the_rollout("--link", "800Gb/s") == pytest.approx(sync / 2)  # the default is 400
    assert beyond_the_rollout("--link", "100GB/s") == pytest.approx(sync / 2)
    dense = beyond_the_rollout("--link", "1Gb/s")
    assert beyond_the_rollout("--link", "1Gb/s", "--learning-rate", "1e-6") < dense / 10


def test_with_a_learning_rate_a_reason_names_the_fastest_sync(fp8plan: Callable[..., Done]) -> None:
    words = ["--link", "10Gb/s", "--learning-rate", "1e-6", "--optimizer", "muon"]
    (reason,) = [x for x in json.loads(fp8plan(*PLAN, "--json", *words).out)["reasons"] if "weight sync over" in x]
    assert "over 10Gb/s, at a learning rate of 1e-06 with muon (modelled: weights of layers have a" in reason
    assert "spread of 0.02, assumed, and a step changes" in reason
    assert "fp8_block delta of" in reason
    assert "for dense FP8 (a delta pays below" in reason


def test_top_k_is_a_mode_of_the_sync(fp8plan: Callable[..., Done]) -> None:
    words = ["--link", "100Mb/s", "--learning-rate", "1e-6", "--top-k", "5MB", "--precision", "fp8_block"]
    reasons = json.loads(fp8plan(*PLAN, "--json", *words).out)["reasons"]
    assert any("fp8_block top-k of 0.00" in reason and "against a delta" in reason for reason in reasons)
    assert any("Top-k of 5MB is not lossless" in reason for reason in reasons)


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
        # Two targets are planned for the first one's caller.
        caller = f"note: {TIMES.format('verl', 'fp8plan', 'vllm')}\n" if target == "vllm" else ""
        reason = f"note: {json.loads(Path('plan.json').read_text())['reasons'][0]}\n"
        assert (saved.code, saved.err) == (0, caller + reason)
        assert saved.out == Path(name).read_text()
    again = fp8plan(*PLAN, "--json", "--emit", "verl=again.args", "--emit", "vllm=again.json")
    assert again.out == Path("plan.json").read_text()
    assert f"fp8plan.plan={Path.cwd()}/plan.json" in Path("verl.args").read_text()
    unwritten = Path("again.args").read_text()
    assert "fp8plan.plan=plan.json" in unwritten
    assert "# save the plan with --json plan.json" in unwritten


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
    on_four = ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--precision", "fp8_block"]
    refused(fp8plan(*PLAN, *both, *on_four, "--emit", "trl=trl.json"), "TRL cannot run this plan")
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
        console.write({first: console.text("1"), second: console.text("2")})
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="nothing was written"):
        console.write({second: console.text("2")})


def test_what_cannot_be_written_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "absent" / "plan.json")
    with pytest.raises(ConfigError, match=rf"cannot write {dangling}: there is no folder {tmp_path / 'absent'}$"):
        console.check([("--json", str(dangling))])
    with pytest.raises(ConfigError, match="File name too long"):
        console.check([("--json", str(tmp_path / ("n" * 256)))])
    (tmp_path / "old").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"permission denied in {tmp_path}; give a file"):
        console.check([("--json", str(tmp_path / "old"))])


@pytest.mark.parametrize("name", ["n" * 250, "n" * 245 + ".json", "a." + "n" * 250, "n" * 250 + ".html"])
def test_a_long_name_and_a_link_to_come_are_written(tmp_path: Path, name: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name)
    console.check([("--json", str(link))])
    console.write({str(link): console.text("content")})
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["link", name])
    assert (tmp_path / name).read_text() == "content\n"


def test_the_page_shows_the_settings_of_the_same_command(fp8plan: Callable[..., Done]) -> None:
    words = [*NEAR, "--prompts", "2", "--samples", "2", "--emit", "verl=verl.args", "--plot", "plan.html"]
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
    other = TIMES.format("fp8plan", "verl", "verl")
    assert (done.code, done.out, done.err) == (0, "", f"note: {other}\nwritten: verl.args\n")
    assert "actor_rollout_ref.rollout.name=fp8plan" in Path("verl.args").read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO(Path("plan.json").read_text()))
    assert fp8plan("emit", "-", "verl").out == Path("verl.args").read_text()
    Path("torn.json").write_text(Path("plan.json").read_text()[:-50])
    for words, parts in {
        ("absent.json", "verl"): ("cannot read absent.json: No such file", "- for stdin"),
        (".", "verl"): ("cannot read .: Is a directory",),
        ("torn.json", "verl"): ("the plan is not JSON", "fp8plan plan MODEL --gpu GPU --json plan.json"),
        ("plan.json", "sglang"): ("'sglang'", "vllm, verl, trl"),
        ("plan.json", "verl", "--choice", "fp8"): ("no 'fp8'", "fp8_block+fp8_kv"),
        ("plan.json", "verl", "--choice", "9"): ("no choice 9", "0 to 3"),
        ("plan.json", "verl", "--choice", "9" * 5000): ("the plan has no '999", "fp8_block+fp8_kv"),
        ("plan.json", "verl", "--kv-scales", "x"): ("'x'", "calibrated, unit"),
        ("plan.json", "verl", "-o", "absent/x"): ("absent/x", "no folder"),
        ("plan.json", "verl", "-o", "./plan.json"): ("--output ./plan.json is the plan itself",),
        ("plan.json",): ("fp8plan emit --help",),
    }.items():
        refused(fp8plan("emit", *words), *parts)


TIMES = "the plan's times are with {}'s front end and sync; for {}'s, plan with --emit {}"
SCALED = "fp8_block+fp8_kv"
NEAR = ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "h200", "--response-lengths", "fixed:9000"]
NEAR += ["--precision", SCALED, "--precision", "bf16"]


def test_settings_are_planned_for_the_kv_scales_that_their_target_leaves(fp8plan: Callable[..., Done]) -> None:
    """FP8 of Llama-3.1-8B is of moderate risk with measured scales, and of high risk at 1.0: near the limit."""
    assert fp8plan(*NEAR, "--json", "plan.json").code == 0
    saved = json.loads(Path("plan.json").read_text())
    assert (saved["kv_scales"], saved["budget"]["accept"]) == ("calibrated", "moderate")
    assert saved["choices"][saved["chosen"]]["precision"] == SCALED
    refused(fp8plan("emit", "plan.json", "vllm"), f"{SCALED} at 1.0", "risk is high", "accepts moderate", "unit")
    assert "is yours" in fp8plan("emit", "plan.json", "vllm", "--kv-scales", "calibrated").out
    for trainer in ("verl", "trl"):
        assert "measures the K and V scales" in fp8plan("emit", "plan.json", trainer).out
        assert "measures the K and V scales" in fp8plan(*NEAR, "--emit", trainer).out

    words = [*NEAR, "--json", "plan.json"]
    done = fp8plan(*words, "--emit", "vllm")
    assert '"kv_cache_dtype": "auto"' in done.out
    assert "note: K and V scales are 1.0, as vLLM leaves them" in done.err
    saved = json.loads(Path("plan.json").read_text())
    assert (saved["kv_scales"], saved["choices"][saved["chosen"]]["precision"]) == ("unit", "bf16")
    told = fp8plan(*words, "--emit", "vllm", "--kv-scales", "calibrated")
    assert '"kv_cache_dtype": "fp8"' in told.out
    assert "note: K and V" not in told.err
    accepted = fp8plan(*words, "--emit", "vllm", "--accept", "high")
    assert '"kv_cache_dtype": "fp8"' in accepted.out
    assert "risk high" in accepted.out


def test_kv_scales_reach_the_risk(fp8plan: Callable[..., Done]) -> None:
    words = [*PLAN, "--json", "--precision", "fp8_kv", "--kv-scales"]
    calibrated, unit = (first_choice(fp8plan(*words, scales)) for scales in ("calibrated", "unit"))
    assert unit["kl_k3_high"] > calibrated["kl_k3_high"]


def pasted(python: str) -> dict[str, Any]:
    """The arguments that pasted settings give to GRPOConfig, for which something stands in."""
    stand_in, names = ModuleType("trl"), dict[str, Any]()
    stand_in.GRPOConfig = dict  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trl", stand_in)
        patch.setattr(os, "environ", dict(os.environ))
        exec(compile(python, "pasted", "exec"), names)
    found: dict[str, Any] = names["training_args"]
    return found


@pytest.mark.parametrize(("target", "inside"), [("vllm", "own"), ("verl", "verl"), ("trl", "trl")])
def test_settings_on_stdout_leave_the_choice_and_its_reason_on_stderr(
    fp8plan: Callable[..., Done], target: str, inside: str
) -> None:
    """stdout is the settings alone. stderr has the report of `plan`; of `emit` it has the choice and its reason."""
    table = fp8plan(*PLAN, "--inside", inside, "--json", "plan.json").out
    plan = Plan.from_json(Path("plan.json").read_text())
    settings = plan.emit(target, plan_file=f"{Path.cwd()}/plan.json", python=True) + "\n"
    assert "fp8_block+fp8_kv" in table
    assert f"- {plan.reasons[0]}" in table
    planned = fp8plan(*PLAN, "--emit", target, "--json", "plan.json")
    assert planned.out == settings
    assert f"note: {plan.reasons[0]}" not in planned.err.splitlines()  # the report has it
    if target != "vllm":  # there K and V scales are 1.0
        assert table in planned.err
    saved = fp8plan("emit", "plan.json", target)
    assert saved.out == settings
    assert f"note: {plan.reasons[0]}" in saved.err.splitlines()
    other = fp8plan("emit", "plan.json", target, "--choice", "fp8_block")
    notes = ["note: these settings are of fp8_block, which is not the plan's choice", f"note: {plan.reasons[0]}"]
    assert other.err.splitlines() == (notes if plan.select().precision != "fp8_block" else notes[1:])
    assert f"note: {plan.reasons[0]}" in fp8plan(*PLAN, "--inside", inside, "--json").err.splitlines()
    assert plan.reasons[0] not in fp8plan(*PLAN, "--emit", f"{target}=settings").err  # the table has it


def test_bf16_is_emitted_with_the_reason_why(fp8plan: Callable[..., Done]) -> None:
    """The issue's example: Qwen2.5-1.5B with short answers."""
    words = ["plan", "Qwen/Qwen2.5-1.5B", "--gpu", "h200", "--prompts", "1", "--response-lengths", "fixed:100"]
    done = fp8plan(*words, "--emit", "trl")
    assert 'choice="bf16"' in done.out
    assert "- Stay with bf16: " in done.err
    assert "FP8 is not worth it here: it gains nothing." in done.err


def test_settings_for_trl_are_json_in_a_json_file_and_else_python(fp8plan: Callable[..., Done]) -> None:
    for words in (
        [*PLAN, "--json", "plan.json", "--emit", "trl=trl.json"],
        ["emit", "plan.json", "trl", "-o", "again.json"],
        ["emit", "plan.json", "trl", "-o", "trl.py"],
    ):
        assert fp8plan(*words).code == 0
    told = json.loads(Path("trl.json").read_text())
    assert json.loads(Path("again.json").read_text()) == told
    assert pasted(Path("trl.py").read_text()) == told["grpo_config"]
    assert fp8plan("emit", "plan.json", "trl").out == Path("trl.py").read_text()


def test_emit_prints_what_its_target_reads(fp8plan: Callable[..., Done]) -> None:
    vllm = json.loads(fp8plan(*PLAN, "--emit", "vllm", "--precision", "fp8_block+fp8_kv").out)
    assert vllm["engine_args"]["kv_cache_dtype"] == "fp8"
    assert vllm["engine_args"]["quantization_config"]["linear"] == "fp8_per_block"
    served = fp8plan(*PLAN, "--emit", "vllm-serve", "--precision", "fp8_block+fp8_kv").out
    assert shlex.split(served)[1:4] == ["vllm", "serve", MODEL]
    trl = fp8plan(*PLAN, "--emit", "trl", "--precision", "fp8_block+fp8_kv").out
    assert pasted(trl)["num_generations"] == 2
    assert '# GRPOTrainer(..., args=training_args, plan="plan.json", choice="fp8_block+fp8_kv")' in trl
    verl = fp8plan(*PLAN, "--emit", "verl", "--precision", "fp8_block").out
    overrides = dict(word.split("=", 1) for word in shlex.split(verl.replace("\\\n", " "), comments=True))
    assert overrides["+actor_rollout_ref.rollout.custom.fp8plan.choice"] == "fp8_block"
    assert overrides["actor_rollout_ref.rollout.n"] == overrides["data.train_batch_size"] == "2"


@pytest.mark.parametrize(("model", "size"), [("Qwen/Qwen3-4B", 8), ("Qwen/Qwen3-30B-A3B", 4)])
def test_what_is_emitted_for_verl_is_what_verl_can_start(fp8plan: Callable[..., Done], model: str, size: int) -> None:
    words = ["plan", model, "--gpu", "h200", *SMALL, "--tensor-parallel-size", str(size), "--accept", "high"]
    done = fp8plan(*words, "--emit", "verl")
    assert done.code == 0
    assert re.search(r"custom\.fp8plan\.choice=(bf16|fp8_kv) ", done.out)
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


def test_yesterdays_rollout_is_the_workload(fp8plan: Callable[..., Done]) -> None:
    rollout = {"prompt_ids": [0, 0, 1, 1], "prompt_lengths": [64] * 4, "response_lengths": [100, 200, 300, 400]}
    Path("run.jsonl").write_text(json.dumps(rollout) + "\n")
    plan = json.loads(fp8plan("plan", MODEL, "--gpu", "h200", "--workload", "run.jsonl", "--json").out)
    work = plan["workload"]
    assert (work["prompts"], work["samples"], work["response_tokens"]) == (2, 2, 1000)
    assert work["response_lengths"]["source"] == "line 1 of run.jsonl"
    both = fp8plan("plan", MODEL, "--gpu", "h200", "--workload", "run.jsonl", "--samples", 2, "--seed", 1)
    refused(both, "both --workload and --samples, --seed", "run.jsonl says all of them")


def test_a_budget_lowers_the_number_of_requests_that_nobody_gave(fp8plan: Callable[..., Done]) -> None:
    limits = json.loads(fp8plan(*PLAN, "--max-num-batched-tokens", "512", "--json").out)["limits"]
    assert (limits["max_num_batched_tokens"], limits["max_num_seqs"]) == (512, 512)


def test_a_card_without_a_name_is_planned_saved_emitted_and_validated(fp8plan: Callable[..., Done]) -> None:
    card = "datasheet: memory_gib=11.6 bandwidth_gb_s=504 bf16_tflops=58 sms=46 compute_capability=8.9"
    done = fp8plan(*PLAN, "--gpu", card, "--json", "plan.json")
    assert "no measured profile of datasheet:memory_gib=11.6" in done.err
    saved = json.loads(Path("plan.json").read_text())
    for target in ("vllm", "verl", "trl"):
        assert fp8plan("emit", "plan.json", target).code == 0
    Path("records.jsonl").write_text(json.dumps(RECORD | {"gpu": saved["gpu"]}))
    (row,) = json.loads(fp8plan("validate", "records.jsonl", "--json").out)["records"]
    assert saved["gpu"] in row["group"]
    assert row["predicted_s"] > 0
