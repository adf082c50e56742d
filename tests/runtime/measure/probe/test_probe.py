"""The mismatch of each precision before a run: real vLLM samples a model with structure, transformers scores it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console
from tiny_models import checkpoint

from benchmarks.learning.policies.make import make, task_of
from benchmarks.learning.policies.tasks import TRAIN
from fp8plan import cli
from fp8plan.errors import ConfigError
from fp8plan.model.emit.vllm import ROUTER_PATTERN
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.remedies import TRAINER_PRECISIONS
from fp8plan.model.weight_changes import TopK
from fp8plan.runtime.measure.probe import probe as probe_module
from fp8plan.runtime.measure.probe.probe import Probe, compared, probe
from fp8plan.runtime.measure.probe.reference import Reference
from fp8plan.runtime.measure.probe.results import Interval, Probed
from fp8plan.runtime.measure.probe.sampling import Sampled, SampleSettings, read_prompts
from fp8plan.views.findings import probe_report
from tools.observations import append, columns, observations
from tools.risk_report import read_observations

torch = pytest.importorskip("torch")
vllm = pytest.mark.vllm


LIMITS = EngineLimits(
    max_num_seqs=32, max_num_batched_tokens=2048, block_size=128, num_gpu_blocks=128, enforce_eager=True
)
SETTINGS = SampleSettings(max_tokens=64, samples=2)


class Trained(NamedTuple):
    folder: Path
    prompts: list[Any]


class Measured(NamedTuple):
    found: Probe
    samples: dict[str, list[Sampled]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model that has learnt a task here: a flat distribution could not show a mismatch."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("probe") / "model"
    make("tiny-qk-norm", folder)
    problems = task_of("tiny-qk-norm", folder).problems(192, (0, TRAIN, 0))
    lines = [json.dumps({"prompt_token_ids": problem.prompt}) for problem in problems]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Trained(folder, list(read_prompts(folder / "prompts.jsonl")))


@pytest.fixture(scope="module")
def measured(trained: Trained) -> Measured:
    """All four precisions on it, and what their engines sampled."""
    samples: dict[str, list[Sampled]] = {}

    def remembered(setup: Any, *words: Any, **options: Any) -> Any:
        found, facts = sample(setup, *words, **options)
        samples[setup.precision.name] = found
        return found, facts

    with pytest.MonkeyPatch.context() as patch:
        sample = probe_module.sample
        patch.setattr(probe_module, "sample", remembered)
        found = probe(str(trained.folder), prompts=trained.prompts, gpu="cpu", settings=SETTINGS, limits=LIMITS)
    assert {name: one.error for name, one in found.precisions.items()} == dict.fromkeys(PRESETS)
    return Measured(found, samples)


def kl(measured: Measured, name: str) -> Interval:
    return measured.found.precisions[name].kl_k3


@pytest.fixture(scope="module")
def later(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with smaller values, except for the largest of each block, so that no scale moves."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("probe") / "later"
    shutil.copytree(trained.folder, folder)
    chance = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                blocks = tensor.float().view(tensor.shape[0] // 128, 128, -1, 128)
                largest = blocks.abs() == blocks.abs().amax((1, 3), keepdim=True)
                smaller = blocks * (1 - 0.9 * torch.rand(blocks.shape, generator=chance))
                tensors[name] = torch.where(largest, blocks, smaller).view(tensor.shape).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


# --- real engines ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@vllm
def test_bf16_is_the_floor_of_the_kernels(measured: Measured) -> None:
    one = measured.found.precisions["bf16"]
    assert one.figures is not None
    assert 0 < one.kl_k3.value < 2e-4
    assert one.figures["ess_raw"].low > 0.999
    assert one.figures["ratio_above_2"].value == 0
    k1 = one.figures["k1"]
    assert abs(k1.value) < 2 * (k1.high - k1.low)  # no side is favoured; 0.1 to 0.7 widths by CPU


@pytest.mark.slow
@vllm
@pytest.mark.parametrize("name", ["fp8_block", "fp8_kv", "fp8_block+fp8_kv"])
def test_fp8_is_above_the_floor(measured: Measured, name: str) -> None:
    assert kl(measured, name).low > kl(measured, "bf16").high


@pytest.mark.slow
@vllm
def test_both_are_no_better_than_either(measured: Measured) -> None:
    both = kl(measured, "fp8_block+fp8_kv")
    assert both.value > kl(measured, "fp8_block").high
    assert both.high > kl(measured, "fp8_kv").low


@pytest.mark.slow
@vllm
def test_top_k_adds_to_the_mismatch_of_a_sync(trained: Trained, later: Path) -> None:
    """An engine that got all changes is where the trainer is. One that got a part of them lacks the rest.

    vLLM on a CPU reloads BF16 layers whole.
    """
    probed: dict[float | None, Probed] = {}
    for share in (None, 0.1, 0.5):
        top_k = None if share is None else TopK(share=share)
        settings = replace(SETTINGS, samples=1, after=str(later), top_k=top_k)
        measured = probe(
            str(trained.folder), ["fp8_block"], trained.prompts, gpu="cpu", settings=settings, limits=LIMITS
        )
        probed[share] = measured.precisions["fp8_block"]
        assert probed[share].predicted is None
        assert probed[share].error is None
        assert json.dumps(measured.to_dict())
        with pytest.raises(ConfigError, match="a probe of a sync is no observation"):
            observations(measured.to_dict())
    assert probed[None].kl_k3.high < probed[0.5].kl_k3.low
    assert probed[0.5].kl_k3.high < probed[0.1].kl_k3.low
    synced = {share: (row.facts or {})["synced"] for share, row in probed.items()}
    assert synced[None]["residual"] == 0 < synced[0.5]["residual"] < synced[0.1]["residual"]
    assert synced[0.1]["bytes"] < synced[0.5]["bytes"] < synced[None]["bytes"]
    console = Console(width=400)
    with console.capture() as shown:
        console.print(probe_report(measured))
    assert f"synced to {later}, fp8_block: " in shown.get()


@pytest.mark.slow
@vllm
def test_the_figures_are_those_of_the_monitor(measured: Measured) -> None:
    for one in measured.found.precisions.values():
        assert one.figures is not None
        assert one.mismatch is not None
        for name in ("kl_k3", "ess_raw"):
            interval = one.figures[name]
            assert interval.low <= interval.value <= interval.high
        assert one.figures["kl_k3"].value == pytest.approx(one.mismatch.k3, rel=1e-5)
        assert one.figures["k1"].value == pytest.approx(one.mismatch.k1, rel=1e-5, abs=1e-9)
        assert one.figures["ess_raw"].value == pytest.approx(one.mismatch.ess_raw, rel=1e-9)
        assert one.tokens == sum(len(row.response) for row in measured.samples[one.precision])
        assert (one.sequences, one.invalid) == (len(measured.samples[one.precision]), 0)


@pytest.mark.slow
@vllm
def test_it_says_what_ran(measured: Measured) -> None:
    facts = {name: one.facts or {} for name, one in measured.found.precisions.items()}
    assert [name for name in facts if "Fp8" in str(facts[name]["kernels"])] == ["fp8_block", "fp8_block+fp8_kv"]
    assert [name for name in facts if facts[name]["kv_scales"]] == ["fp8_kv", "fp8_block+fp8_kv"]
    assert facts["fp8_kv"]["kv_scales"] == "sequences of the last rollout"


# A reference that rounds as the engine does must be as far from the plain one as the engine is, and at the same tokens.
# It cannot meet the engine exactly: noise of BF16 size before a rounding to E4M3 sends some numbers the other way.


@pytest.mark.slow
@vllm
@pytest.mark.parametrize("name", ["fp8_block", "fp8_kv"])
def test_rounding_explains_the_mismatch(
    measured: Measured, trained: Trained, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows = measured.samples[name]
    reference = Reference(str(trained.folder))
    plain = reference.score(rows).logprobs
    trainer = name if name in TRAINER_PRECISIONS else "bf16"
    if name == "fp8_kv":
        truncate_kv(monkeypatch)
    with reference.computing_in(trainer, [ROUTER_PATTERN]):
        rounded = reference.score(rows).logprobs
    assert compared(plain, rounded).kl_k3.value == pytest.approx(kl(measured, name).value, rel=0.35)
    engine = np.concatenate([row.logprobs for row in rows])
    shifts = [torch.cat(plain).numpy() - side for side in (torch.cat(rounded).numpy(), engine)]
    assert np.corrcoef(*shifts)[0, 1] > 0.5


def truncate_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V to E4M3 towards zero: what vLLM 0.30 writes to its cache on a CPU (a GPU rounds to nearest)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def truncated(x: Any) -> Any:
        scale = 1.1 * x.float().abs().amax() / 448
        magnitude = (x.float() / scale).abs()
        step = 2.0 ** (magnitude.clamp(min=2.0**-6).log2().floor() - 3)
        return (x.sign() * (magnitude / step).floor() * step * scale).to(x.dtype)

    def attention(module: Any, q: Any, k: Any, v: Any, *words: Any, **options: Any) -> Any:
        return plain(module, q, truncated(k), truncated(v), *words, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)


@pytest.mark.slow
@vllm
def test_an_engine_that_fails_is_a_row_and_not_the_end(
    measured: Measured, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Any, *_: Any, **__: Any) -> Any:
        if setup.precision.name == "fp8_kv":
            raise RuntimeError("no such\nkernel")
        return measured.samples["bf16"], {}

    monkeypatch.setattr(probe_module, "sample", broken)
    told: list[str] = []
    found = probe(
        str(trained.folder), ["fp8_kv", "bf16"], trained.prompts, gpu="cpu", settings=SETTINGS, progress=told.append
    )
    failed = found.precisions["fp8_kv"]
    assert failed.error is not None
    assert re.fullmatch(r"RuntimeError: no such kernel \(its output is in \S+\.log\)", failed.error)
    assert f"fp8_kv: {failed.error}" in told
    with pytest.raises(ConfigError, match="fp8_kv was not measured: RuntimeError"):
        failed.kl_k3  # noqa: B018  # reading it is the test
    assert found.precisions["bf16"].kl_k3 == kl(measured, "bf16")
    assert "Not measured: fp8_kv: RuntimeError" in printed(found)
    assert [row["weights"] for row in observations(found.to_dict())] == ["bf16"]


@pytest.mark.slow
@vllm
def test_log_probs_that_are_all_nan_are_a_row(
    measured: Measured, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row._replace(logprobs=[float("nan")] * len(row.response)) for row in measured.samples["bf16"]]
    monkeypatch.setattr(probe_module, "sample", lambda *_, **__: (rows, {}))
    found = probe(str(trained.folder), ["fp8_kv"], trained.prompts, gpu="cpu", settings=SETTINGS)
    assert found.precisions["fp8_kv"].error == "ValueError: no tokens with finite log-probs"


# --- what becomes of it ---------------------------------------------------------------------------------------------


def printed(found: Probe, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(probe_report(found))
    return capture.get()


@pytest.mark.slow
@vllm
def test_the_table_has_a_row_for_each_and_fits_a_terminal(measured: Measured) -> None:
    text = printed(measured.found)
    for name, one in measured.found.precisions.items():
        (row,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert f"{one.tokens:,}" in row
    assert max(map(len, printed(measured.found, 80).splitlines())) <= 80


@pytest.mark.slow
@vllm
def test_the_command_prints_what_was_found_and_nothing_else(
    measured: Measured,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        probe_module, "probe", lambda *words, **options: asked.append((words, options)) or measured.found
    )
    prompts = trained.folder / "prompts.jsonl"
    words = ["probe", str(trained.folder), "--precision", "bf16", "--gpu", "cpu", "--prompts", str(prompts)]
    words += [
        "--most-prompts",
        "5",
        "--samples",
        "3",
        "--max-tokens",
        "7",
        "--kv-scales",
        "unit",
        "--num-gpu-blocks",
        "9",
    ]
    monkeypatch.setattr(sys, "argv", ["fp8plan", *words, "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(measured.found.to_dict()))
    ((positional, options),) = asked
    assert positional == (str(trained.folder), ["bf16"], trained.prompts)
    assert options["most_prompts"] == 5
    assert options["settings"] == SampleSettings(max_tokens=7, samples=3, kv_scales="unit")
    assert options["limits"].num_gpu_blocks == 9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kv-scales", "none"], "kv_scales is 'none'"),
        (["--prompts", "/nowhere.jsonl"], "there is no file of prompts /nowhere.jsonl"),
        (["--gpu", "h300"], "unknown GPU 'h300'"),
        (["--most-prompts", "0"], "--most-prompts"),
        (["--top-k", "1e-4"], "top_k is given without after"),
        (["--after", "/nowhere", "--top-k", "many"], "top_k is 'many'; allowed: 1e-4"),
        (["--prompts", "binary"], "line 1 of binary is not JSON"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(bytes(range(256)))
    gpu = [] if "--gpu" in words else ["--gpu", "cpu"]
    monkeypatch.setattr(sys, "argv", ["fp8plan", "probe", "model", *gpu, *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("product", "says"),
    [
        (None, "h200_sxm was asked for, and NVML finds no NVIDIA GPU on this machine; allowed: .*--gpu cpu"),
        ("NVIDIA H20", "h200_sxm was asked for, and this machine has NVIDIA H20; allowed: h20, or auto"),
        ("NVIDIA H200", None),
        ("NVIDIA H200 MIG 3g.71gb", None),  # not known: the user may know better
    ],
)
def test_the_driver_is_asked_before_any_engine(
    product: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "gpu_facts", lambda: {"gpu_product": product})
    monkeypatch.setattr(probe_module, "sample", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(ConfigError, match=says or "1 different prompts are too few"):
        probe("model", ["bf16"], [[1]], gpu="h200")


TWICE = """
import sys
from fp8plan import cli
words = sys.argv[1:]
for blocks in (64, 10**12):
    sys.argv = ["fp8plan", *words, str(blocks)]
    try:
        cli.main()
    except SystemExit as end:
        print("exit code", end.code or 0, flush=True)
