"""Append what `fp8plan probe --json` measured to a table of observations, which tools/risk_report.py fits.

    python tools/observations.py probe.json fp8plan/model/risk/data/mismatch_observations.csv

Each precision and trainer is a row, with the interval as the range. Layers kept in BF16 have no rows. The weight of a
row is 1 on a GPU. It is 0 (not fitted) with log-probs that are not finite, and on a CPU: there blockwise FP8 is
reference arithmetic, and the FP8 KV cache (vLLM 0.30) rounds towards zero.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import find_precision
from fp8plan.model.risk.expected import OBSERVATIONS
from fp8plan.model.risk.remedies import BF16, Remedies
from fp8plan.model.risk.theory import setting_of
from fp8plan.version import __version__

SOURCE: Final = "fp8plan-probe"  # one key, so that leave-one-source-out leaves out all rows of this method


def columns() -> list[str]:
    """Columns of the committed table (fp8plan/model/risk/data/README.md explains them)."""
    with OBSERVATIONS.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def observations(probe: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a probe, given as `Probe.to_dict` makes it.

    Raises ConfigError for a model with a shape that fp8plan does not know, and for a probe of a sync.
    """
    if probe["after"] is not None:
        raise ConfigError("a probe of a sync is no observation of a precision; allowed: one without after")
    shape = ModelShape.from_hf(probe["model"])
    whole = [row for row in probe["precisions"] if row["error"] is None and not any(row["remedies"]["keep_bf16"])]
    return [_row(probe, probed, shape) for probed in whole]


def append(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append rows to a table that has the committed one's columns, or to a new file. Raises ConfigError for others."""
    wanted = columns()
    new = not path.exists() or not path.stat().st_size
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
        if header != wanted:
            raise ConfigError(
                f"{path} has the columns {','.join(header)[:200]}; allowed: {','.join(wanted)}, or a new file"
            )
    open_ended = not new and not path.read_bytes().endswith((b"\n", b"\r"))  # as some editors leave the last line
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write("\n" if open_ended else "")
        writer = csv.DictWriter(file, wanted, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _row(probe: Mapping[str, Any], probed: Mapping[str, Any], shape: ModelShape) -> dict[str, str]:
    preset, facts, remedies = find_precision(probed["precision"]), probed["facts"] or {}, Remedies(**probed["remedies"])
    kl, ess = probed["figures"]["kl_k3"], probed["figures"]["ess_raw"]["value"]
    setting = setting_of(shape, preset, remedies=remedies)
    has_fp8_linears = preset.weights != BF16 or remedies.trainer_precision != BF16
    partly = has_fp8_linears and bool(shape.left_in_bf16())  # the fit counts every layer as FP8
    fitted = not find_gpu(probe["gpu"]).is_cpu and not probed["invalid"] and kl["low"] > 0 and not partly
    values: dict[str, Any] = {
        "source": SOURCE,
        "reference": f"measured by fp8plan probe {__version__}: vLLM {probe['engine_version']} on {probe['gpu']}; "
        f"{probe['reference'].replace(',', ';')}; {probe['date']}",
        "model": Path(probe["model"]).name if Path(probe["model"]).is_dir() else probe["model"],
        "params_b": f"{shape.num_parameters / 1e9:.3g}",
        "moe": int(setting.moe),
        "layers": f"{setting.layers:g}",
        "kv_layers": "" if setting.kv_layers == setting.layers else f"{setting.kv_layers:g}",
        "qk_norm": int(setting.qk_norm),
        "attention_bias": int(any(part.qkv_bias for part, _ in shape.parts_of(Attention))),
        "weights": preset.weights,
        "kv": preset.kv,
        "kv_calibrated": int(facts.get("kv_scales") != "1.0") if preset.kv == "fp8" else "",
        "e8m0": int(bool(facts.get("e8m0"))) if preset.weights == "fp8_block" else "",
        "trainer_precision": "" if remedies.trainer_precision == BF16 else remedies.trainer_precision,
        "router_replay": 1 if remedies.router_replay else "",
        "quantity": "k3",
        "scope": "total",
        "kind": "range",
        "kl_low": f"{kl['low']:.4g}",
        "kl": "",
        "kl_high": f"{kl['high']:.4g}",
        "weight": int(fitted),
        "primary": "P",
        "note": f"k3 {kl['value']:.4g}; raw ESS {ess:.4f}; {probed['sequences']} responses; {probed['tokens']} tokens; "
        f"temperature {probe['temperature']:g}",
    }
    return {name: str(values[name]) for name in columns()}


if __name__ == "__main__":
    measured, table = map(Path, sys.argv[1:])
    append(table, observations(json.loads(measured.read_text(encoding="utf-8"))))
