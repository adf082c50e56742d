"""table.md and control.png from results.json: `python -m benchmarks.control.report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import markdown

FOLDER = Path(__file__).parent
COLOURS = {"kl": "#000000", "C=2": "#E69F00", "adaptive": "#0072B2", "least error": "#009E73"}  # Okabe and Ito's
TODAY = ("C=1.5", "C=2", "C=5", "untruncated", "uncorrected", "staleness")
LAWS = ("adaptive", "least error")
OURS = (*LAWS, "least error, noise unknown")
NOISES = (*OURS[1:], "least error, noise x4", "least error, noise /4")
MASKS = ("icepop [0.5, 5]", "adaptive band", "least error band", "law: second moment 0.04")
Row = Mapping[str, Any]
LOOP = """
## Training closed over its own estimates

Exact expected return after the last step, mean over seeds ± standard error, by `python -m benchmarks.control.loop`:
Adam at 0.02 and plain gradient ascent at 0.01, which is slower where the gradient is shorter.
"""


def write(folder: Path = FOLDER) -> str:
    """Write both files; return the text of the table."""
    rows, training = (json.loads((folder / name).read_text("utf-8")) for name in ("results.json", "loop.json"))
    text = tables(rows["results"]) + trained(training)
    (folder / "table.md").write_text(text, encoding="utf-8")
    picture(rows["results"], folder / "control.png")
    return text


def short_table(folder: Path = FOLDER) -> str:
    """A line for each scenario: squared error relative to C = 2, at all batch sizes."""
    rows = json.loads((folder / "results.json").read_text("utf-8"))["results"]
    sizes = " / ".join(f"{row['sequences']:,}" for row in rows if row["scenario"] == rows[0]["scenario"])
    columns = {"C = 1.5": "C=1.5", "C = 5": "C=5", **{name: name for name in OURS}}
    lines = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        of = [row for row in rows if row["scenario"] == scenario]
        found = [[row["methods"][name]["mse"] for row in of] for name in columns.values()]
        found.append([row["best_each_step"]["mse"] for row in of])
        at_two = [row["methods"]["C=2"]["mse"] for row in of]
        cells = (" / ".join(f"{x / y:.2f}" for x, y in zip(one, at_two, strict=True)) for one in found)
        lines.append([scenario.replace("_", " "), *cells])
    made = markdown.table(("mismatch", *columns, "the best C of every single step"), lines)
    return f"{made}\n\nBatches of {sizes} sequences."


INTRODUCTION = """# Every law of the thresholds against what is done today

Made by `python -m benchmarks.control.run`. Squared error of the corrected gradient against the exact one (bias^2 +
variance), **relative to token TIS at C=2**: below 1 is better. KL is k3 per token, mean over the run. The gradient's
noise scale, measured without mismatch, is {noise:.0f} tokens; a batch has 12 tokens per sequence.

`adaptive` is LevelThresholds, whose C tightens as the KL rises above its target (0.01 here).
`least error` is LeastErrorThresholds, which is made for the figure of this table and told the noise scale, or not.
"""
BESTS = """`best fixed`: the best constant C in hindsight, for this scenario and batch size. `best each step`: the best
C of every single step, known from the exact gradient: no rule for C can do much better.
"""
DIRECTION = """1 - cosine^2 over the run, relative to C=2: blind to a gradient that is only too short, which a lower
learning rate would give for free and which Adam undoes.
"""
BEHAVIOUR = """Regret: squared error over that of the best constant C in hindsight, less 1. Churn: mean |change of log
C| per step. Lag: steps after the step change until C is within 10% of its mean over 12 steps.
"""


def tables(rows: Sequence[Row]) -> str:
    laws = [name for name in rows[0]["methods"] if name.startswith("law: ") and name not in MASKS]
    parts = [
        INTRODUCTION.format(noise=rows[0]["noise_tokens"]),
        _table(rows, [*TODAY, *OURS], "mse", bounds=True),
        BESTS,
        "## Where tightening costs, and where it pays\n",
        costs(rows),
        "## Direction only\n",
        DIRECTION,
        _table(rows, [*TODAY, *OURS], "direction"),
        "## What the thresholds did\n",
        *(f"### {name}\n\n{_behaviour(rows, name)}" for name in LAWS),
        BEHAVIOUR,
        "## Least error with a wrong noise scale\n",
        _table(rows, NOISES, "mse"),
        "## Laws that were considered\n",
        _table(rows, [*LAWS, *laws], "mse"),
        "## Masks instead of truncation\n",
        "Squared error relative to IcePop's [0.5, 5].\n",
        _table(rows, MASKS, "mse", against=MASKS[0]),
        costs(rows, "adaptive band", MASKS[0]),
    ]
    return "\n".join(parts)


def trained(rows: Sequence[Row]) -> str:
    """The expected returns of loop.json."""
    compared = list(dict.fromkeys(row["method"] for row in rows))
    lines: dict[Any, list[str]] = {}
    for row in rows:
        key = (row["optimiser"], row["scenario"], f"{row['sequences']:,}")
        lines.setdefault(key, []).append(f"{row['mean']:.2f} ± {row['standard_error']:.2f}")
    body = [[*key, *cells] for key, cells in sorted(lines.items(), key=lambda item: item[0][0])]
    return f"{LOOP}\n{markdown.table(('optimiser', 'scenario', 'sequences', *compared), body)}\n"


def _table(rows: Sequence[Row], names: Sequence[str], figure: str, bounds: bool = False, against: str = "C=2") -> str:
    header = ["scenario", "sequences", "KL", *(name.removeprefix("law: ") for name in names if name != against)]
    if bounds:
        header += ["best fixed", "best each step", f"{against}, absolute"]
    lines = []
    for row in rows:
        base = row["methods"][against][figure]
        cells = [_bold(row["methods"][name][figure] / base, name) for name in names if name != against]
        if bounds:
            best = row["best_fixed"]
            cells += [f"{best['mse'] / base:.3f} (C={best['c']:g})", f"{row['best_each_step']['mse'] / base:.3f}"]
            cells += [f"{base:.3g}"]
        lines.append([row["scenario"], f"{row['sequences']:,}", f"{row['kl'][1]:.2g}", *cells])
    return markdown.table(header, lines) + "\n"


def _bold(value: float, name: str) -> str:
    text = f"{value:.3f}" if value < 100 else f"{value:.0f}"
    return f"**{text}**" if name == "adaptive" else text


def costs(rows: Sequence[Row], name: str = "adaptive", against: str = "C=2") -> str:
    """Sentences: in which cells a law's error is above that of a constant, and in which below, by more than 1%."""
    found = {
        (row["scenario"], f"{row['sequences']:,}"): row["methods"][name]["mse"] / row["methods"][against]["mse"]
        for row in rows
    }
    more = sorted(((x, cell) for cell, x in found.items() if x > 1.01), reverse=True)
    less = sorted((x, cell) for cell, x in found.items() if x < 0.99)
    lines = []
    for cells, word in ((more, "More"), (less, "Less")):
        listed = "; ".join(f"{scenario} {size}: {x:.2f}" for x, (scenario, size) in cells)
        lines.append(f"- {word} error than {against} in {len(cells)} of {len(found)} cells: {listed or 'none'}.")
    mean = float(np.exp(np.mean(np.log(list(found.values())))))
    return "\n".join([f"`{name}`:\n", *lines, f"- Geometric mean over all cells: {mean:.3f}.\n"])


