"""Rollouts of Qwen3-30B-A3B's shape on an H200 with and without returned experts: predicted, and then measured.

    python -m benchmarks.routed_experts > benchmarks/results/routed_experts/predictions.jsonl     before the lease
    python -m benchmarks.routed_experts benchmarks/results/routed_experts/rollouts.jsonl          a table

The lease job `routed_experts` measures the cells. A host decides much of the difference, so predictions are for several
host loops. The table predicts each record anew, at its own loop, by the profile and the code of the checkout.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.tables.markdown import table as markdown
from fp8plan.model.distributions import parse_distribution
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import Rollout, simulate
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.workload import Batch, Workload

CELLS: Final = Path(__file__).parent / "results" / "routed_experts" / "cells.json"
ROLLOUTS: Final = CELLS.with_name("rollouts.jsonl")
VERSION: Final = "0.33.0"
HOST_LOOPS_S: Final = (None, 2e-4, 2.74e-4, 3.5e-4, 4.36e-4, 5e-4)  # None: any host that was seen


def run(setup: EngineSetup, batch: Batch, loop_s: float | None) -> Rollout:
    """The predicted rollout on a host with this loop."""
    profile = load_profile(setup.gpu, VERSION)[0].on_host(loop_s)
    return simulate(setup.holding(batch.longest), batch, profile).rollout


def predictions() -> Iterator[dict[str, Any]]:
    """A row for each cell and host, with the makespan as a multiple of that without returned experts."""
    settings = json.loads(CELLS.read_text(encoding="utf-8"))
    for loop_s in HOST_LOOPS_S:
        without: dict[tuple[str, str], float] = {}
        for setting in settings:
            returned = setting.get("enable_return_routed_experts", False)
            limits = EngineLimits(
                max_model_len=setting["max_model_len"],
                max_num_seqs=setting["max_num_seqs"],
                enable_return_routed_experts=returned,
            )
            for precision in setting["precisions"]:
                setup = EngineSetup(setting["model"], setting["gpu"], precision, limits, engine_version=VERSION)
                for row in setting["workloads"]:
                    lengths = [parse_distribution(row[f"{kind}_lengths"], kind) for kind in ("prompt", "response")]
                    batch = Workload(row["prompts"], row["samples"], *lengths, row["seed"]).batch()
                    timed = run(setup, batch, loop_s)
                    base_s = without.setdefault((precision, row["name"]), timed.makespan_s)
                    yield {
                        "workload": row["name"],
                        "precision": precision,
                        "routed_experts": returned,
                        "host_loop_s": loop_s,
                        "predicted_s": round(timed.makespan_s, 3),
                        "low_s": round(timed.makespan_low_s, 3),
                        "high_s": round(timed.makespan_high_s, 3),
                        "times": round(timed.makespan_s / base_s, 4),
                    }


class Medians(NamedTuple):
    """Medians over the repeats of a cell. Each repeat is predicted for its own host's loop."""

    host_loop_s: float
    seconds: float
    predicted_s: float


def medians(repeats: Sequence[Record]) -> Medians:
    loops = [record.fields["host_loop_s"] for record in repeats]
    predicted = [
        run(record.setup, record.batch, loop_s).makespan_s for record, loop_s in zip(repeats, loops, strict=True)
    ]
    return Medians(median(loops), median(record.seconds for record in repeats), median(predicted))


def compared(rollouts: str) -> Iterator[dict[str, str]]:
    """A row for each precision and workload: the makespan with returned experts over that without, in percent more."""
    cells = defaultdict[tuple[str, str], list[Record]](list)
    for record in read_records(rollouts):
        cells[record.fields["workload"], record.fields["precision"]].append(record)
    for (workload, precision), records in cells.items():
        without = [record for record in records if not record.limits.enable_return_routed_experts]
        returned = [record for record in records if record.limits.enable_return_routed_experts]
        if not without or not returned:
            continue
        before, after = medians(without), medians(returned)
        measured, predicted = after.seconds / before.seconds, after.predicted_s / before.predicted_s
        yield {
            "workload": workload,
            "precision": precision,
            "host loop without and with, us": f"{1e6 * before.host_loop_s:.0f} and {1e6 * after.host_loop_s:.0f}",
            "without, s": f"{before.seconds:.2f} (predicted {before.predicted_s:.2f})",
            "with, s": f"{after.seconds:.2f} (predicted {after.predicted_s:.2f})",
            "more": f"{measured - 1:.1%} (predicted {predicted - 1:.1%})",
            "error, points": f"{100 * (predicted - measured):+.1f}",
        }


def table(rollouts: Path = ROLLOUTS) -> str:
    """The rows of `compared` in Markdown."""
    rows = list(compared(str(rollouts)))
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    if len(sys.argv) > 1:
        print(table(Path(sys.argv[1])))
        return
    for row in predictions():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
