"""The mismatch of four precisions, measured on an H200 on a small model, from committed files.

    python -m benchmarks.tables.probe
    python -m benchmarks.tables.probe predict     # writes what is expected of small models with remedies
    python -m benchmarks.tables.probe remedies    # what was measured with them, beside what was expected

`fp8plan probe` made them (profiles/README.md).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.tables import markdown
from fp8plan import jsonl
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.kept import OUTPUTS
from fp8plan.model.precision import PRESETS
from fp8plan.model.risk.expected import Z90, mismatch_risk
from fp8plan.model.risk.remedies import BF16, BLOCK, Remedies
from fp8plan.model.risk.theory import SMALL_LANGUAGE_FACTOR
from tools.risk_report import leave_one_source_out, read_observations, rounding_errors

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "profiles" / "h200_sxm" / "vllm-0.26.0" / "probe"
WITH_REMEDIES = ROOT / "profiles" / "h200_sxm" / "vllm-0.33.0" / "probe" / "remedies"
SMALL = {"SmolLM2-135M": MEASURED / "smollm2", "Gemma 3 270M": MEASURED / "gemma"}
TOKENS = 2000.0  # of a response; the theory's KL per token does not depend on it
PRECISIONS = ("bf16", "fp8_kv", "fp8_block", "fp8_block+fp8_kv")
LEARNING = ROOT / "benchmarks" / "learning" / "gpus"
REMEDIES = {
    "none": Remedies(),
    "router replay": Remedies(router_replay=True),
    "trainer fp8_block": Remedies(trainer_precision=BLOCK),
    "keep_bf16 1 1": Remedies(keep_bf16=(1, 1)),
    "keep_bf16 1 1 o_proj": Remedies(keep_bf16=(1, 1, OUTPUTS)),
    "trainer fp8_block, keep_bf16 1 1": Remedies(trainer_precision=BLOCK, keep_bf16=(1, 1)),
    "router replay, trainer fp8_block": Remedies(router_replay=True, trainer_precision=BLOCK),
}


def read(folder: Path) -> dict[str, Any]:
    """precision -> what the probe said of it; and "training" -> of the model, if it was trained there."""
    paths = {name: folder / f"{name}.json" for name in (*PRECISIONS, "training")}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def table() -> str:
    """A row for each precision, and what was measured with."""
    probed = read(MEASURED)
    rows = _rows(probed)
    floor = rows["bf16"]["figures"]["kl_k3"]["value"]
    heads = ("precision", "KL k3 (90%)", "of bf16's", "raw ESS", "tokens beyond 2x (90%)", "expected (90%)", "tokens")
    lines = []
    for name, row in rows.items():
        kl, ess, beyond = (row["figures"][figure] for figure in ("kl_k3", "ess_raw", "ratio_above_2"))
        figures = (_spread(kl), f"{kl['value'] / floor:.1f}x", f"{ess['value']:.4f}", _shares(beyond))
        lines.append((name, *figures, _spread(row["predicted"]), f"{row['tokens']:,}"))
    return f"{markdown.table(heads, lines)}\n\n{_about(probed, rows)}"


def shape_of(folder: Path) -> ModelShape:
    """Return the shape of a small language model that was probed: the folder has its config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ModelShape.from_config(config, folder.name, str(folder))


def theory(folder: Path) -> dict[str, float]:
    """Return precision -> KL that the theory foresees of a small language model, without their factor."""
    shape = shape_of(folder)
    risks = {name: mismatch_risk(shape, PRESETS[name], [TOKENS], e8m0=False) for name in _rows(read(folder))}
    return {name: risk.kl_k3 / SMALL_LANGUAGE_FACTOR for name, risk in risks.items()}


def log_errors(folder: Path) -> dict[str, float]:
    """Return precision -> log of the measured KL over that of the theory."""
    rows, foreseen = _rows(read(folder)), theory(folder)
    return {name: log(row["figures"]["kl_k3"]["value"] / foreseen[name]) for name, row in rows.items()}


def small_models() -> str:
    """KL foreseen and measured of the small language models, also as each is foreseen from the other alone.

    A model's factor is that of its mean log error. "left out": the theory times the other model's factor.
    """
    errors = {model: log_errors(folder) for model, folder in SMALL.items()}
    heads = ("model", "precision", "KL k3 (90%)", "raw ESS", "theory", "measured over it", "left out", "over it")
    lines, residuals = [], []
    for model, folder in SMALL.items():
        shift, foreseen = fmean(fmean(of.values()) for other, of in errors.items() if other != model), theory(folder)
        for name, row in _rows(read(folder)).items():
            kl, off = row["figures"]["kl_k3"], errors[model][name]
            residuals.append(off - shift)
            cells = (_spread(kl), f"{row['figures']['ess_raw']['value']:.4f}", f"{foreseen[name]:.2e}")
            left_out = (f"{foreseen[name] * exp(shift):.2e}", f"{exp(off - shift):.1f}x")
            lines.append((model, name, *cells, f"{exp(off):.1f}x", *left_out))
    plain = [off for of in errors.values() for off in of.values()]
    factors = ", ".join(f"{exp(fmean(of.values())):.2f} for {model}" for model, of in errors.items())
    about = "\n\n".join(_about(probed, _rows(probed)) for probed in map(read, SMALL.values()))
    off = f"Errors (RMS, largest): the theory {_worst(plain)}; each model left out {_worst(residuals)}."
    return f"{markdown.table(heads, lines)}\n\nFactors: {factors}. {off}\n\n{about}"


