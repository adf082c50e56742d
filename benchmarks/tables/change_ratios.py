"""Predicted shares of changed values (fp8plan.model.weight_changes) beside logged ones.

    python -m benchmarks.tables.change_ratios    prints each kind of layer, and a table of docs/evidence/weight_sync.md

Logs: those of the policies of docs/evidence/thresholds.md, and of random Qwen3 models that learnt by policy gradients
to sample tokens of the lower half of their vocabulary, with AdamW and Muon. A random model's weights are normal with a
spread that was measured before each logged step. The other policies' are samples of their checkpoints; those of qk-norm
and moe were not kept, so a spread of 0.02 is assumed. A ratio is predicted / measured. "Corrected" predicts the later
logged steps, times the measured / predicted of the first one, as a plan with --observed does.

The scripts that made the logs are benchmarks/change_ratios.py and benchmarks/learning/changes.py of commit 4f9b9518.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.learning.policies.tasks import STOP, VOCABULARY
from benchmarks.tables import markdown
from fp8plan.jsonl import rows as read
from fp8plan.model.weight_changes import changed, one_step
from fp8plan.model.weights import POINTS, SPREAD, Weights, normal

ROOT: Final = Path(__file__).parents[1]
LOGS: Final = (ROOT / "learning" / "changes.jsonl", ROOT / "results" / "change_ratios.jsonl")
SAMPLES: Final = ROOT / "results" / "change_weights.jsonl"
PLACES: Final = (np.arange(256) + 0.5) / 256  # of the quantiles in SAMPLES
TABLES: Final = ("embedding", "lm_head")
NOT_KEPT: Final = ("qk-norm", "moe")  # policies whose checkpoints are gone
# Rows of the embedding whose tokens a task uses, of all. STOP ends a response, so it is no input. SmolLM2's embedding
# is tied to lm_head, in which all rows have gradients, and the random models' prompts have all tokens.
ROWS: Final = STOP / VOCABULARY


class Compared(NamedTuple):
    """Shares of one kind of layer in one format ("bf16" or "e4m3"), as means over the logged steps.

    corrected: ratio of the later steps, corrected by the first one
    """

    policy: str
    rate: float
    kind: str
    format: str
    spread: float
    measured: float
    predicted: float
    corrected: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def group(self) -> tuple[str, str, str]:
        what = self.kind if self.kind in TABLES else "others"
        weights = "assumed" if self.policy in NOT_KEPT else "known"
        return what, weights, "1e-3" if self.rate > 5e-4 else "to 1e-4"


def compared() -> list[Compared]:
    """Predicted beside measured shares of all logs."""
    samples = {(row["policy"], row["kind"]): _weights(row) for row in read(SAMPLES)}
    groups = defaultdict[tuple[Any, ...], list[dict[str, Any]]](list)
    for row in (row for path in LOGS for row in read(path)):
        if row["kind"] != "norm":  # some values of a whole model
            groups[row["policy"], row["learning_rate"], row["kind"]].append(row)
    made = []
    for (policy, rate, kind), rows in sorted(groups.items()):
        weights = samples.get((policy, kind)) or normal(rows[-1].get("spread", SPREAD))
        pairs = [_shares(row, samples.get((policy, kind))) for row in rows]
        counts = np.array([row["values"] for row in rows])
        for number, name in enumerate(("bf16", "e4m3") if rows[0]["blocks"] else ("bf16",)):
            measured = np.array([row[name] for row in rows]) / counts
            predicted = np.array([pair[number] for pair in pairs])
            first = np.array([row["step"] for row in rows]) == min(row["step"] for row in rows)
            early, late = (
                float(np.average(predicted[part], weights=counts[part]))
                / float(np.average(measured[part], weights=counts[part]))
                for part in (first, ~first)
            )
            means = (float(np.average(shares, weights=counts)) for shares in (measured, predicted))
            made.append(Compared(policy, rate, kind, name, weights.spread, *means, late / early))
    return made


def table(rows: Iterable[Compared]) -> str:
    """Every comparison, in Markdown."""
    heads = ("policy", "learning rate", "layers", "spread", "format", "measured", "predicted", "ratio")
    lines = []
    for x in rows:
        shares = (f"{100 * x.measured:.2g}%", f"{100 * x.predicted:.2g}%", f"{x.ratio:.2f}")
        lines.append([x.policy, f"{x.rate:.0e}", x.kind, f"{x.spread:.2g}", x.format, *shares])
    return markdown.table(heads, lines)


def summary(rows: Iterable[Compared]) -> str:
    """The comparisons within a factor of 1.5, by kind of layer, in Markdown."""
    groups = defaultdict[tuple[str, ...], list[Compared]](list)
    for row in rows:
        groups[(*row.group, row.format)].append(row)
    lines = []
    for (kind, weights, rate, name), members in sorted(groups.items(), key=lambda item: item[0][1:3] + item[0][:1]):
        cells = [kind, weights, rate, name.upper()]
        for ratios in ([each.ratio for each in members], [each.corrected for each in members]):
            within = sum(1 / 1.5 <= ratio <= 1.5 for ratio in ratios)
            cells += [f"{within} of {len(ratios)}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        lines.append(cells)
    heads = ("layers", "weights", "learning rate", "format", "within 1.5", "predicted / measured", "corrected", "ratio")
    return markdown.table(heads, lines[::-1])


def committed() -> str:
    """The summary of the committed counts."""
    return summary(compared())


def _shares(row: dict[str, Any], weights: Weights | None) -> tuple[float, float]:
    """The predicted shares of BF16 values and E4M3 codes of a row of a log."""
    random = row["policy"].startswith("random")
    optimizer = row["policy"].removeprefix("random-") if random else "adamw"
    step = one_step(optimizer, row["kind"] not in TABLES, row["step"])
    if random:
        step = step._replace(moved=None)
    share = changed(step.times(row["learning_rate"]), weights or normal(row.get("spread", SPREAD)))
    rows = ROWS if row["kind"] == "embedding" and not random and row["policy"] != "smollm2" else 1.0
    return rows * share.bf16, share.codes


def _weights(row: dict[str, Any]) -> Weights:
    """The weights of a row of SAMPLES. Between its quantiles, and below the first, the density is constant."""
    places = np.concatenate([[0.0], PLACES, [1.0]])
    values = np.interp((np.arange(POINTS) + 0.5) / POINTS, places, [0.0, *row["quantiles"], row["largest"]])
    return Weights(values[None], np.array([row["largest"]]))


if __name__ == "__main__":
    print(table(compared()), committed(), sep="\n\n")
