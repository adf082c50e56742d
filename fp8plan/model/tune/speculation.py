"""Speculative decoding: drafted tokens that the model verifies in one step.

A step computes the newest token of each decoding request and `tokens` drafts. A draft is accepted with one probability
if those before it were. So a request gains (1 - acceptance^(tokens + 1)) / (1 - acceptance) tokens on average, its own
included (Leviathan et al., arXiv 2211.17192, equation 1).

The schedule is vLLM's in other units. With a gain of g tokens a step, r response tokens take as many decoding steps as
(r - 1) / g tokens without drafts, in blocks of block_size / g. So the simulator runs as it is, on lengths, blocks and
budget in units of g tokens (`in_units`), and its schedule is put back in tokens (`in_tokens`).
That is exact if g divides the block size, prompts are not shared, no request is preempted and the budget is not used
up: tests/model/tune/test_speculation.py compares with vLLM's own scheduler. Else blocks are rounded to whole units.
Samples of a prompt share up to `slots` tokens too many. A preempted request gains g tokens from its recomputation
instead of one, and a decoding request takes g tokens of the budget instead of `tokens` + 1. A random number of accepted
tokens is taken as its mean.

A step costs GEMMs with `tokens` + 1 rows for each request, attention that reads a request's KV once for all of them,
and as many rows of lm_head and sampling. No profile has measured a step with drafts. Not modelled: the search for
n-grams, launches of a draft head, requests without a draft, heads with a smaller vocabulary, the step more of a request
that ends under asynchronous scheduling, and acceptance that differs between responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple

import numpy as np

from fp8plan.checks import is_number, whole
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import Rollout, rollout, schedules
from fp8plan.model.schedule.scheduler import Schedule
from fp8plan.model.setup import EngineSetup
from fp8plan.model.workload import Batch
from fp8plan.options import DRAFTS, Option, group_of
from fp8plan.version import has


class Method(NamedTuple):
    """A source of drafts.

    head:         a layer and lm_head beside the model's, whose KV has slots for the drafts too (num_lookahead_tokens in
                  vllm/config/vllm.py)
    asynchronous: vLLM schedules asynchronously with it (VllmConfig.__post_init__), in every version
    """

    head: bool
    asynchronous: bool


NGRAM_ON_GPU: Final = "ngram drafts on the GPU"  # of version.SINCE
NONE: Final = Method(head=False, asynchronous=True)
NGRAM: Final = "ngram"
METHODS: Final = {
    NGRAM: Method(head=False, asynchronous=False),
    "ngram_gpu": Method(head=False, asynchronous=True),
    "mtp": Method(head=True, asynchronous=True),
    "eagle3": Method(head=True, asynchronous=True),
}


TOKENS: Final = 3


@dataclass(frozen=True, slots=True)
class Speculation:
    """vLLM's speculative_config, and its yield.

    acceptance: probability that a draft is accepted if those before it were, in [0, 1]
    tokens:     num_speculative_tokens: drafts of each decoding request in a step; 0: none
    method:     one of METHODS

    Raises ConfigError for other values.
    """

    acceptance: Annotated[
        float, Option(DRAFTS, "share of drafts accepted after accepted ones, from 0 to 1; weighs this lever")
    ]
    tokens: Annotated[int, Option(DRAFTS, "drafts of a request in a step", f"{TOKENS}", "--num-speculative-tokens")] = (
        TOKENS
    )
    method: Annotated[
        str, Option(DRAFTS, "ngram, ngram_gpu, mtp, eagle3", NGRAM, "--speculative-method", metavar="NAME")
    ] = NGRAM

    def __post_init__(self) -> None:
        if not (is_number(self.acceptance) and 0 <= self.acceptance <= 1):
            raise ConfigError(f"acceptance is {self.acceptance!r}; allowed: a share of drafts in [0, 1]")
        whole("num_speculative_tokens", self.tokens, least=0)
        if self.method not in METHODS:
            raise ConfigError(f"speculative method is {self.method!r}; allowed: {', '.join(METHODS)}")

    @property
    def queries(self) -> int:
        """Tokens that a decoding request computes in a step."""
        return 1 + self.tokens

    @property
    def gained(self) -> float:
        """Tokens that a decoding request gains in a step, on average."""
        return float(sum(self.acceptance**drafts for drafts in range(self.queries)))

    @property
    def source(self) -> Method:
        """The source of the drafts."""
        return METHODS[self.method] if self.tokens else NONE

    @property
    def slots(self) -> int:
        """KV slots that a decoding request needs in a step, beyond the tokens before it."""
        return self.queries + (self.tokens if self.source.head else 0)

    @property
    def config(self) -> dict[str, Any]:
        """vLLM's speculative_config. An EAGLE head is a checkpoint of its own, whose name the user knows."""
        own = {"model": "HEAD"} if self.method == "eagle3" else {}
        return {"method": self.method, "num_speculative_tokens": self.tokens} | own

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError for a model whose speculation is not modelled."""
        if shape.recurrent:
            raise ConfigError(
                f"speculative decoding of {shape.name} is not modelled, as its recurrent layers keep a state for each "
                "draft; leave out acceptance, or give a model with attention only"
            )

    def limits(self, setup: EngineSetup) -> EngineLimits:
        """The limits with drafts: a token budget and CUDA graphs for as many requests as before."""
        limits, largest = setup.limits, max(setup.cudagraph_sizes, default=None)
        budget = max(limits.max_num_batched_tokens, self.queries * limits.max_num_seqs)
        on_gpu = has(setup.engine_version, NGRAM_ON_GPU) and not setup.gpu.is_cpu
        return replace(
            limits,
            max_num_batched_tokens=budget,
            max_cudagraph_capture_size=largest and min(self.queries * largest, budget),
            async_scheduling=limits.async_scheduling and (self.source.asynchronous or on_gpu),
        )


DRAFT_OPTIONS: Final = group_of(Speculation)


def speculation_of(acceptance: float | None = None, **drafts: Any) -> Speculation | None:
    """The speculation that a user asks for; None without an acceptance.

    drafts: other fields of Speculation. Raises ConfigError for drafts without an acceptance.
    """
    if acceptance is not None:
        return Speculation(acceptance, **drafts)
    if drafts:
        raise ConfigError(
            "drafts are given without an acceptance; give --acceptance 0.6, the share of drafts that are accepted "
            "after accepted ones (vLLM logs it as its per-position acceptance rate)"
        )
    return None


def speculated(setup: EngineSetup, batch: Batch, profile: Profile, speculation: Speculation) -> Rollout:
    """The rollout of a batch on an engine with drafts. A draft head adds a layer to the model's memory.

    Raises ConfigError as `check` does, and CapacityError if the model or a request does not fit any more.
    """
    speculation.check(setup.shape)
    engine, shape, head = replace(setup, limits=speculation.limits(setup)), setup.shape, speculation.source.head
    with_head = replace(shape, layers=(*shape.layers, shape.layers[-1])) if head else shape
    kv = replace(engine, model=with_head).memory(batch.longest).kv
    model = replace(engine.step_model(profile), drafts=speculation.tokens if head else 0)
    batches = batch.split(engine.limits.data_parallel_size)
    planned = planned_with(batches, kv, engine.limits, speculation)
    return replace(rollout(planned, model), output_tokens=int(batch.responses.sum()))


def planned_with(
    batches: Sequence[Batch], kv: KvPlan, limits: EngineLimits, speculation: Speculation
) -> list[Schedule]:
    """The schedule of each replica's batch. kv, limits: of the engine with drafts"""
    work = [in_units(batch, speculation) for batch in batches]
    planned = schedules(work, pool_in_units(kv, speculation), limits_in_units(limits, speculation))
    return [in_tokens(plan, batch, kv, speculation) for plan, batch in zip(planned, batches, strict=True)]