def measured_without() -> dict[str, tuple[ModelShape, dict[str, float]]]:
    """Model -> its shape, and precision -> KL measured without a remedy. That of the MoE is of its training's start."""
    models = {}
    for name, folder in SMALL.items():
        rows = _rows(read(folder)).items()
        models[name] = shape_of(folder), {key: row["figures"]["kl_k3"]["value"] for key, row in rows}
    runs = {row["arm"]: row["kl_first"] for row in jsonl.rows(LEARNING / "h100.jsonl") if row["policy"] == "moe"}
    models["moe"] = shape_of(LEARNING / "shapes" / "moe"), {BF16: runs["bf16"], "fp8_block+fp8_kv": runs["fp8"]}
    return models


def predictions() -> list[dict[str, str]]:
    """A row for each small model, precision and remedy: the expected KL with its band, and the anchored KL.

    The anchored KL is a measured one times the expected ratio. It was measured with the same roundings on either side,
    or, where the MoE lacks these, with all.
    """
    rows = []
    for model, (shape, measured) in measured_without().items():
        for name, remedies in REMEDIES.items():
            if remedies.router_replay and model != "moe":
                continue
            for precision in PRECISIONS:
                anchor = precision
                if remedies.trainer_precision == BLOCK:
                    anchor = BLOCK if PRESETS[precision].kv == "bf16" else "fp8_block+fp8_kv"
                if anchor not in measured:
                    anchor = "fp8_block+fp8_kv"
                kl, plain = (
                    mismatch_risk(shape, PRESETS[key], [TOKENS], e8m0=False, remedies=each)
                    for key, each in ((precision, remedies), (anchor, Remedies()))
                )
                cells = {"model": model, "precision": precision, "remedies": name}
                figures = {"kl_k3": kl.kl_k3, "low": kl.kl_k3_low, "high": kl.kl_k3_high}
                figures["anchored"] = measured[anchor] * kl.kl_k3 / plain.kl_k3
                rows.append(cells | {key: f"{value:.3g}" for key, value in figures.items()} | {"anchor": anchor})
    return rows


def measured_with() -> dict[tuple[str, str, str], float]:
    """(model, precision, remedies) -> measured KL of those that have a prediction."""
    folders = dict(zip((*SMALL, "moe"), ("smollm2", "gemma", "moe"), strict=True))
    names = {remedies: name for name, remedies in REMEDIES.items()}
    measured = {}
    for (model, folder), precision in product(folders.items(), PRECISIONS):
        probed = json.loads((WITH_REMEDIES / folder / f"{precision}.json").read_text(encoding="utf-8"))
        for row in probed["precisions"]:
            fields = row["remedies"]
            remedies = Remedies(fields["router_replay"], fields["trainer_precision"], tuple(fields["keep_bf16"]))
            name = names.get(remedies)
            if name is not None:
                measured[model, precision, name] = row["figures"]["kl_k3"]["value"]
    return measured


def with_remedies() -> str:
    """Measured KL with each remedy over the anchored one of predicted.csv, and how many are within a factor of 2."""
    with (MEASURED / "predicted.csv").open(encoding="utf-8") as file:
        predicted = {(row["model"], row["precision"], row["remedies"]): row for row in csv.DictReader(file)}
    measured = measured_with()
    lines = []
    for model, name in dict.fromkeys((model, name) for model, _, name in measured):
        cells = []
        for precision in PRECISIONS:
            key = model, precision, name
            if key in measured:
                kl, anchored = measured[key], float(predicted[key]["anchored"])
                cells.append(f"{kl:.1e}, {kl / anchored:.2f}x")
            else:
                cells.append("-")
        lines.append((model, name, *cells))
    words = []
    for model in dict.fromkeys(model for model, _, _ in measured):
        mine = {key: kl for key, kl in measured.items() if key[0] == model}
        near = sum(0.5 <= kl / float(predicted[key]["anchored"]) <= 2 for key, kl in mine.items())
        words.append(f"{near} of {len(mine)} for {model}")
    inside = sum(float(predicted[key]["low"]) < kl < float(predicted[key]["high"]) for key, kl in measured.items())
    about = f"Within a factor of 2 of the anchored KL: {', '.join(words)}. "
    about += f"Inside the band of the theory alone: {inside} of {len(measured)}."
    return f"{markdown.table(('model', 'remedies', *PRECISIONS), lines)}\n\n{about}"


