"""Observations of engines in this process, and the steps that servers and files share with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile
from fp8plan.runtime.apply.doctor.ask import (
    DECODED,
    MOST_PROMPTS,
    PROMPT_TOKENS,
    Ask,
    amax_of,
    asking_llm,
    cached_against_fresh,
    counts_of,
    decode_against_prefill,
    temperatures,
    weights_of_ranks,
)
from fp8plan.runtime.apply.doctor.observed import Observed
from fp8plan.runtime.apply.doctor.over_http.client import CannotLook
from fp8plan.runtime.apply.weight_sync.calls import Call, rpc
from fp8plan.runtime.apply.weight_sync.kv_calibration import random_prompts
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.apply.worker.facts import preset_of
from fp8plan.runtime.tokens import refuse_tokens
from fp8plan.runtime.watch.guard.causes import lost_prefixes_in
from fp8plan.runtime.watch.guard.observation import kernel_names

if TYPE_CHECKING:
    from vllm import LLM

    from fp8plan.runtime.apply.engine.base import AnyEngine
    from fp8plan.runtime.watch.guard.guard import Verdict

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Request:
    """The user's arguments of the doctor, as in `doctor`. prompt_file: a file of prompts, for a server"""

    prompts: Sequence[Sequence[int]] | None = None
    weights: Any = None
    scored: Sequence[Scored] = ()
    temperature: float = 1.0
    gpu: str | None = None
    precision: str | None = None
    prompt_file: Path | None = None
    trainer_precision: str | None = None


@dataclass(slots=True)
class Notes:
    """The reasons for missing observations."""

    unseen: dict[str, str] = field(default_factory=dict)

    def of(self, what: str, find: Callable[[], Found]) -> Found | None:
        """The result of `find`; None, and a note, for an error: one failed question must not hide the rest.

        Raises CannotLook, after which no answer of the target counts.
        """
        try:
            return find()
        except CannotLook:
            raise
        except Exception as error:
            named = "" if isinstance(error, Fp8PlanError) else f"{type(error).__name__}: "
            self.unseen[what] = f"{named}{' '.join(str(error).split())[:300]}"
            return None


def observe_engine(engine: AnyEngine, ask: Ask, request: Request) -> Observed:
    """Observe an engine of fp8plan's. ask: the function that runs procedures on it"""
    notes, setup, state = Notes(), engine.launch.setup, engine.state
    last = getattr(engine, "observation", None)  # an AsyncRolloutEngine has none: it does not know its rollouts
    verdict: Verdict | None = getattr(engine, "verdict", None)
    sequences = engine.last_sequences if request.prompts is None else request.prompts
    most = None if engine.llm is None else getattr(engine.llm, "llm_engine", engine.llm).model_config.max_logprobs
    fields = _inside(ask, state, request, sequences, notes, most)
    return Observed(
        target=f"{type(engine).__name__} on {setup.gpu.name}",
        gpu=setup.gpu.name,
        precision=request.precision or setup.precision.name,
        measured_kernels=notes.of("measured_kernels", lambda: measured_kernels(setup.gpu.name, engine.facts)),
        preemptions=None if last is None else last.preemptions,
        requests=None if last is None else len(last.response_lengths),
        prefix_cache_queries=None if last is None else last.prefix_cache_queries,
        prefix_cache_hits=None if last is None else last.prefix_cache_hits,
        lost_prefixes=None if verdict is None else lost_prefixes_in(verdict.causes),
        since="the last rollout began",
        version=state.version,
        refusal=state.refusal,
        **fields,
        unseen=notes.unseen,
    )


def observe_llm(llm: LLM, request: Request) -> Observed:
    """Observe a plain vllm.LLM. Raises ConfigError while requests run."""
    notes, config = Notes(), llm.llm_engine.vllm_config
    state = SyncState.of(config)
    counted = notes.of("counts", lambda: counts_of(llm)) or {}  # before the doctor's own requests
    fields = _inside(asking_llm(llm), state, request, request.prompts or (), notes, config.model_config.max_logprobs)
    facts: Mapping[str, Any] = fields["ranks"][0] if fields["ranks"] else {}
    gpu, kernels = measured_on(request, facts, notes)
    return Observed(
        target=f"vllm.LLM of {config.model_config.model}",
        gpu=gpu,
        precision=request.precision,
        measured_kernels=kernels,
        **counted,
        **fields,
        unseen=notes.unseen,
    )


