"""Others' tables, in the package's own layout: which rows are taken, what is refused, and what an import finds out."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fp8plan.errors import ConfigError, ProfileError
from fp8plan.model.calibrate.kernel_rows import observe, read_rows
from fp8plan.model.calibrate.profile_of import kernel_rows
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, load_profile, profile_path, profiles_path
from fp8plan.model.profile.profile import VERSION_SD, Profile
from tools import import_aic
from tools.import_aic import (
    OWN_ERROR,
    Tables,
    Trial,
    find_data,
    flat_kernels,
    import_all,
    import_profile,
    importable,
    read_tables,
)

H100 = find_gpu("h100")
LAUNCH = 0.06  # ms: what vLLM's fp8_block rows cannot be shorter than


def write(data: Path, table: str, rows: list[dict[str, object]]) -> Path:
    """A parquet file of the package, e.g. table="h100_sxm/gemm/vllm/0.24.0/gemm"."""
    path = data / f"{table}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
    return path


def gemm(dtype: str, m: int, n: int, k: int, latency: float, kernel: str = "a") -> dict[str, object]:
    return {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": latency, "kernel_source": kernel}


def attention(dtype: str, batch: int, heads: tuple[int, int, int], latency: float, **more: int) -> dict[str, object]:
    names = ("num_heads", "num_key_value_heads", "head_dim")
    shape = dict(zip(names, heads, strict=True)) | {"batch_size": batch, "window_size": 0} | more
    return {"kv_cache_dtype": dtype, "latency": latency, "kernel_source": "fa", **shape}


def moe(dtype: str, tokens: int, distribution: str, tp: int = 1, ep: int = 1) -> dict[str, object]:
    shape = {"num_tokens": tokens, "num_experts": 128, "topk": 8, "hidden_size": 2048, "inter_size": 768}
    split = {"moe_tp_size": tp, "moe_ep_size": ep, "distribution": distribution}
    return {"moe_dtype": dtype, **shape, **split, "latency": 0.1, "kernel_source": "triton"}


def all_reduce(size: int, kernel: str = "vLLM_custom_graph") -> dict[str, object]:
    return {"num_gpus": 2, "message_size": size, "latency": 0.01, "kernel_source": kernel}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One BF16 GEMM of an H100 that an engine would time alike."""
    write(tmp_path, "h100_sxm/gemm/vllm/0.24.0/gemm", [gemm("bfloat16", 64, 4096, 4096, 0.02)])
    return tmp_path


def read(data: Path, kernel: str) -> pd.DataFrame:
    rows = read_tables(H100, data, "0.12.0").rows
    return rows[rows.kernel == kernel]


def test_rows_are_in_seconds_and_name_what_ran(data: Path) -> None:
    found = read_tables(H100, data, "0.12.0")
    assert found.engine_version == "0.24.0"
    assert "aiconfigurator-core 0.12.0" in found.source
    (row,) = found.rows.to_dict("records")
    assert row == {"kernel": "gemm.bf16", "m": 64, "n": 4096, "k": 4096, "seconds": 2e-5, "backend": "a"}


def test_gemms_that_stay_in_the_cache_are_left_out(data: Path) -> None:
    # 6 copies of 2 bytes: 1024 x 1024 is 12 MB and stays in the H100's 50 MB; 4096 x 4096 is 201 MB and does not.
    cold = gemm("bfloat16", 1, 4096, 4096, 0.02)
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", [cold, gemm("bfloat16", 1, 1024, 1024, 0.005)])
    assert read(data, "gemm.bf16").n.tolist() == [4096]


