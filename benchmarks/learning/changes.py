"""Change ratios: the share of a layer's values that one update changed, in BF16 and as the engine's E4M3.

    python -m benchmarks.learning.changes [RAW.jsonl ...]                 the table, from raw logs or the committed file
    python -m benchmarks.learning.changes RAW.jsonl ... --output FILE     the raw logs' counts, added up over runs

A sparse weight sync is to be designed from these. BF16 is what a trainer sends; E4M3 are the codes of blockwise
quantisation (128 x 128 of each checkpoint tensor, FP32 scales), which change less often than the values they stand for,
and then many at once in a block whose scale moved. Raw logs have a line for each step and kind of layer, with counts,
so that runs can be added up.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.tables import markdown
from fp8plan.jsonl import line
from fp8plan.jsonl import rows as read

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]
COMMITTED: Final = Path(__file__).with_name("changes.jsonl")

# Kind of layer -> what the name of its tensors holds. The first that fits counts.
KINDS: Final = {
    "embedding": r"embed_tokens",
    "lm_head": r"lm_head",
    "norm": r"norm",
    "router": r"mlp\.gate\.",
    "experts, gate and up": r"experts\.\d+\.(gate|up)_proj",
    "experts, down": r"experts\.\d+\.down_proj",
    "q, k, v": r"(q|k|v)_proj",
    "o": r"o_proj",
    "gate and up": r"(gate|up)_proj",
    "down": r"down_proj",
}
QUANTISED: Final = ("experts, gate and up", "experts, down", "q, k, v", "o", "gate and up", "down")
COUNTS: Final = ("runs", "values", "bf16", "e4m3", "blocks", "scales", "e4m3_where_scale_kept")


def kind_of(name: str) -> str:
    """The kind of layer that a tensor of this name belongs to; "other" if none of KINDS fits."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Kind of layer -> counts of what differs between two sets of BF16 tensors.

    values: all; bf16: those that changed; e4m3: codes that changed; blocks, scales: blocks of 128 x 128, and those
    whose scale changed; e4m3_where_scale_kept: codes that changed in the other blocks. Where blockwise FP8 is not used
    the last four are 0.
    """
    found = defaultdict[str, dict[str, int]](lambda: dict.fromkeys(COUNTS[1:], 0))
    for name, old in before.items():
        counts, kind = found[kind_of(name)], kind_of(name)
        counts["values"] += old.numel()
        counts["bf16"] += int((old != after[name]).sum())
        if kind in QUANTISED and old.dim() == 2:
            for key, value in _codes(old, after[name]).items():
                counts[key] += value
    return dict(found)


def _codes(before: Tensor, after: Tensor) -> dict[str, int]:
    import torch

    from fp8plan.runtime.apply.quantize.targets import quantized

    (old, old_scale), (new, new_scale) = quantized([before, after])
    codes, scales = old.view(torch.uint8) != new.view(torch.uint8), old_scale != new_scale
    moved = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return {
        "e4m3": int(codes.sum()),
        "blocks": scales.numel(),
        "scales": int(scales.sum()),
        "e4m3_where_scale_kept": int((codes & ~moved).sum()),
    }


def log_rows(counts: Mapping[str, Mapping[str, int]], **setting: Any) -> list[Row]:
    """The lines of a step for the raw log. setting: what the table is by: policy, learning_rate, step"""
    return [setting | {"kind": kind, "runs": 1} | dict(found) for kind, found in counts.items()]


def added(rows: Iterable[Row]) -> list[Row]:
    """The counts of all runs at each step, added up: a row for each policy, learning rate, step and kind of layer."""
    sums = dict[tuple[Any, ...], Row]()
    for row in rows:
        key = (row["policy"], row["learning_rate"], row["step"], row["kind"])
        if key not in sums:
            setting = dict(zip(("policy", "learning_rate", "step", "kind"), key, strict=True))
            sums[key] = setting | dict.fromkeys(COUNTS, 0)
        for name in COUNTS:
            sums[key][name] += row[name]
    return [sums[key] for key in sorted(sums)]


def table(rows: Iterable[Row]) -> str:
    """Mean change ratio by policy, learning rate and kind of layer, over steps and runs, in Markdown."""
    sums = defaultdict[tuple[Any, ...], dict[str, int]](lambda: dict.fromkeys(COUNTS, 0))
    for row in rows:
        total = sums[row["policy"], row["learning_rate"], row["kind"]]
        for name in COUNTS:
            total[name] += row[name]
    heads = ("policy", "learning rate", "layers", "steps", "BF16", "E4M3", "E4M3 where the scale stays", "scales")
    lines = []
    order = [*KINDS, "other"]
    for (policy, rate, kind), total in sorted(sums.items(), key=lambda x: (x[0][0], x[0][1], order.index(x[0][2]))):
        fp8 = [_share(total[name], total["values"]) for name in ("e4m3", "e4m3_where_scale_kept")]
        fp8 = [*fp8, _share(total["scales"], total["blocks"])] if total["blocks"] else ["-"] * 3
        lines.append([policy, f"{rate:.0e}", kind, str(total["runs"]), _share(total["bf16"], total["values"]), *fp8])
    return markdown.table(heads, lines)


def committed() -> str:
    """The table of the committed counts: of SmolLM2 on a CPU, and larger policies on GPUs. Tiny ones have none."""
    return table(row for row in read(COMMITTED) if not row["policy"].startswith("tiny-"))


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.2g}%" if 0 < share < 10 else f"{share:.0f}%"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.changes")
    parser.add_argument("raw", nargs="*", type=Path, help="changes.jsonl of runs; default: the committed file")
    parser.add_argument("--output", type=Path, help="where to write the raw logs' counts, added up over runs")
    given = parser.parse_args(words)
    rows = [row for path in given.raw or [COMMITTED] for row in read(path)]
    if given.output:
        given.output.write_bytes(b"".join(map(line, added(rows))))
    print(table(rows) if given.raw else committed())


if __name__ == "__main__":
    main()