def _inside(
    ask: Ask, state: SyncState, request: Request, sequences: Sequence[Sequence[int]], notes: Notes, most: int | None
) -> dict[str, Any]:
    """The fields of an Observed from workers and requests.

    state:     for its settings, limits and manifests
    sequences: earlier prompts of the engine, which may be cached
    most:      vLLM's max_logprobs

    The cache comes first: all later requests fill it.
    """
    refuse_given(request, sequences, state)
    fields = observed_by_requests(ask, state, request, sequences, notes, most) if state.refusal is None else {}
    ranks = notes.of("ranks", lambda: ask(rpc("fp8plan_facts"))) or []
    scales = notes.of("kv_scales", lambda: ask(rpc("fp8plan_kv_scales"))[0]) if state.fp8_kv and ranks else None
    runs = preset_of(ranks[0]) if ranks else None
    fields["ranks"], fields["runs"], fields["kv_scales"] = ranks, runs, scales
    fields["kernels"] = dict(ranks[0]["kernels"]) if ranks else None
    if runs:
        fields["kernels"] = kernel_names(ranks[0], PRESETS[runs])
    ours = state if state.expected is not None or state.prepared else None
    fields["weights"] = notes.of("weights", lambda: ask(weights_of_ranks(ours, request.weights)))
    return fields


def refuse_given(request: Request, sequences: Sequence[Sequence[int]], state: SyncState) -> None:
    """Raise ConfigError for prompts and scored sequences that are no token ids of this engine."""
    for what, tokens in (("prompts", sequences), ("scored", [scored.tokens for scored in request.scored])):
        refuse_tokens(what, tokens, state.vocabulary, state.longest_prompt)


def observed_by_requests(
    ask: Ask,
    state: SyncState,
    request: Request,
    sequences: Sequence[Sequence[int]],
    notes: Notes,
    most: int | None = None,
) -> dict[str, Any]:
    """The fields of an Observed from requests; `kv_amax` alone needs the workers, too. most: max_logprobs"""
    prompts = _probes(sequences, state)

    def tell(what: str, procedure: Generator[Call, Any, Any]) -> Any:
        return notes.of(what, lambda: ask(procedure))

    fields = {"prefix": tell("prefix", cached_against_fresh(sequences)) if sequences else None}
    if not sequences:
        notes.unseen["prefix"] = (
            "no prompt is known that the engine has had; type: doctor(..., prompts=), --prompts FILE"
        )
    fields["decode"] = tell("decode", decode_against_prefill(prompts))
    if request.scored:
        procedure = temperatures(request.scored, request.temperature, most, state.vocabulary)
        fields["temperatures"] = tell("temperatures", procedure)
    if state.fp8_kv and sequences:  # random tokens say nothing about scales
        fields["kv_amax"] = tell("kv_amax", amax_of(prompts))
    return fields


def _probes(sequences: Sequence[Sequence[int]], state: SyncState) -> list[list[int]]:
    """Beginnings of the sequences that leave room for a decode; random tokens without sequences."""
    room = max(1, min(PROMPT_TOKENS, (state.longest_prompt or 2 * PROMPT_TOKENS) - DECODED))
    if sequences:
        return [list(tokens[:room]) for tokens in sequences[:MOST_PROMPTS]]
    return random_prompts(state.vocabulary, room, MOST_PROMPTS)


def measured_on(
    request: Request, facts: Mapping[str, Any], notes: Notes
) -> tuple[str | None, Mapping[str, str] | None]:
    """The GPU of the user, the engine or this machine, and the kernels of its profile."""
    device = facts.get("device")
    here = "auto" if device in (None, "cuda") else device
    gpu = notes.of("measured_kernels", lambda: request.gpu or find_gpu(here).name)
    return gpu, notes.of("measured_kernels", lambda: measured_kernels(gpu, facts))


def measured_kernels(gpu: str | None, facts: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The kernels of the best profile for this GPU and version of vLLM. Raises ProfileError without one."""
    if gpu is None or "vllm_version" not in facts:
        return None
    return load_profile(find_gpu(gpu), str(facts["vllm_version"]).partition("+")[0])[0].kernel_backends
