"""What a weight sync and its quantiser take on an H200, from the committed measurements.

    python benchmarks/weight_sync_table.py profiles/h200_sxm/vllm-0.26.0/weight_sync

Medians, of the last machine that measured a row. A first sync, which also checks the manifest and tries the shortcut,
and the first of each other kind, which may compile, are left out of them and named apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "profiles" / "h200_sxm" / "vllm-0.26.0" / "weight_sync"
Row = dict[str, Any]

GROUPS = {"8b": "Qwen3-8B, all linears", "experts_up": "384 experts of 768 x 2048"}
QUANTISERS: dict[str, dict[str, Any]] = {
    "fp8plan, Triton": {"kernel": "quantise.triton", "rounding": "compiled", "warps": 8},
    "verl 0.9.1, Triton": {"kernel": "quantise.verl"},
    "vLLM 0.26, compiled": {"kernel": "quantise.vllm", "mode": "compiled", "timer": "launched"},
    "vLLM 0.26, eager": {"kernel": "quantise.vllm", "mode": "eager"},
}
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def quantiser_table(rows: Sequence[Row]) -> str:
    """GB/s of every quantiser, and as a share of the fastest copy."""
    copy = max(row["gb_per_s"] for row in rows if row["kernel"] == "copy")
    heads = " | ".join(GROUPS.values())
    lines = [f"| quantiser | {heads} |", "|---|" + "---|" * len(GROUPS)]
    for name, wanted in QUANTISERS.items():
        cells = []
        for group in GROUPS:
            (row,) = (r for r in rows if wanted | {"group": group} == {k: r.get(k) for k in [*wanted, "group"]})
            cells.append(f"{row['gb_per_s']:,.0f} GB/s, {row['gb_per_s'] / copy:.0%}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| a copy, read and written | {copy:,.0f} GB/s |" + " |" * (len(GROUPS) - 1)])


def sync_table(rows: Sequence[Row], quantise: Sequence[Row]) -> str:
    """Seconds of a whole sync by every way, per model."""
    copy = max(row["gb_per_s"] for row in quantise if row["kernel"] == "copy") * 1e9
    columns = [_column([row for row in rows if row["model"] == model], copy) for model in MODELS]
    lines = ["| sync of | " + " | ".join(model.rpartition("/")[2] for model in MODELS) + " |", "|---|---|---|"]
    lines += [f"| {name} | " + " | ".join(column[name] for column in columns) + " |" for name in columns[0]]
    return "\n".join(lines)


def _column(rows: Sequence[Row], copy: float) -> dict[str, str]:
    here = [row for row in rows if row["mode"] == "inprocess"]
    stock = median(row["seconds"] for row in _of(here, "stock")[1:])
    steps, bare, checked = (_of(here, what)[1:] for what in ("step", "bare", "checked"))
    bytes_in = steps[0]["report"]["bytes"]
    weights = next(row["engine"]["weight_bytes"] for row in here if row["what"] == "engine")
    whole = _seconds(checked, _total)
    without = _seconds(checked, _without_kv)
    check = _seconds(checked, _checking) - _seconds(bare, _checking)
    scales = _of(here, "scales")[-1]["recalibrate_s"]
    fp8 = _seconds(_of(here, "fp8_in")[1:], _without_kv)
    native = _seconds(_of(here, "native")[1:], _without_kv)
    other = [row for row in rows if row["mode"] == "multiprocess"]
    return {
        "BF16 tensors sent": f"{bytes_in / 1e9:.1f} GB",
        "vLLM's `reload_weights`": f"{stock:.3f} s",
        "fp8plan, all left to vLLM's layerwise reload": f"{native:.3f} s",
        "fp8plan, written in place": f"**{without:.3f} s** ({stock / without:.0f}x)",
        "fp8plan, E4M3 and scales sent": f"{fp8:.3f} s ({stock / fp8:.0f}x)",
        "KV scales measured on 16 sequences": f"{median(scales):.3f} s",
        "fp8plan, in place, with KV scales": f"**{whole:.3f} s** ({stock / whole:.1f}x)",
        "the same, engine in a process of its own": f"{_seconds(_of(other, 'step')[1:], _total):.3f} s"
        if other
        else "not measured",
        "floor: every byte read and written once": f"{(bytes_in + weights) / copy:.3f} s",
        "self-check": f"{1e3 * check:.1f} ms, {check / whole:.1%}",
        "in the RL steps measured, with KV scales": f"{_seconds(steps, _total):.3f} s",
        "first sync (manifest tried, kernels compiled)": f"{_total(_of(here, 'step')[0]):.1f} s",
        "weight error, RMS": f"{median(row['report']['weight_error'] for row in steps):.2%}",
    }


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    """Rows of one kind, as the last machine measured them; of the steps themselves where a kind was not measured."""
    found = [row for row in rows if row["what"] == what] or [row for row in rows if row["what"] == "step"]
    return [row for row in found if row["boot"] == found[-1]["boot"]]


def _seconds(rows: Sequence[Row], part: Callable[[Row], float]) -> float:
    return median(part(row) for row in rows)


def _total(row: Row) -> float:
    return float(row["report"]["seconds"]["total"])


def _checking(row: Row) -> float:
    """Where samples are taken and compared."""
    return float(row["report"]["seconds"]["load"] + row["report"]["seconds"]["finish"])


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
    lines = ["| sent | GB | transfer and quantising | GB/s | of a copy | whole sync |", "|---|---|---|---|---|---|"]
    for kind, name in names.items():
        syncs = [row for row in rows if row["what"] == "sync" and row["format"] == kind][1:]
        load = median(row["report"]["seconds"]["load"] for row in syncs) + (quantise if kind == "fp8_block" else 0)
        sent = syncs[0]["report"]["bytes"] / 1e9
        whole = median(_total(row) for row in syncs) + (quantise if kind == "fp8_block" else 0)
        lines.append(
            f"| {name} | {sent:.1f} | {load:.3f} s | {sent / load:.0f} | {sent / load / copy:.0%} | {whole:.3f} s |"
        )
    return "\n".join(lines)


def tables(folder: Path = MEASURED) -> dict[str, str]:
    quantise = read(folder / "quantize.jsonl")
    return {
        "quantisers": quantiser_table(quantise),
        "syncs": sync_table(read(folder / "weight_sync.jsonl"), quantise),
        "transfers": transfer_table(read(folder / "transfer.jsonl")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=MEASURED)
    print("\n\n".join(tables(parser.parse_args().folder).values()))


if __name__ == "__main__":
    main()
