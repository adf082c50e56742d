"""Levers of `fp8plan tune`, measured on an H200 with vLLM 0.33, beside predictions that were frozen before.

    python -m benchmarks.levers             prints the table of docs/evidence/levers.md
    python -m benchmarks.levers --freeze    predicts every lever, before anything is measured

`python -m benchmarks.gpu.levers` measures them. Gains with drafts are predicted at several acceptances; the real one is
known after the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import numpy as np

from benchmarks import frozen
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.limits import EngineLimits
from fp8plan.model.tune.levers import MORE, asked_for_more, levers, orders
from fp8plan.model.tune.request import SEARCHED, TuneRequest
from fp8plan.model.tune.scene import Lever, Scene
from fp8plan.model.tune.search import Tuned, search
from fp8plan.model.tune.speculation import Speculation
from fp8plan.model.workload import Batch, Fixed, LogNormal, Trace, Workload

RESULTS: Final = Path(__file__).parent / "results" / "levers_h200"
PREDICTIONS, MEASURED = RESULTS / "predictions.jsonl", RESULTS / "runs.jsonl"
MODEL, GPU, VERSION, PRECISION = "Qwen/Qwen3-4B", "h200_sxm", "0.33.0", "bf16"

# A pool of 112,000 tokens: too small for prompts whose samples are apart, and large enough for the other cases.
LIMITS: Final = EngineLimits(
    max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, gpu_memory_utilization=0.85,
    max_cudagraph_capture_size=256, num_gpu_blocks=7000, enable_prefix_caching=True,
)  # fmt: skip
PLAIN: Final = "plain"  # the engine without drafts
DRAFTS, ACCEPTANCES = 3, (0.0, 0.25, 0.5, 0.75, 1.0)
NUMBERS: Final = ("before_s", "after_s", "gain", "gain_low", "gain_high")
STOPPED: Final = {f"stop the tail, {share:.0%} more": share for share in MORE}


@dataclass(frozen=True)
class Case:
    """A workload on which levers are measured.

    levers:  of the plain engine, as `tune` names them
    engines: those that run it: PLAIN, and methods of speculation
    text:    number of different tokens that are sampled, so that the text repeats itself: a guess of the next one is
             right once in so many times; 0: all of the vocabulary
    """

    name: str
    workload: Workload
    levers: tuple[str, ...] = ()
    engines: tuple[str, ...] = (PLAIN,)
    text: int = 0


def _rising() -> Workload:
    """Prompts of very different lengths, the longest last."""
    lengths = np.sort(LogNormal(600, 1.3, 7000).draw(384, np.random.default_rng(2)))
    return Workload(384, 1, Trace(tuple(lengths.tolist()), "sorted"), LogNormal(150, 0.7, 1000), seed=3)


def _texts() -> Iterator[Case]:
    """Few and many requests, with drafts that are always right, and right every other time."""
    for requests in (16, 128):
        work = Workload(requests, 1, Fixed(128), Fixed(512), seed=5)
        yield Case(f"{requests} requests, text of one token", work, engines=(PLAIN, "ngram"), text=1)
        yield Case(f"{requests} requests, text of two tokens", work, engines=(PLAIN, "ngram", "eagle3"), text=2)


CASES: Final = (
    Case("long tail", Workload(256, 1, Fixed(64), LogNormal(400, 0.9, 2000), seed=1), tuple(STOPPED)),
    Case("long prompts last", _rising(), ("order: long prompts first",)),
    Case(
        "samples together", Workload(64, 4, Fixed(2000), LogNormal(200, 0.5, 800), seed=4),
        ("order: samples of a prompt apart",),
    ),
    *_texts(),
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One way of running a case. enough: responses after whose end the rest is aborted; None: all end"""

    name: str
    batch: Batch
    enough: int | None = None


def arms(case: Case, batch: Batch, engine: str) -> Iterator[Arm]:
    """The ways in which an engine runs a case: as it is, and with each lever. batch: the case's, or a smaller one"""
    yield Arm(engine, batch)
    if engine != PLAIN:
        return
    rows = orders(batch)
    for lever in case.levers:
        if lever in STOPPED:
            yield Arm(lever, asked_for_more(batch, STOPPED[lever]), enough=len(batch.prompts))
        else:
            yield Arm(lever, batch.take(rows[lever.removeprefix("order: ")]))


def predictions() -> Iterator[frozen.Row]:
    """Each lever as `tune` weighs it, with the limits kept."""
    for loop_us in frozen.HOST_LOOPS_US:
        for case in CASES:
            tuned = _tuned(case.workload, loop_us)
            plain = {lever.name: lever for lever in levers(tuned, Scene.of(tuned))} if case.levers else {}
            for name in case.levers:
                yield _row(case, name, loop_us, plain[name])
            for method in case.engines[1:]:
                for acceptance in ACCEPTANCES:
                    drafts = Speculation(acceptance, DRAFTS, method)
                    yield _row(case, method, loop_us, _with_drafts(tuned, drafts), acceptance)