def test_short_fp8_block_rows_come_from_sglang(data: Path) -> None:
    short = [gemm("fp8_block", m, 8192, 8192, LAUNCH, "vllm") for m in (1, 16, 1024)]
    # 2 * 4096 * 8192 * 8192 FLOPs are 0.28 ms at the H100's FP8 peak, 2048 * 1024 * 1024 are 2 us.
    long = [gemm("fp8_block", 4096, 8192, 8192, 0.4, "vllm"), gemm("fp8_block", 2048, 1024, 1024, LAUNCH, "vllm")]
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", [gemm("bfloat16", 64, 4096, 4096, 0.02), *short, *long])
    others = [gemm("fp8_block", m, 8192, 8192, 0.03, "sglang") for m in (1, 16, 1024, 4096)]
    write(data, "h100_sxm/gemm/sglang/0.5.14/gemm", others)
    found = read(data, "linear.fp8_block").sort_values("m")
    assert list(zip(found.m, found.backend, strict=True)) == [(m, "sglang") for m in (1, 16, 1024)] + [(4096, "vllm")]
    assert "of SGLang" in read_tables(H100, data, "0.12.0").source


def test_without_sglang_only_rows_longer_than_the_launch_are_left(data: Path) -> None:
    # 512 MB of weights take 0.16 ms at the H100's bandwidth, at any m; 8192 x 8192 takes 0.02 ms.
    rows = [gemm("fp8_block", 1, 65536, 8192, 0.2), *(gemm("fp8_block", m, 8192, 8192, LAUNCH) for m in (1, 8, 16))]
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", [gemm("bfloat16", 64, 4096, 4096, 0.02), *rows])
    assert read(data, "linear.fp8_block").n.tolist() == [65536]
    assert "only long fp8_block" in read_tables(H100, data, "0.12.0").source


def test_decode_attention_counts_the_query_and_reads_memory(data: Path) -> None:
    grouped, wide = (32, 8, 128), (32, 8, 256)  # 4 KiB of BF16 K and V a token
    rows = [attention("bfloat16", 1, grouped, 0.1, step=step) for step in (99, 8191, 65535)]  # 0.4, 34 and 268 MB
    rows += [attention("fp8", 1, grouped, 0.1, step=65535), attention("fp8", 1, wide, 0.1, step=65535)]
    rows += [attention("bfloat16", 1, grouped, 0.1, step=65535, window_size=1024)]
    write(data, "h100_sxm/attention/vllm/0.24.0/generation_attention", rows)
    assert sorted(read(data, "attention_decode.bf16").context) == [100, 65536]
    assert read(data, "attention_decode.fp8").head_dim.tolist() == [128]


def test_prefill_holds_what_one_step_can(data: Path) -> None:
    rows = [attention("bfloat16", b, (32, 8, 128), 0.1, isl=n) for b, n in ((4, 4096), (8, 4096))]
    path = write(data, "h100_sxm/attention/vllm/0.24.0/context_attention", rows)
    found = read(data, "attention_prefill.bf16")
    assert found[["chunks", "chunk", "context"]].to_numpy().tolist() == [[4, 4096, 0]]
    pd.read_parquet(path).drop(columns="window_size").to_parquet(path)  # as vLLM 0.14's tables are
    assert len(read(data, "attention_prefill.bf16")) == 1


def test_moe_rows_are_routed_as_routers_do(data: Path) -> None:
    rows = [moe("bfloat16", 16, name) for name in ("balanced", "power_law_1.01", "power_law_1.2")]
    rows += [moe("fp8_block", 16, "power_law_1.2", tp=2), moe("fp8_block", 16, "power_law_1.2", ep=2)]
    rows += [moe("fp8", 16, "power_law_1.2"), moe("bfloat16", 16, "power_law_1.2", tp=32)]
    write(data, "h100_sxm/moe/vllm/0.24.0/moe", rows)
    assert sorted(read(data, "moe.bf16")["skew"]) == [1.01, 1.2]
    assert read(data, "moe.fp8_block").inner.tolist() == [384]


def test_all_reduces_are_those_in_graphs_in_bytes_of_the_newest_version(data: Path) -> None:
    write(data, "h100_sxm/comm/vllm/0.9.0/custom_allreduce", [all_reduce(64)])
    rows = [all_reduce(1024), all_reduce(1024, "vLLM_custom_eager"), all_reduce(1 << 28)]
    write(data, "h100_sxm/comm/vllm/0.24.0/custom_allreduce", rows)
    assert read(data, "all_reduce").bytes.tolist() == [2048]  # their sizes are BF16 elements


