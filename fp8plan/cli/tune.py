"""Before the run: `fp8plan tune`, which plans under the best limits of the engine."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from fp8plan.cli.console import app, options_of
from fp8plan.cli.plan import PlanCommand, Result, planned

SEARCHED: Final = "searched"  # a default


@app.command("tune", cls=PlanCommand)
@options_of(
    planned,
    without=("ask", "plot"),
    defaults={
        "max_num_seqs": SEARCHED,
        "max_num_batched_tokens": SEARCHED,
        "max_cudagraph_capture_size": SEARCHED,
        "prefix_caching": SEARCHED,
    },
)
def tune_command(**options: Any) -> None:
    """Choose vLLM's limits, too, and weigh the trainer's levers.

    A limit that you give stays. --gpu-memory-utilization is a ceiling. Outputs are those of `plan`; its JSON has the
    levers as `tune`.
    """
    keep = ["enable_prefix_caching"] if options["prefix_caching"] is not None else []
    planned(**options, ask=partial(_tuned, keep=keep))


def _tuned(*arguments: Any, **options: Any) -> Result:
    from fp8plan.model.tune.answer import Answer
    from fp8plan.model.tune.search import search
    from fp8plan.views.tuned import tune_report

    tuned = search(*arguments, **options)
    answer = Answer.of(tuned)
    return Result(tuned.prediction, {"tune": answer.to_dict()}, partial(tune_report, answer=answer))