def in_units(batch: Batch, speculation: Speculation) -> Batch:
    """The batch in units of `gained` tokens. The slots of a step's drafts count as a part of the prompt."""
    first = np.ceil((batch.prompts + speculation.slots) / speculation.gained).astype(np.int64)
    decoding = np.ceil((batch.responses - 1) / speculation.gained).astype(np.int64)
    return batch._replace(prompts=np.maximum(first - 1, 1), responses=1 + decoding)


def pool_in_units(kv: KvPlan, speculation: Speculation) -> KvPlan:
    """The KV cache with blocks of whole units. It holds as many tokens, less at most a block."""
    size, share = _block(kv), _block_share(kv, speculation)
    units = share * size / speculation.gained  # in a block

    def resized(spec: Spec) -> Spec:
        window = spec.window and max(1, round(spec.window / speculation.gained))
        return spec._replace(block_size=round(spec.block_size / size * units), window=window)

    groups = tuple(replace(group, specs=tuple(map(resized, group.specs))) for group in kv.groups)
    return replace(kv, groups=groups, num_blocks=1 + int(kv.usable_blocks / share))


def limits_in_units(limits: EngineLimits, speculation: Speculation) -> EngineLimits:
    """The limits of the scheduler in units of `gained` tokens."""
    return replace(
        limits, max_num_batched_tokens=int(limits.max_num_batched_tokens / speculation.gained), max_model_len=None
    )


def _block(kv: KvPlan) -> int:
    """Tokens of the smallest block of a group; the others are multiples."""
    return min(spec.block_size for spec in kv.specs)


def _block_share(kv: KvPlan, speculation: Speculation) -> float:
    """Tokens of a block of whole units, over those of a block."""
    size = _block(kv)
    return max(1, round(size / speculation.gained)) * speculation.gained / size


def in_tokens(plan: Schedule, batch: Batch, kv: KvPlan, speculation: Speculation) -> Schedule:
    """The schedule of the batch `in_units`, in tokens. Prefill adds up to the prompts' own tokens.

    kv: the KV cache of the engine, in tokens
    """
    gained, ahead = speculation.gained, speculation.slots - speculation.queries
    each = int(batch.prompts.sum()) / plan.prompt_tokens  # tokens of a unit of prefill

    columns = dict.fromkeys(("prefill_tokens", "prefill_kv_tokens", "cached_tokens"), each)
    columns |= {"prefill_pairs": each**2, "recomputed_tokens": gained, "used_blocks": _block_share(kv, speculation)}
    windows = tuple(
        replace(
            reads,
            window=window,
            decode_kv_tokens=_scaled(reads.decode_kv_tokens, gained),
            prefill_kv_tokens=_scaled(reads.prefill_kv_tokens, each),
            prefill_pairs=_scaled(reads.prefill_pairs, each**2),
        )
        for reads, (_, window) in zip(
            plan.windows, dict.fromkeys((x.kind, x.window) for x in kv.specs if x.window), strict=True
        )
    )
    changed: dict[str, Any] = {name: _scaled(getattr(plan, name), factor) for name, factor in columns.items()}
    return replace(
        plan,
        **changed,
        decode_kv_tokens=_scaled(plan.decode_kv_tokens, gained) - ahead * plan.decode_requests,
        prompt_tokens=int(batch.prompts.sum()),
        num_blocks=kv.usable_blocks,
        groups=kv.specs,
        blocks_wanted=None,
        windows=windows,
        gained=gained,
        queries=speculation.queries,
    )


def _scaled(units: IntArray, factor: float) -> IntArray:
    return np.asarray(np.rint(units * factor), dtype=np.int64)
