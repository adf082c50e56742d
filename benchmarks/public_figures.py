"""fp8plan's side of figures that others published (docs/evidence/accuracy.md).

    python -m benchmarks.public_figures

It prints the table of all figures. `make tables` writes those that disagree to that page. The figures, their sources
and the configs of models that fp8plan does not bundle are in public_figures.json.

A figure has one of four verdicts. It is right if the prediction agrees within the tolerance of its kind, and refused if
fp8plan refuses an engine that vLLM refused. Else `why` says how much is missing and what causes it: it is explained, or
open if the cause is not known.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from benchmarks.tables.markdown import table
from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.front import OWN
from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import find_gpu
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.memory.plan import loaded_weight_bytes
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.planner import plan
from fp8plan.model.setup import EngineSetup, default_limits
from fp8plan.model.workload import Workload

GIB: Final = 1 << 30
DATA: Final = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

PRINTED_GIB: Final = 0.005  # half of the last digit that vLLM prints
WEIGHTS_GIB: Final = 8 / 1024  # four blocks of PyTorch's allocator
POOL_SHARE: Final = 0.02  # as UNSURE_SHARE in fp8plan/model/memory/plan.py

Verdict = Literal["right", "refused", "explained", "open"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure, and the set-up that it is of.

    kind:         the row of KINDS that predicts it
    public:       the figure, in the unit of its kind; of a refusal the number that vLLM refused
    gpu:          "" where the figure is the same on any Hopper GPU
    limits:       limits of the engine beside vLLM's defaults
    pool_gib:     the KV pool that the engine printed, for kinds about a pool of known size
    uncounted_gib: memory that the engine takes and the prediction does not count
    towers:       billions of parameters of encoders that fp8plan does not read
    tolerance:    in the unit of the kind, where the kind has none of its own
    workload:     requests, prompt tokens and response tokens
    inside:       the program that called the engine, as in PlanRequest
    refusal:      words of fp8plan's refusal
    note:         what a reader must know of the comparison
    why:          the size of a miss, and its cause
    unknown:      the cause is not known
    otherwise:    fields with which the prediction agrees, if the cause can be tried
    """

    kind: str
    model: str
    public: float
    source: str
    gpu: str = ""
    precision: str = "bf16"
    engine_version: str = "0.26.0"
    limits: dict[str, Any] = field(default_factory=dict)
    pool_gib: float = 0.0
    uncounted_gib: float = 0.0
    towers: float = 0.0
    tolerance: float = 0.0
    workload: tuple[int, ...] = ()
    inside: str = OWN
    refusal: str = ""
    note: str = ""
    why: str = ""
    unknown: bool = False
    otherwise: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> ModelShape:
        config = DATA["configs"].get(self.model)
        if config is None:
            return ModelShape.from_hf(self.model)
        return ModelShape.from_config(config, self.model, "public_figures.json")

    @property
    def setup(self) -> EngineSetup:
        gpu, shape = find_gpu(self.gpu or "h100"), self.shape
        limits = default_limits(gpu, shape, **self.limits)
        return EngineSetup(shape, gpu, self.precision, limits, engine_version=self.engine_version)

    @property
    def cache(self) -> KvPlan:
        return self.setup.kv_plan(0)

    @property
    def available_gib(self) -> float:
        return self.setup.memory().available_bytes / GIB - self.uncounted_gib

    @property
    def choice(self) -> Choice:
        requests, prompt, response = self.workload
        work = Workload(requests, 1, Fixed(prompt), Fixed(response))
        setup = self.setup
        answer = plan(
            setup.model, setup.gpu, work, limits=setup.limits, precisions=[self.precision],
            engine_version=self.engine_version, inside=self.inside,
        )  # fmt: skip
        return answer.choices[0]

    @cached_property
    def predicted(self) -> Predicted:
        return KINDS[self.kind].predict(self)

    @property
    def agrees(self) -> bool:
        return self.predicted.low <= self.public <= self.predicted.high

    @property
    def verdict(self) -> Verdict:
        if self.agrees:
            return "refused" if self.kind == "refusal" else "right"
        return "open" if self.unknown else "explained"

    @property
    def where(self) -> str:
        """The place of the source in words, for a table."""
        place = self.source.removeprefix("https://github.com/")
        if place == self.source:
            return place
        owner, repository, kind, *rest = place.split("/")
        name = f"{kind.removesuffix('s')} {rest[0]}" if kind in ("issues", "pull") else rest[-1]
        return f"[{owner}/{repository} {name}]({self.source})"


class Predicted(NamedTuple):
    """A prediction, and the figures that agree with it."""

    value: float
    low: float
    high: float


def exactly(value: float) -> Predicted:
    return Predicted(value, value, value)


def within(value: float, tolerance: float) -> Predicted:
    return Predicted(value, value - tolerance, value + tolerance)


def _weights(figure: Figure) -> Predicted:
    setup = figure.setup
    tp = setup.limits.tensor_parallel_size
    deep_gemm = not setup.gpu.stores_fp8_only
    return within(loaded_weight_bytes(setup.shape, setup.precision, tp, 1, deep_gemm) / GIB, WEIGHTS_GIB)