"""


@vllm
def test_the_command_shows_its_own_lines_only_and_names_the_log_of_an_engine_that_fails(tmp_path: Path) -> None:
    """A real engine that starts, and one that cannot."""
    import warm_processes

    twice, prompts = tmp_path / "twice.py", tmp_path / "prompts.jsonl"
    twice.write_text(TWICE)
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [n, 5, 9]}) + "\n" for n in range(8)))
    words = ["probe", str(checkpoint("dense", "a")), "--gpu", "cpu", "--prompts", str(prompts), "--precision", "bf16"]
    words += ["--samples", "1", "--max-tokens", "4", "--num-gpu-blocks"]
    printed, errors, env = tmp_path / "printed", tmp_path / "errors", os.environ | {"TMPDIR": str(tmp_path)}
    warm_processes.program(warm_processes.script, str(twice), *words, log=printed, errors=errors, env=env).join(600)
    good, bad = re.split(r"exit code 0\n", printed.read_text())
    assert good.startswith(str(checkpoint("dense", "a")))
    assert bad.endswith("exit code 1\n")
    *own, starts, _ = errors.read_text().splitlines()
    assert own == [starts, "the reference scores the same tokens"]
    assert starts == "bf16: an engine starts and samples 8 responses"
    (log,) = tmp_path.glob("fp8plan-engine-*")  # none of the engine that started
    assert f"its output is in {log}" in bad
    assert "Loading safetensors" in log.read_text()


@pytest.mark.slow
@vllm
def test_json_has_all_of_it(measured: Measured) -> None:
    found = json.loads(json.dumps(measured.found.to_dict(), allow_nan=False))
    assert [row["precision"] for row in found["precisions"]] == list(PRESETS)
    assert found["precisions"][0]["figures"]["kl_k3"]["value"] == kl(measured, "bf16").value
    assert found["seed"] == 0


@pytest.mark.slow
@vllm
def test_it_is_an_observation_that_the_model_of_mismatch_reads(measured: Measured, tmp_path: Path) -> None:
    table = tmp_path / "observations.csv"
    rows = observations(measured.found.to_dict())
    append(table, rows[:1])
    append(table, rows[1:])
    read = read_observations(table)
    assert [o.setting.rollout != "bf16" for o in read] == [name.startswith("fp8_block") for name in PRESETS]
    for one, row in zip(read, rows, strict=True):
        assert one.weight == 0  # of a CPU: shown, not fitted
        assert one.kl is not None
        assert float(row["kl_low"]) <= one.kl <= float(row["kl_high"])
        assert "measured by fp8plan probe" in row["reference"]
        assert one.setting.qk_norm
    assert [row["kv_calibrated"] for row in rows] == ["", "", "1", "1"]


def test_a_table_whose_last_line_is_not_ended_is_appended_to_line_by_line(tmp_path: Path) -> None:
    table = tmp_path / "observations.csv"
    lines = [",".join(columns()), ",".join("a" for _ in columns()), ",".join("b" for _ in columns())]
    for before in ("\n".join(lines[:2]), "\n".join(lines[:2]) + "\n", ""):
        table.write_text(before)
        append(table, [])
        append(table, [dict.fromkeys(columns(), "b")])
        assert table.read_text().splitlines() == (lines if before else [lines[0], lines[2]])


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text("a,b\n")
    with pytest.raises(ConfigError, match=r"has the columns a,b; allowed: source,reference"):
        append(table, [dict.fromkeys(columns(), "")])
    assert table.read_text() == "a,b\n"


# --- refusals -------------------------------------------------------------------------------------------------------


@vllm
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": [[1, 2]] * 9}, "1 different prompts are too few"),
        ({"precisions": ["fp4"]}, "unknown precision 'fp4'"),
        ({"precisions": []}, "no precision is given"),
        ({"prompts": []}, "a prompt is empty, or there is none"),
    ],
)
def test_what_nothing_can_be_measured_with_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        probe(str(checkpoint("dense", "a")), **{"prompts": [[1, 2]], "gpu": "cpu"} | options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; allowed"),
        ({"temperature": 0.0}, "temperature is 0.0; allowed: 0.01 or more"),
        ({"temperature": 0.005}, "temperature is 0.005; allowed: 0.01 or more: vLLM raises lower ones to that"),
        ({"kv_scales": "none"}, "kv_scales is 'none'; allowed: calibrated, unit"),
        ({"top_k": TopK(share=0.1)}, "top_k is given without after"),
        ({"after": "/nowhere"}, "after is '/nowhere'; allowed: a folder with safetensors"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SampleSettings(**options)


def test_checkpoints_that_no_sync_leads_between_are_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "sample", lambda *_, **__: pytest.fail("an engine was started"))
    settings = SampleSettings(after=str(checkpoint("dense", "a")))
    for model, says in (
        ("Qwen/Qwen3-0.6B", "the model is 'Qwen/Qwen3-0.6B'; allowed with after: a folder with safetensors"),
        (str(checkpoint("moe", "a")), "has other tensors than"),
    ):
        with pytest.raises(ConfigError, match=says):
            probe(model, ["bf16"], [[number] for number in range(8)], gpu="cpu", settings=settings)


@vllm
def test_a_gpu_that_cannot_run_a_precision_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "sample", lambda *_, **__: pytest.fail("an engine was started"))
    monkeypatch.setattr(probe_module, "gpu_facts", lambda: {"gpu_product": "NVIDIA A100-SXM4-80GB"})
    found = probe(str(checkpoint("dense", "a")), ["fp8_block"], [[1, n] for n in range(8)], gpu="a100_sxm")
    assert "does not model FP8 weights" in (found.precisions["fp8_block"].error or "")


def test_log_probs_that_are_not_finite_are_counted_and_left_out() -> None:
    rollout = [[-1.0, -2.0], [-0.5, float("nan")], [], [-1.0, float("-inf")]]
    train = [[-1.1, -2.0], [-0.5, -1.0], [], [-1.0, -3.0]]
    found = compared(train, rollout)
    assert (found.sequences, found.tokens, found.invalid) == (3, 4, 2)
    assert found.kl_k3.value == pytest.approx((np.exp(-0.1) - 1 + 0.1) / 4, rel=1e-4)
    json.dumps(found.to_dict(), allow_nan=False)
