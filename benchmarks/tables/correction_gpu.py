"""Table of the time that mismatch and correction of a batch take on an H200, from committed measurements.

    python -m benchmarks.tables.correction_gpu

`bash benchmarks/h200.sh FOLDER correction` made them. of_copy_same_bytes compares with a copy of as many bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from fp8plan import jsonl

RESULTS = Path(__file__).parents[1] / "results" / "correction_h200.jsonl"
KERNELS = {  # name -> what it does
    "gather": "mask and both sides, padded, to packed tokens",
    "weigh": "weights of token TIS and their sums",
    "scatter": "weights to the padded form",
    "measure": "mismatch: sums, histogram",
}
FUNCTIONS = {"pack": "pack", "measure": "measure", "correct": "correct, token TIS", "step": "Monitor.step, all of it"}
Row = dict[str, Any]


def kernel_table(rows: list[Row]) -> str:
    """Each fused kernel alone, beside a copy."""
    found = {r["kernel"]: r for r in rows if r.get("form") == "padded_bool" and "kernel" in r and not r.get("tried")}
    lines = []
    for name, does in KERNELS.items():
        row = found[name]
        shares = (f"{row['of_copy']:.0%}", f"{row['of_copy_same_bytes']:.0%}")
        lines.append((f"{name}: {does}", f"{1e6 * row['seconds']:.0f} us", f"{row['gb_per_s']:,.0f}", *shares))
    return markdown.table(("kernel", "takes", "GB/s", "of a copy", "of a copy of as many bytes"), lines)


def function_table(rows: list[Row]) -> str:
    """Table of the time that a caller waits for, by implementation."""
    found = {(r["what"], r["form"], r["path"]): r for r in rows if r.get("path")}
    forms = {"padded_int64": "padded, mask int64", "packed": "packed"}
    heads = [f"{form}, {way}" for form in forms.values() for way in ("fused", "torch's operations")]
    lines = []
    for what, name in FUNCTIONS.items():
        cells = [f"{1e3 * found[what, form, way]['seconds']:.1f} ms" for form in forms for way in ("fused", "torch")]
        lines.append((name, *cells))
    return markdown.table(("call", *heads), lines)


def table(path: Path = RESULTS) -> str:
    """Both, and what they were measured on."""
    rows = jsonl.rows(path)
    machine = next(r for r in rows if r["what"] == "machine")
    copy = max(r["gb_per_s"] for r in rows if r["what"] == "copy")
    tokens = next(r["tokens"] for r in rows if "kernel" in r)
    about = (
        f"{tokens:,} tokens, padded 1,536 x 20,480; copy {copy:,.0f} GB/s; one {machine['gpu_product']}, driver "
        f"{machine['driver']}, torch {machine['torch_version']}, triton {machine['triton_version']}, "
        f"{machine['date'][:10]}."
    )
    return "\n\n".join([kernel_table(rows), function_table(rows), about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    print(table(parser.parse_args().file))


if __name__ == "__main__":
    main()