def _behaviour(rows: Sequence[Row], name: str) -> str:
    heads = (
        "scenario", "sequences", "bias^2", "variance", "bias^2 at C=2", "variance at C=2", "regret", "weight lost",
        "steps that moved C", "churn", "lag, steps",
    )  # fmt: skip
    lines = []
    for row in rows:
        ours, two = row["methods"][name], row["methods"]["C=2"]
        regret = ours["mse"] / row["best_fixed"]["mse"] - 1
        lag = "" if row["lag"] is None else f"{row['lag'][name]:.1f}"
        lines.append(
            [row["scenario"], f"{row['sequences']:,}", f"{ours['bias2']:.3g}", f"{ours['variance']:.3g}",
             f"{two['bias2']:.3g}", f"{two['variance']:.3g}", f"{regret:+.1%}", f"{ours['lost']:.1%}",
             f"{ours['moves']:.0%}", f"{ours['churn']:.3f}", lag]
        )  # fmt: skip
    return markdown.table(heads, lines) + "\n"


def picture(rows: Sequence[Row], path: Path) -> None:
    """A row of panels per scenario: KL, C at each batch size, and the squared error at the largest, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row["sequences"] for row in rows})
    shown = [name for name in dict.fromkeys(row["scenario"] for row in rows) if name != "none"]
    figure, axes = pyplot.subplots(len(shown), 3, figsize=(13, 2.1 * len(shown)), sharex=True, layout="constrained")
    by = {(row["scenario"], row["sequences"]): row for row in rows}
    for line, name in zip(axes, shown, strict=True):
        large = by[name, sizes[-1]]["by_step"]
        line[0].semilogy(large["kl"], color=COLOURS["kl"], linewidth=1.2)
        line[0].set_ylabel(name)
        for size, style in zip(sizes, (":", "--", "-"), strict=True):
            steps = by[name, size]["by_step"]
            for law in LAWS:
                label = f"{law}, {size:,} sequences"
                line[1].semilogy(steps[law]["bound"], style, color=COLOURS[law], label=label)
        line[1].axhline(2.0, color=COLOURS["C=2"], linewidth=1.2)
        line[1].set_ylim(0.9, 8.0)
        line[1].set_yticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
        line[1].minorticks_off()
        for method in ("C=2", *LAWS):
            relative = _relative(large, method)
            line[2].semilogy(relative, color=COLOURS[method], label=method, linewidth=1.2)
    for axis, text in zip(axes[0], ("KL (k3) per token", "upper bound C", f"squared error, {sizes[-1]:,} sequences"),
                          strict=True):  # fmt: skip
        axis.set_title(text, loc="left", fontsize=10)
    axes[0][1].legend(frameon=False, fontsize=7)
    axes[0][2].legend(frameon=False, fontsize=7)
    for axis in axes.ravel():
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _relative(steps: Row, method: str) -> Any:
    return np.array(steps[method]["mse"]) / np.array(steps["gradient2"])


if __name__ == "__main__":
    print(write())
