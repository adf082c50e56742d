"""Before the run: `fp8plan tune`, which plans under the best limits of the engine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp8plan.cli.program import Declared, Options, PlanCommand, app
from fp8plan.options import Words

if TYPE_CHECKING:
    from fp8plan.model.plan.planner import Prediction
    from fp8plan.model.tune.answer import Answer


def _options() -> Options:
    from fp8plan.cli.request import PlanOutputs
    from fp8plan.model.plan.scene import CONCURRENT
    from fp8plan.model.tune.request import SEARCHED, TuneRequest

    return Options((TuneRequest, PlanOutputs), defaults=dict.fromkeys((*SEARCHED, CONCURRENT), "searched"))


@app.command("tune", cls=PlanCommand)
@partial(Declared, load=_options)
def tune_command(words: Words) -> None:
    """Choose vLLM's limits, too, and weigh the trainer's levers.

    A limit that you give stays. --gpu-memory-utilization is a ceiling. Outputs are those of `plan`; its JSON has the
    levers as `tune`, and its picture is a waterfall.
    """
    from fp8plan.cli.request import request_of
    from fp8plan.model.limits import EngineLimits
    from fp8plan.model.tune.answer import Answer
    from fp8plan.model.tune.request import TuneRequest
    from fp8plan.model.tune.search import search
    from fp8plan.model.tune.speculation import Speculation, speculation_of
    from fp8plan.views.tuned import tune_report

    request, outputs, notes = request_of(TuneRequest, words, "searching")
    keep = {"enable_prefix_caching"} & words[EngineLimits].keys()
    drafts = speculation_of(**words[Speculation])
    tuned = search(replace(request, keep=keep, speculation=drafts))
    answer = Answer.of(tuned)
    report, picture = partial(tune_report, answer=answer), partial(_draw, answer=answer)
    outputs.deliver(tuned.prediction, notes, report, picture, tune=answer.to_dict())


def _draw(prediction: Prediction, target: Path, kv_scales: str, answer: Answer) -> None:
    from fp8plan.views.tuned_page import draw

    draw(prediction, target, kv_scales, answer=answer)
