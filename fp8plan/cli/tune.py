"""Before the run: `fp8plan tune`, which plans under the best limits of the engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from fp8plan.cli.console import PlanCommand, app, not_none, option, options_of
from fp8plan.cli.plan import Result, planned

SEARCHED: Final = "searched"  # a default
DRAFTS: Final = "Speculative decoding"  # a group of options

if TYPE_CHECKING:
    from fp8plan.model.architecture import ModelShape
    from fp8plan.model.plan.planner import Prediction
    from fp8plan.model.tune.answer import Answer


@app.command("tune", cls=PlanCommand)
@options_of(
    planned,
    without=("ask",),
    defaults={
        "max_num_seqs": SEARCHED,
        "max_num_batched_tokens": SEARCHED,
        "max_cudagraph_capture_size": SEARCHED,
        "prefix_caching": SEARCHED,
    },
)
def tune_command(
    acceptance: Annotated[
        float | None, option(DRAFTS, "share of drafts accepted after accepted ones, from 0 to 1; weighs this lever")
    ] = None,
    num_speculative_tokens: Annotated[int | None, option(DRAFTS, "drafts of a request in a step", "3")] = None,
    speculative_method: Annotated[
        str | None, option(DRAFTS, "ngram, ngram_gpu, mtp, eagle3", "ngram", metavar="NAME")
    ] = None,
    **options: Any,
) -> None:
    """Choose vLLM's limits, too, and weigh the trainer's levers.

    A limit that you give stays. --gpu-memory-utilization is a ceiling. Outputs are those of `plan`; its JSON has the
    levers as `tune`, and its picture is a waterfall.
    """
    keep = ["enable_prefix_caching"] if options["prefix_caching"] is not None else []
    drafts = not_none(tokens=num_speculative_tokens, method=speculative_method)
    planned(**options, ask=partial(_tuned, keep=keep, acceptance=acceptance, drafts=drafts))


def _tuned(
    model: ModelShape, *arguments: Any, acceptance: float | None, drafts: dict[str, Any], **options: Any
) -> Result:
    from fp8plan.model.tune.answer import Answer
    from fp8plan.model.tune.search import search
    from fp8plan.model.tune.speculation import speculation_of
    from fp8plan.views.tuned import tune_report

    speculation = speculation_of(model, acceptance, **drafts)
    tuned = search(model, *arguments, **options)
    answer = Answer.of(tuned, speculation)
    report, picture = partial(tune_report, answer=answer), partial(_draw, answer=answer)
    return Result(tuned.prediction, {"tune": answer.to_dict()}, report, picture)


def _draw(prediction: Prediction, target: Path, kv_scales: str, answer: Answer) -> None:
    from fp8plan.views.tuned_page import draw

    draw(prediction, target, kv_scales, answer=answer)