@cache
def _tuned(workload: Workload, loop_us: int | None) -> Tuned:
    known: dict[str, Any] = {"limits": LIMITS, "precisions": [PRECISION], "engine_version": VERSION}
    return search(TuneRequest(MODEL, GPU, workload, keep=SEARCHED, host_loop_s=frozen.seconds(loop_us), **known))


def _with_drafts(tuned: Tuned, drafts: Speculation) -> Lever:
    with_drafts = replace(tuned, request=replace(tuned.request, speculation=drafts))
    every = levers(with_drafts, Scene.of(with_drafts))
    return next(lever for lever in every if lever.name.startswith("speculative decoding"))


def _row(case: Case, name: str, loop_us: int | None, lever: Lever, acceptance: float | None = None) -> frozen.Row:
    numbers = lever.before_s, lever.after_s, *(end or lever.gain.ratio for end in lever.gain)
    rounded = {name: round(value, 4) for name, value in zip(NUMBERS, numbers, strict=True)}
    return {"case": case.name, "lever": name, "acceptance": acceptance, frozen.HOST: loop_us} | rounded


@dataclass(frozen=True)
class Judged:
    """One lever, predicted and measured.

    acceptance: share of first drafts that were accepted; None without drafts, or before it is measured
    predicted:  NUMBERS for the measurement's host and acceptance
    before_s, after_s: measured medians; None: not measured yet
    """

    case: str
    lever: str
    acceptance: float | None
    predicted: Mapping[str, float]
    before_s: float | None = None
    after_s: float | None = None

    @property
    def gain(self) -> float | None:
        """The measured gain."""
        return self.before_s / self.after_s if self.before_s and self.after_s else None


def judged(predicted: Sequence[frozen.Row], runs: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Every predicted lever. A lever with drafts that is not measured yet has a row for each acceptance."""
    result = []
    for case, lever in dict.fromkeys((row["case"], row["lever"]) for row in predicted):
        rows = [row for row in predicted if (row["case"], row["lever"]) == (case, lever)]
        before, after = ([run for run in runs if (run["case"], run["arm"]) == (case, arm)] for arm in (PLAIN, lever))
        acceptances = list(dict.fromkeys(row["acceptance"] for row in rows))
        by_acceptance = [[row for row in rows if row["acceptance"] == x] for x in acceptances]
        if not (before and after):
            unknown = [frozen.on_host(those, NUMBERS, None) for those in by_acceptance]
            result += [Judged(case, lever, x, numbers) for x, numbers in zip(acceptances, unknown, strict=True)]
            continue
        loops = [run["host_loop_s"] for run in (*before, *after) if run["host_loop_s"] is not None]
        own = [frozen.on_host(those, NUMBERS, mean(loops) if loops else None) for those in by_acceptance]
        accepted = median(run["acceptance"] for run in after) if acceptances != [None] else None
        numbers = own[0] if accepted is None else _at(accepted, acceptances, own)
        times = [median(run["seconds"] for run in some) for some in (before, after)]
        result.append(Judged(case, lever, accepted, numbers, *times))
    return result


def _at(accepted: float, acceptances: Sequence[float], own: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """NUMBERS at an acceptance, between those that were predicted."""
    return {name: float(np.interp(accepted, acceptances, [row[name] for row in own])) for name in NUMBERS}


def table(those: Sequence[Judged]) -> str:
    """The levers in Markdown, and a sentence on their intervals."""
    seconds = "without: measured (s)", "predicted", "with: measured (s)", "predicted"
    heads = "workload", "lever", "accepted", *seconds, "gain", "predicted (90%)", "error, points"
    gains = [(lever.gain, lever.predicted) for lever in those if lever.gain is not None]
    hold = sum(row["gain_low"] <= gain <= row["gain_high"] for gain, row in gains)
    return f"{markdown(heads, map(_line, those))}\n\n90% intervals that hold the measured gain: {hold} of {len(gains)}."


def _line(lever: Judged) -> Iterator[str]:
    yield from (lever.case, lever.lever, "" if lever.acceptance is None else f"{lever.acceptance:.0%}")
    for measured, name in ((lever.before_s, "before_s"), (lever.after_s, "after_s")):
        yield "not yet" if measured is None else f"{measured:.2f}"
        yield f"{lever.predicted[name]:.2f}"
    gain, low, high = (lever.predicted[name] for name in NUMBERS[2:])
    yield "not yet" if lever.gain is None else f"{lever.gain:.2f}x"
    yield f"{gain:.2f}x ({low:.2f}-{high:.2f})"
    yield "" if lever.gain is None else f"{100 * (gain - lever.gain):+.1f}"


def committed() -> list[Judged]:
    """The committed predictions beside the committed runs; first runs only compile."""
    return judged(jsonl.rows(PREDICTIONS), [run for run in jsonl.rows(MEASURED) if run["repeat"]])


if __name__ == "__main__":
    frozen.command("levers", PREDICTIONS, MEASURED, predictions, lambda: table(committed()))
