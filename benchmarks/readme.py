"""The generated blocks of README.md and docs/, made from committed files and from the package itself.

`make tables` writes them. tests/test_readme.py fails when a page no longer says what this makes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import isclass, unwrap
from io import StringIO
from pathlib import Path
from typing import Any

os.environ["FP8PLAN_IGNORE_VLLM"] = "1"  # the tables say the same wherever they are made
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import anchored  # noqa: E402
import first_sight  # noqa: E402
import host_loop  # noqa: E402
import inside  # noqa: E402
import install  # noqa: E402
import kernel_errors  # noqa: E402
import native_h100  # noqa: E402
import public_figures  # noqa: E402
import reports  # noqa: E402
import routed_experts  # noqa: E402
import server_http  # noqa: E402
import speed  # noqa: E402
import turns  # noqa: E402
import uncalibrated  # noqa: E402
from learning.tables import tables as learning  # noqa: E402
from learning.verdict import tables as verdict  # noqa: E402
from starts.table import table as starts  # noqa: E402
from tables import (  # noqa: E402
    accuracy,
    attention_kernels,
    baselines,
    change_ratios,
    correction_gpu,
    fault_drill,
    fleet,
    fp8_linears,
    markdown,
    peers,
    probe,
    slow_links,
    trainers,
    tuned,
    weight_sync,
)

import fp8plan  # noqa: E402
from fp8plan import jsonl  # noqa: E402
from fp8plan.cli import program  # noqa: E402
from fp8plan.model.distributions import Fixed, LogNormal  # noqa: E402
from fp8plan.model.plan.plan import Plan  # noqa: E402
from fp8plan.model.plan.planner import plan  # noqa: E402
from fp8plan.model.profile.library import profiles_path  # noqa: E402
from fp8plan.model.rl_step import StepTimes  # noqa: E402
from fp8plan.model.tune.answer import Answer  # noqa: E402
from fp8plan.model.tune.request import TuneRequest  # noqa: E402
from fp8plan.model.tune.search import search  # noqa: E402
from fp8plan.model.validate.records import read_records  # noqa: E402
from fp8plan.model.validate.validate import Validation, validate  # noqa: E402
from fp8plan.model.workload import Workload  # noqa: E402
from fp8plan.views.report import power  # noqa: E402

COMMANDS = (
    *("plan", "tune", "emit", "validate", "models", "profiles"),
    *("calibrate", "probe", "monitor", "report", "import", "doctor"),
)


def plan_table(answer: Plan) -> str:
    """The table of `make plan`, in fewer columns. A range is a 90% interval, in a line of its own."""
    heads = ("precision", "rollout", "speed-up", "tokens/s", "KV tokens", "preemptions", "tail", "KL k3", "risk")
    rows = []
    for index, c in enumerate(answer.choices):
        name = f"**{c.precision}**, chosen" if index == answer.chosen else c.precision
        seconds = f"{c.makespan_s:,.0f} s<br>{c.makespan_low_s:,.0f}-{c.makespan_high_s:,.0f}"
        gain = c.best_gain.cell.replace(" (", "<br>").rstrip(")")
        counts = (f"{c.output_tokens_per_s:,.0f}", f"{c.kv_cache_tokens:,}", f"{c.preemptions:,}")
        kl = f"{power(c.kl_k3)}<br>{power(c.kl_k3_low)}-{power(c.kl_k3_high)}"
        rows.append((name, seconds, gain, *counts, f"{c.tail_fraction:.0%}", kl, c.risk))
    return markdown.table(heads, rows)


def tuned_table() -> str:
    """The levers of `fp8plan tune` on that plan, with an RL step of 150 s beside the rollout."""
    work = Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480))
    times = StepTimes(train_s=120, logprob_s=30)
    answer = Answer.of(search(TuneRequest("Qwen/Qwen3-8B", "h200_sxm", work, trainer=times)))
    rows = []
    for lever in answer.levers:
        saved, low, high = (f"{x:,.0f}" for x in lever.saved_s)
        of = " of the step" if lever.step else ""
        name = f"**{lever.name}** *" if lever.in_plan else lever.name
        saves = f"{saved} s{of}<br>{low} to {high}"
        measured = "yes" if lever.measured else "no"
        rows.append((name, saves, f"{lever.gain.ratio:.2f}x", measured, lever.price, lever.mismatch))
    table = markdown.table(("lever", "saves", "gain", "measured", "price", "added mismatch"), rows)
    return f"{table}\n\n> {answer.limited_by}\n>\n> {answer.floor}"


def anchored_plan() -> str:
    """The sentences of a plan on what measured rollouts taught it. The workload is the command line's default."""
    work = Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480))
    observed = read_records(ROOT / "profiles" / "h100_sxm" / "vllm-0.33.0" / "validation" / "rollouts.jsonl")
    made = plan("Qwen/Qwen3-8B", "h100_sxm", work, observed=observed)
    return "".join(f"> {reason}\n>\n" for reason in made.reasons[-3:]).removesuffix("\n>\n")