def test_rows_that_are_left_out_are_counted_by_their_reason(data: Path) -> None:
    fast = [gemm("fp8_block", m, 8192, 8192, LAUNCH) for m in (1, 8, 16)] + [gemm("fp8_block", 4096, 8192, 8192, 0.4)]
    others = [gemm("bfloat16", 1, 1024, 1024, 0.005), gemm("bfloat16", 1, 512, 4096, 0.005)]
    unknown = gemm("nvfp4", 1, 4096, 4096, 0.01)
    kept = gemm("bfloat16", 64, 4096, 4096, 0.02)
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", [kept, *others, *fast, unknown])
    write(data, "h100_sxm/comm/vllm/0.24.0/custom_allreduce", [all_reduce(64), all_reduce(64, "vLLM_custom_eager")])
    write(data, "h100_sxm/moe/vllm/0.24.0/moe", [moe("bfloat16", 16, "balanced", ep=2), moe("fp8", 16, "balanced")])
    tables = read_tables(H100, data, "0.12.0")
    assert tables.counts == {
        "gemm.bf16": {"kept": 1, "sizes that no modelled engine runs": 1, "weights in the L2 cache": 1},
        "linear.fp8_block": {"kept": 1, "shorter than the host's launch": 3},
        "moe.bf16": {"kept": 0, "balanced routing": 1},  # the first reason of two
        "all_reduce": {"kept": 1, "outside of CUDA graphs": 1},
    }
    assert tables.rows.kernel.value_counts().to_dict() == {k: x["kept"] for k, x in tables.counts.items() if x["kept"]}


def test_a_table_that_was_timed_with_launch_gaps_is_flagged(data: Path) -> None:
    sizes = [1024 * 2**i for i in range(5)]
    rows = [gemm("fp8_block", m, n, 8192, LAUNCH * (1 + n / 1e6)) for m in (1, 16, 64) for n in sizes]
    rows += [gemm("bfloat16", m, n, 8192, 0.003 + n * 8192 / 2e9) for m in (1, 16, 64) for n in sizes]
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", rows)
    flat = read_tables(H100, data, "0.12.0").flat
    assert flat == {"linear.fp8_block": "60 us with the least traffic, 60 with 4 times"}


def test_the_imports_that_we_ship_say_what_they_left_out_and_which_of_their_tables_are_flat() -> None:
    for gpu, flat in (("h100", ["linear.fp8_block"]), ("b200", ["linear.fp8_block"]), ("a100", [])):
        (path,) = (profiles_path() / find_gpu(gpu).name).glob("vllm-0.[12]4.0/profile.json")
        profile = Profile.from_json(path.read_text())
        assert list(profile.flat) == flat
        assert profile.table_rows is not None
        assert all(counts["kept"] > 0 for counts in profile.table_rows.values())


def test_a_gpu_without_tables_and_a_table_without_a_column_are_named(data: Path) -> None:
    assert importable(data) == (H100,)
    with pytest.raises(ConfigError, match="no vLLM tables of h20; it has: h100_sxm"):
        read_tables(find_gpu("h20"), data, "0.12.0")
    write(data, "h100_sxm/gemm/vllm/0.24.0/gemm", [{"m": 1, "latency": 1.0}])
    with pytest.raises(ProfileError, match=r"gemm_perf.parquet has no column 'gemm_dtype'"):
        read_tables(H100, data, "0.12.0")


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError, match=r"type: pip install 'fp8plan\[aic\]'"):
        import_all([], [], [], tmp_path)
    assert not list(tmp_path.iterdir())


# A GPU whose kernels are the cost functions themselves, with these coefficients.
TRUE = {"gemm.bf16.bandwidth_efficiency": 0.7, "gemm.bf16.launch_seconds": 5e-6, "attention.bf16.launch_seconds": 7e-6}