def published_pairs() -> str:
    """Published runs with a remedy and those that they are compared with, each predicted without its source."""
    left = leave_one_source_out(read_observations(), rounding_errors())
    heads = ("source", "model", "rollout", "trainer", "router replay", "KL k3", "expected (90%)")
    run = [(row, row.observation, row.observation.setting) for row in left]
    paired = {(o.source, o.model) for _, o, setting in run if setting.router_replay or setting.trainer != BF16}
    lines = []
    for row, o, setting in run:
        if (o.source, o.model) in paired and o.kl is not None:
            low, high = (o.kl * exp(sign * Z90 * o.spread) for sign in (-1, 1))
            kl = f"{low:.1e} to {high:.1e}" if o.spread else f"{o.kl:.1e}"
            ends = [f"{row.predicted * exp(sign * row.halfwidth):.1e}" for sign in (-1, 1)]
            replay = ("yes" if setting.router_replay else "no") if setting.moe else "-"
            cells = (o.source, o.model, setting.rollout, setting.trainer, replay, kl)
            lines.append((*cells, f"{row.predicted:.1e} ({' to '.join(ends)})"))
    return markdown.table(heads, lines)


def write_predictions(path: Path = MEASURED / "predicted.csv") -> None:
    rows = predictions()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def scales_of(folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(precision, scales, kernel) -> what a probe said of a small language model whose FP8 cache had those."""
    paths = sorted((folder / "scales").glob("*.json"))
    probes = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    return {_three(stem): probed["precisions"][0] for stem, probed in probes.items()}


def _three(stem: str) -> tuple[str, str, str]:
    precision, scales, kernel = stem.split(".")
    return precision, scales, kernel


def unit_log_ratios() -> list[float]:
    """Log of the KL with K and V scales of 1.0 over that with measured ones, a value for each small language model.

    Both are of FlashAttention 3 with weights in BF16: other kernels differ in more than their scales.
    """
    ratios = []
    for folder in SMALL.values():
        measured = scales_of(folder)
        unit, calibrated = (
            measured["fp8_kv", scales, "FLASH_ATTN"]["figures"]["kl_k3"]["value"] for scales in ("unit", "calibrated")
        )
        ratios.append(log(unit / calibrated))
    return ratios


def unit_sd() -> float:
    """Standard deviation of the log ratio of a further model, for which 90% of a Student t's prediction lie inside.

    The prediction interval of a further value is mean +- t sd sqrt(1 + 1/n), with n - 1 degrees of freedom.
    """
    from scipy.stats import t

    ratios = unit_log_ratios()
    half = float(t.ppf(0.95, len(ratios) - 1)) * stdev(ratios) * (1 + 1 / len(ratios)) ** 0.5
    return half / Z90


def fixed_scales() -> str:
    """KL of small language models with K and V scales of 1.0 and with measured ones, by kernel."""
    heads = ("model", "precision", "scales", "kernel", "KL k3 (90%)", "raw ESS", "tokens")
    lines = []
    for model, folder in SMALL.items():
        for (precision, scales, kernel), row in scales_of(folder).items():
            figures, words = row["figures"], {"unit": "1.0", "calibrated": "measured"}
            cells = (_spread(figures["kl_k3"]), f"{figures['ess_raw']['value']:.4f}", f"{row['tokens']:,}")
            lines.append((model, precision, words[scales], kernel, *cells))
    ratios = ", ".join(f"{exp(ratio):.2f} for {model}" for model, ratio in zip(SMALL, unit_log_ratios(), strict=True))
    about = f"KL at 1.0 over that with measured scales, FlashAttention 3, weights in BF16: {ratios}. "
    about += f"A further model is expected within {exp(Z90 * unit_sd()):.1f} times either way (90%)."
    return f"{markdown.table(heads, lines)}\n\n{about}"


def _worst(errors: Sequence[float]) -> str:
    """RMS and largest of log errors, as factors."""
    rms = exp(fmean(error**2 for error in errors) ** 0.5)
    return f"{rms:.1f}x, {exp(max(map(abs, errors))):.1f}x"


def _rows(probed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: probed[name]["precisions"][0] for name in PRECISIONS if name in probed}


def _about(probed: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    training, probe = probed.get("training"), probed["bf16"]
    model = probe["model"].partition(", from ")[0]  # the script that made it is gone
    if training is not None:
        model = f"{training['parameters'] / 1e6:.0f}M parameters, trained to a loss of {training['last_loss']:.2f}"
    scales = sorted({str(row["facts"]["kv_scales"]) for row in rows.values()} - {"None"})
    return (
        f"{model}; {probe['prompts']} prompts x {probe['samples']} samples of at most {probe['max_tokens']} tokens, "
        f"temperature {probe['temperature']:g}; KV scales from {', '.join(scales)}; vLLM {probe['engine_version']} on "
        f"one {probe['gpu']} against {probe['reference']}, {probe['date']}."
    )


def _spread(probed: Mapping[str, float] | None) -> str:
    return "-" if probed is None else f"{probed['value']:.2e} ({probed['low']:.2e}-{probed['high']:.2e})"


def _shares(probed: Mapping[str, float]) -> str:
    return f"{probed['value']:.3%} ({probed['low']:.3%}-{probed['high']:.3%})"


if __name__ == "__main__":
    if sys.argv[1:] == ["predict"]:
        write_predictions()
    if sys.argv[1:] == ["remedies"]:
        print(with_remedies())
    else:
        print(table(), small_models(), fixed_scales(), sep="\n\n")