def _pool(figure: Figure, count: Callable[[KvPlan], float]) -> Predicted:
    """The count of the pool nearest to the public one, among pools of the printed size."""
    cache = figure.cache
    sizes = (figure.pool_gib - PRINTED_GIB, figure.pool_gib + PRINTED_GIB)
    fewest, most = (int(gib * GIB // cache.block_bytes) for gib in sizes)
    counts = (count(replace(cache, num_blocks=blocks)) for blocks in range(fewest, most + 1))
    return exactly(min(counts, key=lambda x: abs(x - figure.public)))


def _engine(figure: Figure, count: Callable[[KvPlan], float]) -> Predicted:
    cache = figure.setup.memory().kv
    value = count(replace(cache, num_blocks=int(figure.available_gib * GIB // cache.block_bytes)))
    return within(value, POOL_SHARE * value)


def _seconds(figure: Figure) -> Predicted:
    choice = figure.choice
    times = (choice.makespan_s, choice.makespan_low_s, choice.makespan_high_s)
    return Predicted(*(seconds or 0.0 for seconds in times))


def _tokens_per_s(figure: Figure) -> Predicted:
    requests, _, response = figure.workload
    value, low, high = (requests * response / seconds for seconds in _seconds(figure))
    return Predicted(value, high, low)


def _refused(figure: Figure) -> Predicted:
    """The public number if fp8plan refuses it too, else 0."""
    setup = figure.setup
    if figure.refusal == "max_num_seqs":
        setup = replace(setup, limits=replace(setup.limits, max_num_seqs=int(figure.public)))
    try:
        setup.placed()
    except (CapacityError, ConfigError) as error:
        return exactly(figure.public if figure.refusal in str(error) else 0)
    return exactly(0)


class Kind(NamedTuple):
    """One kind of figure.

    what:    the figure in words
    digits:  after the point, in a table
    predict: the prediction of a figure
    """

    what: str
    digits: int
    predict: Callable[[Figure], Predicted]


KINDS: Final = {
    "weights_gib": Kind("GiB of weights on a GPU", 3, _weights),
    "request_gib": Kind(
        "GiB of KV of one request",
        2,
        lambda x: within(x.cache.request_blocks * x.cache.block_bytes / GIB, PRINTED_GIB),
    ),
    "token_bytes": Kind("bytes of KV of a token", 0, lambda x: exactly(x.shape.kv_bytes_per_token(x.setup.precision))),
    "request_blocks": Kind("KV blocks of one request", 0, lambda x: exactly(x.cache.request_blocks)),
    "block_tokens": Kind("tokens in a block", 0, lambda x: exactly(x.cache.block_size)),
    "pool_blocks": Kind("blocks of a pool of that size", 0, lambda x: _pool(x, lambda cache: cache.num_blocks)),
    "pool_tokens": Kind("tokens of a pool of that size", 0, lambda x: _pool(x, lambda cache: cache.tokens)),
    "engine_blocks": Kind("blocks of the engine", 0, lambda x: _engine(x, lambda cache: cache.num_blocks)),
    "engine_tokens": Kind("KV tokens of the engine", 0, lambda x: _engine(x, lambda cache: cache.tokens)),
    "engine_gib": Kind("GiB for KV", 2, lambda x: within(x.available_gib, POOL_SHARE * x.available_gib)),
    "refusal": Kind("refused at the start", 0, _refused),
    "seconds": Kind("seconds", 1, _seconds),
    "tokens_per_s": Kind("output tokens/s", 0, _tokens_per_s),
    "billions": Kind(
        "billions of parameters", 1, lambda x: within(x.shape.num_parameters / 1e9 + x.towers, x.tolerance)
    ),
}


@cache
def figures() -> tuple[Figure, ...]:
    return tuple(Figure(**row | {"workload": tuple(row.get("workload", ()))}) for row in DATA["figures"])


def _shown(figure: Figure) -> str:
    kind, predicted = KINDS[figure.kind], figure.predicted
    if figure.kind == "refusal":
        return "refused" if predicted.value else "planned"
    value, low, high = (f"{x:,.{kind.digits}f}" for x in predicted)
    return f"{value} ({low} to {high})" if figure.workload else value


def _set_up(figure: Figure) -> str:
    """The set-up of a figure in words."""
    short = {"tensor_parallel_size": "TP", "data_parallel_size": "DP", "max_model_len": "context"}
    if figure.kind == "billions":
        return ""
    words = [*filter(None, [figure.gpu]), figure.precision]
    words += [f"{short[name]} {value:,}" for name, value in figure.limits.items() if name in short]
    if figure.pool_gib:
        words.append(f"{figure.pool_gib} GiB")
    if figure.workload:
        requests, prompt, response = figure.workload
        words.append(f"{requests} x {prompt:,}/{response:,}")
    if figure.inside != OWN:
        words.append(figure.inside)
    return ", ".join(words)


def row(figure: Figure) -> tuple[str, ...]:
    kind = KINDS[figure.kind]
    public = f"{figure.public:,.{kind.digits}f}"
    if figure.kind == "refusal":
        public = f"{figure.refusal} {public}" if figure.refusal == "max_num_seqs" else "refused"
    remark = " ".join(filter(None, (figure.note, figure.why)))
    name = figure.model.rpartition("/")[2]
    return name, _set_up(figure), kind.what, public, _shown(figure), figure.verdict, figure.where, remark


def shown(rows: Iterable[Figure]) -> str:
    heads = ("model", "set-up", "figure", "public", "fp8plan", "verdict", "source", "remark")
    return table(heads, map(row, rows))


def page() -> str:
    """The number of figures by verdict, and the table of those that disagree."""
    numbers = Counter(figure.verdict for figure in figures())
    summary = ", ".join(f"{numbers[name]} {name}" for name in get_args(Verdict))
    misses = (figure for figure in figures() if not figure.agrees)
    return f"{len(figures())} figures: {summary}. Those that disagree:\n\n{shown(misses)}"


if __name__ == "__main__":
    print(shown(figures()))
