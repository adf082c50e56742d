"""The errors of single kernels by the H200's profile: the table of profiles/README.md.

    python -m benchmarks.kernel_errors             prints the committed table
    python -m benchmarks.kernel_errors --update    fits the profile again for the table, which takes some minutes

`unfitted` gives what the committed profile alone says: all columns but the errors of fits that leave a shape out. A
test holds it against the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.calibrate.kernel_rows import observe
from fp8plan.model.calibrate.profile_of import KernelError, calibrate, is_held_out, kernel_rows
from fp8plan.model.hardware import find_gpu
from fp8plan.model.profile.library import datasheet_profile, load_profile, profiles_path

RESULTS = Path(__file__).parent / "results" / "kernel_errors.jsonl"
CARD, VERSION = find_gpu("h200"), "0.26.0"
FOLDER = profiles_path() / CARD.name / f"vllm-{VERSION}"
SHARES = ("before", "fitted", "held_out", "worst")  # fields of KernelError
DIGITS = 3  # of the shares that are committed


def committed() -> dict[str, Mapping[str, Any]]:
    """Kernel -> its committed row: the fields of KernelError."""
    return {row["kernel"]: row for row in jsonl.rows(RESULTS)}


def rounded(error: KernelError) -> dict[str, Any]:
    """The row of a kernel, as it is committed."""
    fields = {name: getattr(error, name) for name in ("kernel", "rows", "unseen")}
    return fields | {name: round(getattr(error, name), DIGITS) for name in SHARES}


def unfitted() -> dict[str, dict[str, float]]:
    """Kernel -> the columns that need no fit; `held_out` and `worst` only for a kernel with unseen rows."""
    rows = kernel_rows(FOLDER / "kernels")
    kept = ~is_held_out(rows)
    profile, sheet = load_profile(CARD, VERSION)[0], datasheet_profile(CARD, VERSION)
    errors = {}
    for timed in observe(rows[kept], CARD):
        before, after = (float(np.median(np.abs(np.expm1(timed.errors(each))))) for each in (sheet, profile))
        errors[timed.kernel] = {"rows": timed.seconds.size, "unseen": 0, "before": before, "fitted": after}
    for timed in observe(rows[~kept], CARD):
        off = np.abs(np.expm1(timed.errors(profile)))
        errors[timed.kernel] |= {"unseen": off.size, "held_out": float(np.median(off)), "worst": float(off.max())}
    return errors


def table() -> str:
    """The committed rows in Markdown."""
    lines = [
        (kernel, str(row["rows"]), str(row["unseen"]), *(f"{row[name]:.1%}" for name in SHARES))
        for kernel, row in committed().items()
    ]
    return markdown(("kernel", "rows", "unseen", "before", "after", "held out", "worst"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the table")
    if parser.parse_args().update:
        rows = map(rounded, calibrate(FOLDER, CARD, VERSION).errors)
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
