"""Findings of a probe as rows of the table that fp8plan.model.risk.expected is fitted to."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import precision
from fp8plan.model.risk.fit import OBSERVATIONS
from fp8plan.model.risk.setting import has_qkv_bias, setting_of

if TYPE_CHECKING:
    from fp8plan.runtime.probe.results import Probe, Probed

SOURCE: Final = "fp8plan-probe"  # one key: leave-one-source-out leaves out all that this method measured


def columns() -> list[str]:
    """Columns of the committed table (fp8plan/model/risk/data/README.md explains them)."""
    with OBSERVATIONS.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def observations(found: Probe) -> list[dict[str, str]]:
    """A row for each precision that was measured, with its interval as the range.

    weight: 1 on a GPU; 0, not fitted, on a CPU, whose blockwise FP8 is reference arithmetic and whose FP8 KV cache
    (vLLM 0.30) rounds towards zero, and with log-probs that are not finite. Raises ConfigError for a model whose shape
    fp8plan does not know.
    """
    shape = ModelShape.from_hf(found.model)
    return [_row(found, one, shape) for one in found.precisions.values() if one.figures is not None]


def append_observations(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Append rows to a table that has the committed one's columns, or to a new file.

    Raises ConfigError for other columns, and for a file that cannot be written.
    """
    try:
        _append(path, rows)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"cannot append to {path}: {why}; allowed: a table of observations, or a new file") from None


def _append(path: Path, rows: Sequence[dict[str, str]]) -> None:
    wanted = columns()
    new = not path.exists() or not path.stat().st_size
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
        if header != wanted:
            found = ",".join(header)[:200]
            raise ConfigError(f"{path} has the columns {found}; allowed: {','.join(wanted)}, or a new file")
    open_ended = not new and not path.read_bytes().endswith((b"\n", b"\r"))  # as some editors leave the last line
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write("\n" if open_ended else "")
        writer = csv.DictWriter(file, wanted, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _row(found: Probe, one: Probed, shape: ModelShape) -> dict[str, str]:
    from fp8plan.version import __version__

    preset, kl, facts, figures = precision(one.precision), one.kl_k3, one.facts or {}, one.figures or {}
    setting = setting_of(shape, preset)
    partly = preset.weights != "bf16" and bool(shape.left_in_bf16())  # the fit counts every layer as FP8
    fitted = not find_gpu(found.gpu).is_cpu and not one.invalid and kl.low > 0 and not partly
    values: dict[str, Any] = {
        "source": SOURCE,
        "reference": f"measured by fp8plan probe {__version__}: vLLM {found.engine_version} on {found.gpu}; "
        f"{found.reference.replace(',', ';')}; {found.date}",
        "model": Path(found.model).name if Path(found.model).is_dir() else found.model,
        "params_b": f"{shape.num_parameters / 1e9:.3g}",
        "moe": int(setting.moe),
        "layers": f"{setting.layers:g}",
        "kv_layers": "" if setting.kv_layers == setting.layers else f"{setting.kv_layers:g}",
        "qk_norm": int(setting.qk_norm),
        "attention_bias": int(has_qkv_bias(shape)),
        "weights": preset.weights,
        "kv": preset.kv,
        "kv_calibrated": int(facts.get("kv_scales") != "1.0") if preset.kv == "fp8" else "",
        "e8m0": int(bool(facts.get("e8m0"))) if preset.weights == "fp8_block" else "",
        "quantity": "k3",
        "scope": "total",
        "kind": "range",
        "kl_low": f"{kl.low:.4g}",
        "kl": "",
        "kl_high": f"{kl.high:.4g}",
        "weight": int(fitted),
        "primary": "P",
        "note": f"k3 {kl.value:.4g}; raw ESS {figures['ess_raw'].value:.4f}; {one.sequences} responses; "
        f"{one.tokens} tokens; temperature {found.settings.temperature:g}",
    }
    return {name: str(values[name]) for name in columns()}
