"""Tables of docs/evidence/weight_sync.md: the time that weight syncs and their quantiser take on H200s with vLLM 0.26.

    python -m benchmarks.tables.weight_sync

Medians of committed measurements (profiles/README.md), a model's on one machine. The first sync, which also checks the
manifest and tries the shortcut, has a row of its own, and the first of each other kind, which may compile, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.markdown import table
from fp8plan.jsonl import rows as read

MEASURED = Path(__file__).resolve().parents[2] / "profiles" / "h200_sxm" / "vllm-0.26.0" / "weight_sync"
FAMILIES = MEASURED.with_name("families") / "weight_sync.jsonl"
Row = dict[str, Any]

GROUPS = {"8b": "Qwen3-8B, all linears", "experts_up": "384 experts of 768 x 2048"}
QUANTISERS: dict[str, dict[str, Any]] = {
    "fp8plan, Triton": {"kernel": "quantise.triton", "rounding": "compiled", "warps": 8},
    "verl 0.9.1, Triton": {"kernel": "quantise.verl"},
    "vLLM 0.26, compiled": {"kernel": "quantise.vllm", "mode": "compiled", "timer": "launched"},
    "vLLM 0.26, eager": {"kernel": "quantise.vllm", "mode": "eager"},
}
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")


def quantiser_table(rows: Sequence[Row]) -> str:
    """GB/s of every quantiser, and as a share of the fastest copy."""
    copy = max(row["gb_per_s"] for row in rows if row["kernel"] == "copy")
    lines = []
    for name, wanted in QUANTISERS.items():
        cells = []
        for group in GROUPS:
            (row,) = (r for r in rows if wanted | {"group": group} == {k: r.get(k) for k in [*wanted, "group"]})
            cells.append(f"{row['gb_per_s']:,.0f} GB/s, {row['gb_per_s'] / copy:.0%}")
        lines.append([name, *cells])
    lines.append(["a copy, read and written", f"{copy:,.0f} GB/s", *[""] * (len(GROUPS) - 1)])
    return table(("quantiser", *GROUPS.values()), lines)


def sync_table(rows: Sequence[Row], quantise: Sequence[Row]) -> str:
    """Seconds of a whole sync by every way, per model."""
    copy = max(row["gb_per_s"] for row in quantise if row["kernel"] == "copy") * 1e9
    measured = [[row for row in rows if row["model"] == model] for model in MODELS]
    columns = [column(own, copy) for own in measured]
    lines = ((name, *(cells[name] for cells in columns)) for name in columns[0])
    where = "; ".join(f"{_short(model)} {_machine(own)}" for model, own in zip(MODELS, measured, strict=True))
    return f"{table(('sync of', *map(_short, MODELS)), lines)}\n\nEach column is one machine's: {where}."


def column(rows: Sequence[Row], copy: float) -> dict[str, str]:
    """Row of the table -> cell, from rows of one model; copy: bytes/s."""
    here, other = ([row for row in rows if row["mode"] == mode] for mode in ("inprocess", "multiprocess"))
    steps, natives, fp8s, stocks, checked, bare = (
        _of(here, what)[1:] for what in ("step", "native", "fp8_in", "stock", "checked", "bare")
    )
    apart, guard = _of(other, "step")[1:], _of(here, "guard")[1:]
    stock = median(row["seconds"] for row in stocks)
    bytes_in = steps[0]["report"]["bytes"]
    weights = _of(here, "engine")[0]["engine"]["weight_bytes"]
    whole, without = _seconds(checked, _total), _seconds(checked, _without_kv)
    fp8, native = _seconds(fp8s, _without_kv), _seconds(natives, _without_kv)
    return {
        "BF16 tensors sent": f"{bytes_in / 1e9:.1f} GB",
        "vLLM's `reload_weights`": f"{stock:.3f} s",
        "fp8plan, all left to vLLM's layerwise reload": f"{native:.3f} s",
        "fp8plan, written in place": f"**{without:.3f} s** ({stock / without:.0f}x)",
        "fp8plan, E4M3 and scales sent": f"{fp8:.3f} s ({stock / fp8:.0f}x)",
        "KV scales measured on 16 sequences": f"{median(_of(here, 'scales')[0]['recalibrate_s']):.3f} s",
        "fp8plan, in place, with KV scales": f"**{whole:.3f} s** ({stock / whole:.1f}x)",
        "the same, engine in a process of its own": f"{_seconds(apart, _total):.3f} s" if apart else "not measured",
        "floor: every byte read and written once": f"{(bytes_in + weights) / copy:.3f} s",
        "self-check": _share(_check_s(checked, bare), whole),
        "guard, after a rollout": _share(median(row["observe_s"] for row in guard), whole),
        "in the RL steps measured, with KV scales": f"{_seconds(steps, _total):.3f} s",
        "first sync (manifest tried, kernels compiled)": f"{_total(_of(here, 'step')[0]):.1f} s",
        "weight error, RMS": f"{median(row['report']['weight_error'] for row in steps):.2%}",
    }


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _machine(rows: Sequence[Row]) -> str:
    (source,) = {row["source"] for row in rows}
    return f"of {rows[-1]['date'][:10]} (boot {rows[-1]['boot'][:8]}, source {source})"


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _share(seconds: float, whole: float) -> str:
    """Milliseconds, and of a whole sync."""
    return f"{1e3 * seconds:.1f} ms, {seconds / whole:.1%}"


def _seconds(rows: Sequence[Row], part: Callable[[Row], float]) -> float:
    return median(part(row) for row in rows)


def _total(row: Row) -> float:
    return float(row["report"]["seconds"]["total"])


def _check_s(checked: Sequence[Row], bare: Sequence[Row]) -> float:
    """Seconds of the self-check as the worker timed it; for older rows, the difference from syncs without it."""
    if "check" in checked[0]["report"]["seconds"]:
        return _seconds(checked, lambda row: float(row["report"]["seconds"]["check"]))
    return _seconds(checked, _checking) - _seconds(bare, _checking)


def _checking(row: Row) -> float:
    """Seconds of the phases that choose, take and compare samples. KV scales vary by more than the check takes."""
    return float(sum(row["report"]["seconds"][phase] for phase in ("begin", "load", "finish")))


def _without_kv(row: Row) -> float:
    return _total(row) - float(row["report"]["seconds"]["kv_scales"])


def transfer_table(rows: Sequence[Row]) -> str:
    """A sync of Qwen3-8B from one GPU to another over NCCL, by what is sent."""
    copy = next(row["gb_per_s"] for row in rows if row["what"] == "copy")
    names = {
        "bf16_large": "BF16, broadcasts of 1 GiB",
        "bf16": "BF16, of 256 MiB",
        "fp8_block": "E4M3 and scales, of 256 MiB",
    }
    quantise = median(row["seconds"] for row in rows if row["what"] == "quantise")
    lines = []
    for kind, name in names.items():
        syncs = [row for row in rows if row["what"] == "sync" and row["format"] == kind][1:]
        load = median(row["report"]["seconds"]["load"] for row in syncs) + (quantise if kind == "fp8_block" else 0)
        sent = syncs[0]["report"]["bytes"] / 1e9
        whole = median(_total(row) for row in syncs) + (quantise if kind == "fp8_block" else 0)
        speed = (f"{sent / load:.0f}", f"{sent / load / copy:.0%}")
        lines.append((name, f"{sent:.1f}", f"{load:.3f} s", *speed, f"{whole:.3f} s"))
    return table(("sent", "GB", "transfer and quantising", "GB/s", "of a copy", "whole sync"), lines)


def family_table(rows: Sequence[Row]) -> str:
    """A line for each model with parts of other families: seconds of its syncs, and how many tensors are equal."""
    lines = []
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["precision"]) == (model, precision)]
        steps, stock = _of(mine, "step"), _seconds(_of(mine, "stock")[1:], lambda row: float(row["seconds"]))
        whole, [equal] = _seconds(steps[1:], _total), [x for x in _of(mine, "equal") if x["other"] == "stock"]
        same, sent = equal["tensors"] - len(equal["differ"]), steps[0]["report"]["bytes"]
        restored = all(row["equal"] for row in _of(mine, "rollback"))
        seconds = (f"{stock:.1f} s", f"**{whole:.1f} s** ({stock / whole:.1f}x)", f"{_total(steps[0]):.1f} s")
        after = (f"{same:,} of {equal['tensors']:,}", "all as before" if restored else "some differ")
        lines.append((f"{_short(model)}, {precision}", f"{sent / 1e9:.0f} GB", *seconds, *after))
    return table(
        ("model, precision", "sent", "reload", "in place", "first", "tensors equal", "after a rollback"), lines
    )


def tables() -> dict[str, str]:
    """Name of a block -> its text."""
    quantise = read(MEASURED / "quantize.jsonl")
    return {
        "syncs of families": family_table(read(FAMILIES)),
        "quantisers": quantiser_table(quantise),
        "syncs": sync_table(read(MEASURED / "weight_sync.jsonl"), quantise),
        "transfers": transfer_table(read(MEASURED / "transfer.jsonl")),
    }


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