def written() -> list[Path]:
    """The files with generated blocks."""
    return [*pages(), ROOT / "profiles" / "README.md"]


def pages() -> list[Path]:
    """README.md and the pages of docs/ that stand there as files."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def help_text(command: str) -> str:
    """`fp8plan COMMAND --help`, as a block of code."""
    printed = StringIO()
    with redirect_stdout(printed):
        program()([*command.split(), "--help"], prog_name="fp8plan", standalone_mode=False)
    return f"```text\n{printed.getvalue().strip()}\n```"


def public_names() -> str:
    """A directive of mkdocstrings for each public name, at the place where it, or the function it wraps, is defined.

    A function of a request is followed by the request, whose fields are its arguments.
    """
    directives = []
    for name in sorted(fp8plan.__all__, key=str.lower):
        thing = getattr(fp8plan, name)
        behind = unwrap(thing)
        if isclass(behind) and behind is not thing:
            directives += [_directive(thing, f"fp8plan.{name}"), _directive(behind, f"arguments of fp8plan.{name}")]
        else:
            directives.append(_directive(behind, f"fp8plan.{name}"))
    return "\n\n".join(directives)


def _directive(thing: Any, heading: str) -> str:
    home = f"{thing.__module__}.{thing.__qualname__}"
    label = heading.removeprefix("fp8plan.")
    return f"::: {home}\n    options:\n      heading: {heading}\n      toc_label: {label}"


def kept_sets() -> str:
    """Mismatch of a trainer that scores the whole vocabulary, and of one that scores the kept sets."""
    rows = jsonl.rows(ROOT / "benchmarks" / "results" / "kept_set_h100.jsonl")
    cells = [
        (
            ", ".join(f"{name} {value:g}" for name, value in row["cut"].items()), row["scored"],
            f"{row['k1']:.1e}", f"{row['k3']:.1e}", f"{row['mean_ratio']:.4f}", ", ".join(row["alarms"]) or "none",
        )
        for row in rows
    ]  # fmt: skip
    return markdown.table(("sampled with", "scored on", "k1", "k3", "mean ratio", "alarms"), cells)


def without_a_timed_host() -> Validation:
    """The validation of the set validation as if nobody had timed its hosts."""
    runs = baselines.records("validation")
    return validate([replace(run, fields=run.fields | {"host_loop_s": None}) for run in runs])


def accuracy_in_short(unseen: Validation, untimed: Validation, families: Validation) -> str:
    """README's table of the accuracy.

    unseen, families: the validations of the sets validation and held_out
    untimed:          as from `without_a_timed_host`
    """
    replaced = read_records(profiles_path() / "h200_sxm" / "vllm-0.26.0" / "validation" / "again.jsonl")
    at_first = first_sight.at_first_sight(families.records)
    every = validate([*baselines.records("validation"), *replaced])
    return accuracy.summary(unseen, untimed, every, families, at_first, accuracy.outside())


def predicted_again() -> dict[str, str]:
    """Name of a marked block -> its text, of those that predict or fit measured runs again: minutes of one core."""
    made = {"inside": inside.table()}
    made |= {"hosts": host_loop.hosts(), "unknown hosts": host_loop.left_out()}
    made |= {"single kernels": kernel_errors.table(), "native h100": native_h100.tables()}
    made["fp8 linears"] = fp8_linears.table()
    made["sets of the h100"] = native_h100.sets()
    validated = {name: validate(baselines.records(name)) for name in baselines.HELD_OUT}
    made["accuracy"] = accuracy.tables(validated["validation"])
    answers = jsonl.rows(baselines.results("validation"))
    made["baselines of validation"] = baselines.table(validated["validation"].records, answers)
    made["held_out"] = accuracy.families(validated["held_out"])
    unseen, untimed = validated["validation"], without_a_timed_host()
    made["accuracy in a line"] = accuracy.in_a_line(unseen, untimed)
    made["accuracy in short"] = accuracy_in_short(unseen, untimed, validated["held_out"])
    made["first sight"] = first_sight.table(validated["held_out"].records)
    made["coverage"] = accuracy.coverage(accuracy.outside())
    made["standing"] = baselines.standing({name: validation.records for name, validation in validated.items()})
    return made


def others() -> dict[str, str]:
    """Name of a marked block -> its text, of those that are made in seconds."""
    work = Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480))
    made = {"plan": plan_table(plan("Qwen/Qwen3-8B", "h200_sxm", work))}
    made["tuned"] = tuned_table()
    made["anchored plan"] = anchored_plan()
    made |= {"verdicts on tune": tuned.verdicts(), "levers measured": tuned.levers()}
    made["anchored"] = anchored.table()
    made["uncalibrated"] = uncalibrated.table()
    made["speed"] = speed.table([speed.RESULTS / "speed.jsonl", speed.RESULTS / "aiconfigurator_time.jsonl"])
    made["installation"] = install.table()
    made["corrections on a GPU"] = correction_gpu.table()
    made |= {
        "verl on GPUs": trainers.verl(),
        "trl on GPUs": trainers.trl(),
        "trl auto": trainers.trl_auto(),
        "fleet on GPUs": fleet.committed(),
    }
    made["probe"] = probe.table()
    made |= {"public figures": public_figures.page(), "server http": server_http.tables()}
    made["starts"] = starts()
    made["kept sets"] = kept_sets()
    made["predicted change ratios"] = change_ratios.committed()
    made |= {"small models": probe.small_models(), "published pairs": probe.published_pairs()}
    made |= {"probed remedies": probe.with_remedies()}
    made |= {"fixed scales": probe.fixed_scales(), "attention kernels": attention_kernels.table()}
    made["public names"] = public_names()
    made |= {f"help {command}": help_text(command) for command in COMMANDS}
    made |= {"returned experts": routed_experts.table(), "turns": turns.judged()[0]}
    made |= {"peers": peers.committed(), "fault drill": fault_drill.committed()}
    return made | reports.tables() | learning() | verdict() | weight_sync.tables() | slow_links.tables()


def blocks() -> dict[str, str]:
    """Name of a marked block -> its text."""
    return others() | predicted_again()


BLOCK = re.compile(r"(<!-- begin ([\w -]+) -->\n)(.*?)(<!-- end \2 -->)", re.S)


def filled(page: str, made: dict[str, str]) -> str:
    """The page with each `<!-- begin NAME -->` block replaced. Raises KeyError for a block that nothing makes."""
    return BLOCK.sub(lambda block: block[1] + made[block[2]] + "\n" + block[4], page)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    made = blocks()
    for path in written():
        path.write_text(filled(path.read_text(), made))


if __name__ == "__main__":
    main()
