"""The mismatch of four precisions, measured on an H200 on a small model, from committed files.

    python -m benchmarks.tables.probe profiles/h200_sxm/vllm-0.26.0/probe            # a model that was trained there
    python -m benchmarks.tables.probe profiles/h200_sxm/vllm-0.26.0/probe/smollm2    # SmolLM2-135M-Instruct

What made them: `bash benchmarks/h200.sh FOLDER probe`, and `fp8plan probe` (profiles/README.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "profiles" / "h200_sxm" / "vllm-0.26.0" / "probe"
SMOLLM2 = MEASURED / "smollm2"
PRECISIONS = ("bf16", "fp8_kv", "fp8_block", "fp8_block+fp8_kv")


def read(folder: Path) -> dict[str, Any]:
    """precision -> what the probe said of it; and "training" -> of the model, if it was trained there."""
    names = [*PRECISIONS, *(["training"] if (folder / "training.json").is_file() else [])]
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def table(folder: Path = MEASURED) -> str:
    """A row for each precision, and what was measured with."""
    found = read(folder)
    rows = {name: found[name]["precisions"][0] for name in PRECISIONS}
    floor = rows["bf16"]["figures"]["kl_k3"]["value"]
    heads = ("precision", "KL k3 (90%)", "of bf16's", "raw ESS", "tokens beyond 2x (90%)", "expected (90%)", "tokens")
    lines = []
    for name, row in rows.items():
        kl, ess, beyond = (row["figures"][figure] for figure in ("kl_k3", "ess_raw", "ratio_above_2"))
        figures = (_spread(kl), f"{kl['value'] / floor:.1f}x", f"{ess['value']:.4f}", _shares(beyond))
        lines.append((name, *figures, _spread(row["predicted"]), f"{row['tokens']:,}"))
    return f"{markdown.table(heads, lines)}\n\n{_about(found, rows)}"


def _about(found: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    training, probe = found.get("training"), found["bf16"]
    model = probe["model"]
    if training is not None:
        model = f"{training['parameters'] / 1e6:.0f}M parameters, trained to a loss of {training['last_loss']:.2f}"
    scales = sorted({str(row["facts"]["kv_scales"]) for row in rows.values()} - {"None"})
    return (
        f"{model}; {probe['prompts']} prompts x {probe['samples']} samples of at most {probe['max_tokens']} tokens, "
        f"temperature {probe['temperature']:g}; KV scales from {', '.join(scales)}; vLLM {probe['engine_version']} on "
        f"one {probe['gpu']} against {probe['reference']}, {probe['date']}."
    )


def _spread(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['value']:.2e} ({found['low']:.2e}-{found['high']:.2e})"


def _shares(found: Mapping[str, float]) -> str:
    return f"{found['value']:.3%} ({found['low']:.3%}-{found['high']:.3%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MEASURED)
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
