"""Table of the time that mismatch and correction of a batch take on an H200, from committed measurements.

    python -m benchmarks.tables.correction_gpu

`git show 4f9b9518:benchmarks/gpu/correction.py` made them. Rows with the path "fused" are of Triton kernels that were
deleted.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import markdown
from fp8plan import jsonl

RESULTS = Path(__file__).parents[1] / "results" / "correction_h200.jsonl"
FORMS = {"padded_int64": "padded, mask int64", "padded_bool": "padded, mask bool", "packed": "packed"}
FUNCTIONS = {"pack": "pack", "measure": "measure", "correct": "correct, token TIS", "step": "Monitor.step, all of it"}


def table() -> str:
    """Table of the time that a caller waits for, by form, and what it was measured on."""
    rows = jsonl.rows(RESULTS)
    timed = {(row["what"], row["form"]): row for row in rows if row["what"] in FUNCTIONS and row.get("path") != "fused"}
    lines = []
    for what, name in FUNCTIONS.items():
        lines.append((name, *(f"{1e3 * timed[what, form]['seconds']:.1f} ms" for form in FORMS)))
    machine = next(row for row in rows if row["what"] == "machine")
    about = (
        f"{timed['step', 'packed']['tokens']:,} tokens, padded 1,536 x 20,480; one {machine['gpu_product']}, driver "
        f"{machine['driver']}, torch {machine['torch_version']}, {machine['date'][:10]}."
    )
    return "\n\n".join([markdown.table(("call", *FORMS.values()), lines), about])


if __name__ == "__main__":
    print(table())