def made_up(card: str = "h100") -> Tables:
    prior = datasheet_profile(find_gpu(card))
    truth = replace(prior, coefficients=prior.coefficients | TRUE)
    sizes = (2048, 4096, 8192)
    gemms = product((1, 8, 64, 512, 4096), sizes, sizes)
    rows = [{"kernel": "gemm.bf16", "m": m, "n": n, "k": k} for m, n, k in gemms]
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    calls = product((1, 16, 256), (64, 4096))
    rows += [{"kernel": "attention_decode.bf16", "batch": b, "context": c, **heads} for b, c in calls]
    frame = pd.DataFrame(rows)
    for observed in observe(frame.assign(seconds=1.0), find_gpu(card)):
        frame.loc[frame.kernel == observed.kernel, "seconds"] = observed.predict(truth).seconds
    return Tables(frame.assign(backend="a"), "0.24.0", "made up")


def test_an_import_finds_the_coefficients_and_keeps_what_was_not_timed() -> None:
    profile = import_profile(H100, made_up())
    prior = datasheet_profile(H100)
    for name, value in TRUE.items():
        assert profile.coefficients[name] == pytest.approx(value, rel=0.02)
        assert profile.notes[name] == "fitted to made up"
    for name in ("host.step_seconds", "moe.bf16.launch_seconds", "quantise.launch_seconds"):
        assert profile.coefficients[name] == prior.coefficients[name]
        assert profile.log_covariance[name][name] == prior.log_covariance[name][name]
        assert profile.notes[name] == prior.notes[name]
    assert (profile.kind, profile.engine_version, profile.model_error) == ("imported", "0.24.0", prior.model_error)
    assert max(profile.residuals[kernel] for kernel in ("gemm.bf16", "attention_decode.bf16")) < 0.02
    assert profile.hull is not None
    assert profile.hull["gemm.bf16"] == {"m": (1, 4096), "n": (2048, 8192), "k": (2048, 8192)}
    assert profile.hull["attention_decode.bf16"]["decode_kv_tokens"] == (64, 256 * 4096)
    assert Profile.from_json(profile.to_json()) == profile


def test_a_trial_becomes_the_model_error_and_is_told() -> None:
    trial = Trial("h200_sxm", {"gemm.bf16": 0.05}, (float(np.log(1.3)), float(np.log(0.9))))
    profile = import_profile(H100, made_up(), trial)
    assert profile.model_error == OWN_ERROR
    total = np.hypot(profile.shared_error, OWN_ERROR)
    assert total == pytest.approx(np.sqrt((np.log(1.3) ** 2 + np.log(0.9) ** 2) / 2))
    text = "tested on h200_sxm: makespan of 2 measured rollouts, mean error 20.0%, worst 30.0%"
    assert profile.source == f"made up; {text}; median error of kernels: gemm.bf16 5.0%"


