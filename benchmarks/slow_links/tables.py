"""Print the tables of docs/evidence/weight_sync.md on slow links, from the committed measurements.

python -m benchmarks.slow_links.tables
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.tables import markdown
from fp8plan.jsonl import rows

RESULTS: Final = Path(__file__).parents[1] / "results"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return list(rows(RESULTS / f"slow_links_{name}.jsonl"))


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3g} MB"


def bits() -> str:
    """Syncs of small models: how many were patched, and how many kept steps have the bits of a sync of everything."""
    heads = ["model", "precision", "way", "patched", "bits equal", "patches / all weights"]
    cells = [
        [
            row["kind"],
            row["precision"],
            row["way"],
            f"{row['patched']} of {row['steps']}",
            f"{row['equal']} of {row['kept']}",
            f"{median(row['patch_bytes']) / row['whole_bytes']:.0%}",
        ]
        for row in read("bits")
    ]
    return markdown.table(heads, cells)


def steps() -> str:
    """Bytes of a step's sync of a real model, in several encodings: medians over steps."""
    logged = read("steps")
    model = next(row for row in logged if row["what"] == "model")
    steps = [row for row in logged if row["what"] == "step"]
    fp8, bf16, dense = model["fp8_values"], model["bf16_values"], model["fp8_dense_bytes"]

    def mid(name: str) -> float:
        return median(row[name] for row in steps)

    parts = {
        "dense BF16": (2.0 * fp8, 2.0 * bf16),
        "dense FP8": (float(dense), 2.0 * bf16),
        "verl's places and BF16 values": (mid("verl_fp8_bytes"), mid("verl_bytes") - mid("verl_fp8_bytes")),
        "fp8plan's patches": (mid("fp8_bytes"), mid("bf16_bytes")),
        "the entropy of what changed": (mid("fp8_entropy_bits") / 8, None),
    }
    cells = [
        [name, mb(own), f"{own / fp8:.2g}", f"{dense / own:.3g}", "-" if rest is None else mb(rest)]
        for name, (own, rest) in parts.items()
    ]
    heads = [f"sync, {len(steps)} steps", "linears", "byte a weight", "times fewer than dense FP8", "other tensors"]
    return markdown.table(heads, cells)


def top_k() -> str:
    """Sparse syncs beside exact ones: bytes, residual and added KL as the steps go on."""
    logged = [row for row in read("steps") if row["what"] == "top_k"]
    exact = {row["step"]: row for row in read("steps") if row["what"] == "step"}
    heads = ["step", "share sent", "of the exact bytes", "residual", "KL added", "without error feedback"]
    cells = [
        [
            str(row["step"]),
            f"{row['share']:.0e}",
            f"{_bytes(row) / _bytes(exact[row['step']]):.0%}",
            f"{row['residual']:.1e}",
            f"{row['kl']:.1e}",
            f"{row['kl_without_feedback']:.1e}",
        ]
        for row in logged
        if "kl" in row
    ]
    return markdown.table(heads, cells)


def _bytes(row: Row) -> int:
    return int(row["fp8_bytes"] + row["bf16_bytes"])


def links() -> str:
    """Seconds of a whole sync over shaped links, and of that the link's."""
    by_mode: dict[str, dict[float, Row]] = defaultdict(dict)
    for row in read("links"):
        by_mode[row["mode"]][row["gigabits"]] = row
    rates = sorted({rate for measured in by_mode.values() for rate in measured})
    heads = ["sync", "bytes", "encode + apply, s", *(f"{rate:g} Gb/s, s" for rate in rates)]
    cells = []
    for mode, measured in by_mode.items():
        first = measured[rates[0]]
        own = first["encode_s"] + first["apply_s"]
        seconds = [f"{own + measured[rate]['link_s']:.2f} ({measured[rate]['link_s']:.2f})" for rate in rates]
        cells.append([mode, mb(first["bytes"]), f"{own:.2f}", *seconds])
    return markdown.table(heads, cells)


def kernels() -> str:
    """Seconds and bytes of the kernels of a delta sync on a GPU, over 32 matrices of 12,288 x 4,096."""
    rows = [row for row in read("gpu") if row["what"] == "kernel" and row["model"] == "Qwen/Qwen3-8B"]
    cells = [
        [row["kernel"], row["dtype"], f"{row['seconds'] * 1e3:.2f}", f"{row['nbytes'] / row['seconds'] / 1e12:.2f}"]
        for row in rows
        if (row["count"], row["shape"]) == (32, [12288, 4096])
    ]
    return markdown.table(["kernel", "values", "ms", "TB/s read and written"], cells)


def dense_syncs() -> str:
    """Seconds of syncs of all weights into an engine in the trainer's process, on one GPU."""
    by_mode: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in read("gpu"):
        if row["what"] in ("bf16", "fp8") and row["repeat"] > 0:  # the first one compiles kernels
            by_mode[row["model"], row["what"]].append(row)
    cells = []
    for (model, mode), some in by_mode.items():
        quantise = median(row.get("quantise_s", 0.0) for row in some)
        seconds = median(row["wall_s"] for row in some)
        cells.append([model, mode, f"{some[0]['bytes'] / 1e9:.1f} GB", f"{quantise:.3f}", f"{seconds:.3f}"])
    return markdown.table(["model", "sent", "bytes", "trainer quantises, s", "sync, s"], cells)


def tables() -> dict[str, str]:
    """The tables by the name of their block."""
    return {
        "bits after fifty steps": bits(),
        "bytes of a step": steps(),
        "sparse syncs": top_k(),
        "shaped links": links(),
        "kernels of a delta": kernels(),
        "dense syncs on a GPU": dense_syncs(),
    }


def main() -> None:
    print("\n\n".join(f"{name}\n\n{text}" for name, text in tables().items()))


if __name__ == "__main__":
    main()
