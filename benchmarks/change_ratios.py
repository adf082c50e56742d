"""Compare predicted shares of changed values (fp8plan.model.weight_changes) with measured ones.

    python -m benchmarks.change_ratios           # the committed logs, per kind of layer
    python -m benchmarks.change_ratios --train   # measure random models again: results/change_ratios.jsonl

Logs: those of docs/evidence/change_ratios.md, and random Qwen3 models that learn by policy gradients to sample tokens
of the lower half of their vocabulary, with AdamW at four learning rates. The predicted shares are those of a
plan: a spread of 0.02, which random models have. SPREADS are measured spreads (root mean squares) of other policies;
those of qk-norm and moe were not kept. A ratio is predicted / measured.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.learning import changes
from benchmarks.tables import markdown
from fp8plan.jsonl import append, line
from fp8plan.jsonl import rows as read
from fp8plan.model.weight_changes import SPREAD, bf16_share, e4m3_share, mean_step

RESULTS: Final = Path(__file__).parent / "results" / "change_ratios.jsonl"
RATES: Final = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS, EVERY = 60, 20  # Muon is not among them: its mean step is tested against torch.optim.Muon

# SmolLM2's from its wheel. The tiny one's from `python -m benchmarks.learning.policies tiny-qk-norm FOLDER`; tiny-moe
# is taught alike.
_TINY: Final = dict.fromkeys(changes.KINDS, 0.05) | {"embedding": 0.022, "lm_head": 0.09, "norm": 0.99}
SPREADS: Final[dict[str, dict[str, float]]] = {
    "smollm2": {"embedding": 0.136, "q, k, v": 0.203, "o": 0.179, "gate and up": 0.194, "down": 0.192},
    "tiny-qk-norm": _TINY,
    "tiny-moe": _TINY,
}


def compared() -> str:
    """The table of predicted and measured shares, in Markdown."""
    here = Path(changes.__file__).parent
    logged = [row for pattern in changes.COMMITTED for path in sorted(here.glob(pattern)) for row in read(path)]
    groups = defaultdict[tuple[Any, ...], list[dict[str, Any]]](list)
    for row in [*logged, *read(RESULTS)]:
        if row["kind"] != "norm":  # some values of a whole model
            groups[row["policy"], row["learning_rate"], row["kind"]].append(row)
    heads = ["policy", "learning rate", "layers", "spread", "BF16", "predicted", "ratio", "E4M3", "predicted", "ratio"]
    lines, ratios = [], defaultdict[str, list[float]](list)
    for (policy, rate, kind), rows in sorted(groups.items()):
        table = kind in ("embedding", "lm_head")
        spread = SPREADS.get(policy, {}).get(kind, SPREAD)
        steps = [rate * mean_step("adamw", not table, row["step"]) for row in rows]
        total = sum(row["values"] for row in rows)
        cells = []
        for name, share in (("bf16", bf16_share), ("e4m3", e4m3_share)):
            if name == "e4m3" and not rows[0]["blocks"]:
                cells += ["-"] * 3
                continue
            measured = sum(row[name] for row in rows) / total
            predicted = float(np.average([share(s, spread) for s in steps], weights=[r["values"] for r in rows]))
            cells += [f"{100 * measured:.2g}%", f"{100 * predicted:.2g}%", f"{predicted / measured:.2f}"]
            ratios["tables" if table else name].append(predicted / measured)
        lines.append([policy, f"{rate:.0e}", kind, f"{spread:g}", *cells])
    within = [
        f"{name}: {sum(1 / 1.5 <= x <= 1.5 for x in values)} of {len(values)} within a factor of 1.5, "
        f"{min(values):.2f} to {max(values):.2f}"
        for name, values in ratios.items()
    ]
    return "\n".join([markdown.table(heads, lines), *within])


def train() -> None:
    """Measure the random models, and write RESULTS."""
    RESULTS.unlink(missing_ok=True)
    for rate in RATES:
        for row in _run(rate):
            append(RESULTS, line(row))


def _run(rate: float) -> list[dict[str, Any]]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 512}
    model = Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    )
    named = dict(model.named_parameters())
    optimiser = torch.optim.AdamW(named.values(), lr=rate, weight_decay=0.0)
    rows = []
    for step in range(1, STEPS + 1):
        before = {name: x.detach().bfloat16() for name, x in named.items()} if step % EVERY == 0 else {}
        prompts = torch.randint(0, 512, (8, 16))
        logits = model(prompts).logits
        chosen = torch.distributions.Categorical(logits=logits.detach()).sample()
        reward = (chosen < 256).float()
        chance = torch.log_softmax(logits, -1).gather(-1, chosen[..., None])[..., 0]
        (-(reward - reward.mean()) * chance).mean().backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimiser.step()
        model.zero_grad()
        if before:
            after = {name: x.detach().bfloat16() for name, x in named.items()}
            counts = changes.changed(before, after)
            rows += changes.log_rows(counts, policy="random-adamw", learning_rate=rate, step=step)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.change_ratios")
    parser.add_argument("--train", action="store_true", help="measure the random models again")
    if parser.parse_args().train:
        train()
    print(compared())


if __name__ == "__main__":
    main()