@pytest.fixture
def package(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """aiconfigurator-core as pip installs it, with tables of an H100 and an H200; the folder of its tables."""
    site = tmp_path_factory.mktemp("site")
    tables = site / "aiconfigurator_core" / "systems" / "data"
    tables.mkdir(parents=True)
    (site / "aiconfigurator_core" / "__init__.py").touch()
    (site / "aiconfigurator_core-0.12.0.dist-info").mkdir()
    facts = "Metadata-Version: 2.4\nName: aiconfigurator-core\nVersion: 0.12.0\n"
    (site / "aiconfigurator_core-0.12.0.dist-info" / "METADATA").write_text(facts)
    for name in ("h100_sxm", "h200_sxm"):
        rows = [
            gemm("bfloat16", m, n, 8192, 1e3 * (4e-6 + n * 8192 * 2 / 2.5e12)) for m in (1, 8) for n in (4096, 8192)
        ]
        write(tables, f"{name}/gemm/vllm/0.24.0/gemm", rows)
    monkeypatch.delitem(sys.modules, "aiconfigurator_core", raising=False)
    monkeypatch.syspath_prepend(str(site))
    return tables


def test_profiles_are_written_where_they_are_found(package: Path, tmp_path: Path) -> None:
    assert find_data() == (package, "0.12.0")
    output = tmp_path / "profiles"
    ((path, profile),) = import_all([], [], [], output)  # of the measured GPU there is none
    assert path == profile_path(output, "h100_sxm", "0.24.0")
    same, said = load_profile(H100, "0.24.0", profiles_dir=output)
    assert same == profile.on_unknown_host()
    assert len(said) == 1
    assert "not measured here" in said[0]
    assert "not tested" in profile.source
    assert "uncalibrated" in profile.label
    near, said = load_profile(H100, "0.26.0", profiles_dir=output)
    assert near.model_error == pytest.approx(np.hypot(profile.model_error, VERSION_SD))
    assert ["wider interval" in said[0], "not measured here" in said[1]] == [True, True]
    measured = replace(profile, kind="calibrated", engine_version="0.20.0")
    import_aic._written(measured, output)
    assert load_profile(H100, "0.26.0", profiles_dir=output)[0].engine_version == "0.20.0"


def test_what_cannot_be_imported_is_refused_before_anything_is_written(package: Path, tmp_path: Path) -> None:
    output = tmp_path / "profiles"
    with pytest.raises(ConfigError, match="h200_sxm was measured"):
        import_all(["h100", "h200"], [], [], output)
    with pytest.raises(ConfigError, match="no vLLM tables of b200"):
        import_all(["h100", "b200"], [], [], output)
    with pytest.raises(ConfigError, match="--rollouts"):
        import_all(["h100"], [], [tmp_path / "gemm.jsonl"], output)
    assert not output.exists()


def test_the_import_of_an_h200_is_tested_on_our_measurements(package: Path, tmp_path: Path) -> None:
    lines = (profiles_path() / "h200_sxm/vllm-0.26.0/first_look/rollouts.jsonl").read_text().splitlines()
    (tmp_path / "rollouts.jsonl").write_text(lines[0] + "\n")
    timing = '{"kernel": "gemm.bf16", "m": 1, "n": 8192, "k": 8192, "seconds": 6e-5}\n'
    (tmp_path / "gemm.jsonl").write_text(timing + '{"kernel": "attention_mixed.bf16", "batch": 1, "seconds": 3e-6}\n')
    assert read_rows(tmp_path / "gemm.jsonl").kernel.tolist() == ["gemm.bf16"]
    ((_, profile),) = import_all(["h100"], [tmp_path / "rollouts.jsonl"], [tmp_path / "gemm.jsonl"], tmp_path / "out")
    assert "tested on h200_sxm: makespan of 1 measured rollouts" in profile.source
    assert "median error of kernels: gemm.bf16" in profile.source
    assert 0 < profile.model_error != datasheet_profile(H100).model_error
    (tmp_path / "other.jsonl").write_text(lines[0].replace('"h200_sxm"', '"h100_sxm"') + "\n")
    with pytest.raises(ConfigError, match="no rollout on h200_sxm"):
        import_all(["h100"], [tmp_path / "other.jsonl"], [], tmp_path / "none")


def flat_of(seconds: Any, m: Any = 1) -> dict[str, str]:
    n = 1024 * 2 ** np.arange(6)
    return flat_kernels(pd.DataFrame({"kernel": "gemm.bf16", "m": m, "n": n, "k": 4096, "seconds": seconds}))


def test_a_time_that_does_not_grow_with_the_traffic_is_flat() -> None:
    grows = 2e-6 + 1024 * 2 ** np.arange(6) * 4096 * 2 / 4.8e12  # launch and memory of an H200
    assert flat_of(grows) == {}
    assert flat_of(60e-6) == {"gemm.bf16": "60 us with the least traffic, 60 with 4 times"}
    assert list(flat_of([90e-6, *[60e-6] * 5])) == ["gemm.bf16"]  # a slow first launch does not hide it
    assert flat_of(60e-6, m=4096) == {}  # math bounds these
    same = pd.DataFrame({"kernel": "gemm.bf16", "m": [1, 2, 4], "n": 4096, "k": 4096, "seconds": 1e-5})
    assert flat_kernels(same) == {}  # they all read as much
    assert flat_kernels(same.assign(kernel="norm")) == {}


def test_our_own_timings_are_not_flat() -> None:
    rows = kernel_rows(profiles_path() / "h200_sxm" / "vllm-0.26.0" / "kernels")
    assert flat_kernels(rows) == {}
