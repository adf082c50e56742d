"""Compare predicted shares of changed values (fp8plan.model.weight_changes) with measured ones.

    python -m benchmarks.change_ratios                         # the committed counts, per kind of layer
    python -m benchmarks.change_ratios --train                 # random models again: results/change_ratios.jsonl
    python -m benchmarks.change_ratios --sample POLICY=FOLDER  # a checkpoint's weights: results/change_weights.jsonl

Logs: those of docs/evidence/weight_sync.md, and random Qwen3 models that learn by policy gradients to sample tokens
of the lower half of their vocabulary, with AdamW and Muon at four learning rates. A random model's weights are normal
with a spread that is measured before each logged step, and begin in FP32. The other policies' are samples of the
checkpoints that `python -m benchmarks.learning.policies POLICY FOLDER` writes; those of qk-norm and moe were not kept,
so a spread of 0.02 is assumed. A ratio is predicted / measured. "Corrected" predicts the later logged steps, times the
measured / predicted of the first one, as a plan with --observed does.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.learning import changes
from benchmarks.learning.policies.tasks import STOP, VOCABULARY
from benchmarks.tables import markdown
from fp8plan.jsonl import append, line
from fp8plan.jsonl import rows as read
from fp8plan.model.weight_changes import OPTIMIZERS, changed, one_step
from fp8plan.model.weights import POINTS, SPREAD, Weights, normal, sampled

RESULTS: Final = Path(__file__).parent / "results" / "change_ratios.jsonl"
SAMPLES: Final = Path(__file__).parent / "results" / "change_weights.jsonl"
PLACES: Final = (np.arange(256) + 0.5) / 256  # of the quantiles in SAMPLES
RATES: Final = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
STEPS, EVERY = 40, 20
TOKENS: Final = (128, 32)  # sequences of a step, and tokens of each
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
    for row in [*read(changes.COMMITTED), *read(RESULTS)]:
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


def sample(policy: str, folder: Path) -> None:
    """Add the weights of a checkpoint to SAMPLES, by kind of layer."""
    kinds = {kind: rf"{pattern}.*weight$" for kind, pattern in changes.KINDS.items()}
    for kind, weights in sampled(folder, kinds).items():
        quantiles = np.quantile(weights.values, PLACES)
        numbers = {"quantiles": [float(f"{x:.4g}") for x in quantiles], "largest": float(np.median(weights.largest))}
        append(SAMPLES, line({"policy": policy, "kind": kind, **numbers}))


def train() -> None:
    """Measure the random models, and write RESULTS."""
    RESULTS.unlink(missing_ok=True)
    for optimizer in OPTIMIZERS:
        for rate in RATES:
            for row in _run(optimizer, rate):
                append(RESULTS, line(row))


def _run(optimizer: str, rate: float) -> list[dict[str, Any]]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 512}
    model = Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    )
    named = dict(model.named_parameters())
    inner = {name for name, x in named.items() if optimizer == "muon" and "layers" in name and x.dim() == 2}
    by_adamw = [x for name, x in named.items() if name not in inner]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(by_adamw, lr=rate, weight_decay=0.0)]
    if inner:
        matrices = [named[name] for name in inner]
        optimisers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    rows = []
    for step in range(1, STEPS + 1):
        before = {name: x.detach().bfloat16() for name, x in named.items()} if step % EVERY == 0 else {}
        prompts = torch.randint(0, 512, TOKENS)
        logits = model(prompts).logits
        chosen = torch.distributions.Categorical(logits=logits.detach()).sample()
        reward = (chosen < 256).float()
        chance = torch.log_softmax(logits, -1).gather(-1, chosen[..., None])[..., 0]
        (-(reward - reward.mean()) * chance).mean().backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        for each in optimisers:
            each.step()
        model.zero_grad()
        if before:
            after = {name: x.detach().bfloat16() for name, x in named.items()}
            counts = changes.changed(before, after)
            spreads = _spreads(before)
            own = changes.log_rows(counts, policy=f"random-{optimizer}", learning_rate=rate, step=step)
            rows += [row | {"spread": spreads[row["kind"]]} for row in own]
    return rows


def _spreads(tensors: dict[str, Any]) -> dict[str, float]:
    """Kind of layer -> root mean square of its weights."""
    squares = defaultdict[str, list[float]](lambda: [0.0, 0])
    for name, x in tensors.items():
        total = squares[changes.kind_of(name)]
        total[0] += float(x.float().square().sum())
        total[1] += x.numel()
    return {kind: round((total / count) ** 0.5, 5) for kind, (total, count) in squares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.change_ratios")
    parser.add_argument("--train", action="store_true", help="measure the random models again")
    parser.add_argument("--sample", metavar="POLICY=FOLDER", help="add a checkpoint's weights to the samples")
    options = parser.parse_args()
    if options.sample:
        policy, _, folder = options.sample.partition("=")
        sample(policy, Path(folder))
    if options.train:
        train()
    rows = compared()
    print(table(rows), summary(rows), sep="\n\n")


if __name__ == "__main__":
    main()
