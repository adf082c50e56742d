"""README's table of syncs, from rows whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.weight_sync import column, family_table

GB = 1_000_000_000
MODEL = "Qwen/Qwen3-8B"


def row(what: str, boot: str = "b" * 36, mode: str = "inprocess", **more: Any) -> dict[str, Any]:
    return {"what": what, "model": MODEL, "mode": mode, "boot": boot, "date": "2026-11-22T01:02:03Z"} | more


def synced(what: str, load: float, kv: float = 0.05, *, first: float = 9.0, **more: Any) -> list[dict[str, Any]]:
    """The rows of a first sync, which no median may count, and of three more.

    The median of the three takes `load`, 0.002 + 0.003 and `kv` seconds.
    """
    seconds = [{"begin": 0.002, "load": x, "finish": 0.003, "kv_scales": kv} for x in (first, load, load, load + 0.1)]
    reports = [
        {"seconds": one | {"total": sum(one.values())}, "bytes": 16 * GB, "weight_error": 0.026} for one in seconds
    ]
    return [row(what, report=report, **more) for report in reports]


def run(step: float = 0.02, **more: Any) -> list[dict[str, Any]]:
    """The rows of a run that has all that a column needs."""
    return [
        row("engine", engine={"weight_bytes": 8 * GB}, **more),
        *synced("step", step, **more),
        row("scales", recalibrate_s=[0.03, 0.04, 0.9], **more),
        *synced("fp8_in", 0.01, **more),
        *synced("native", 0.3, **more),
        *(row("stock", seconds=seconds, **more) for seconds in (7.0, 0.5, 0.5)),
    ]


EXTRAS = [
    *synced("checked", 0.0211),
    *synced("bare", 0.02, kv=0.9),  # KV scales that happen to take longer are no cost of the check
    row("guard", observe_s=9.0, judge_s=9.0),
    *(row("guard", observe_s=seconds) for seconds in (0.001, 0.0005, 0.0006)),
]


def test_a_column_by_hand() -> None:
    found = column([*run(), *EXTRAS], 4000e9)
    assert found == {
        "BF16 tensors sent": "16.0 GB",
        "vLLM's `reload_weights`": "0.500 s",
        "fp8plan, all left to vLLM's layerwise reload": "0.305 s",
        "fp8plan, written in place": "**0.026 s** (19x)",
        "fp8plan, E4M3 and scales sent": "0.015 s (33x)",
        "KV scales measured on 16 sequences": "0.040 s",
        "fp8plan, in place, with KV scales": "**0.076 s** (6.6x)",
        "the same, engine in a process of its own": "not measured",
        "floor: every byte read and written once": "0.006 s",
        "self-check": "1.1 ms, 1.4%",
        "guard, after a rollout": "0.6 ms, 0.8%",
        "in the RL steps measured, with KV scales": "0.075 s",
        "first sync (manifest tried, kernels compiled)": "9.1 s",
        "weight error, RMS": "2.60%",
    }


def test_a_family_is_a_line_that_says_whether_all_is_equal() -> None:
    native = row("equal", tensors=1200, differ=["a"], other="native")
    equal, rollback = row("equal", tensors=1200, differ=[], other="stock"), row("rollback", equal=True)
    whole = [one | {"precision": "fp8_block"} for one in (*run(), equal, native, rollback)]
    good = "| Qwen3-8B, fp8_block | 16 GB | 0.5 s | **0.1 s** (6.7x) | 9.1 s | 1,200 of 1,200 | all as before |"
    assert family_table(whole).splitlines()[-1] == good
    worse = row("equal", tensors=1200, differ=["a", "b"], other="stock"), row("rollback", equal=False)
    bad = [one | {"precision": "bf16"} for one in (*run(), *worse)]
    both = family_table([*whole, *bad]).splitlines()
    assert both[-2] == good
    assert both[-1].endswith("| 1,198 of 1,200 | some differ |")
