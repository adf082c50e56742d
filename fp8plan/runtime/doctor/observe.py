"""Observations of engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fp8plan.errors import Fp8PlanError
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile
from fp8plan.runtime.doctor import ask as asking
from fp8plan.runtime.doctor.ask import Ask, asking_llm, counts_of
from fp8plan.runtime.doctor.observed import Observed
from fp8plan.runtime.doctor.over_http.client import CannotLook
from fp8plan.runtime.engine.options import refuse_tokens
from fp8plan.runtime.guard.observation import kernel_names
from fp8plan.runtime.weight_sync.state import Call, Scored, SyncSettings, SyncState, rpc
from fp8plan.runtime.worker.facts import preset_of

if TYPE_CHECKING:
    from vllm import LLM

    from fp8plan.runtime.engine.base import AnyEngine

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Given:
    """The user's answers to the doctor, all of it optional.

    prompts: token ids of prompts that the engine has had lately
    weights: the trainer's tensors
    scored:  sequences with the trainer's log-probs
    temperature: of the rollouts
    gpu, precision: what the engine should run on, and as
    prompt_file: a file of such prompts, for a server
    """

    prompts: Sequence[Sequence[int]] | None = None
    weights: Any = None
    scored: Sequence[Scored] = ()
    temperature: float = 1.0
    gpu: str | None = None
    precision: str | None = None
    prompt_file: Path | None = None


@dataclass(slots=True)
class Notes:
    """Notes why something could not be seen; `of` is asked for it."""

    unseen: dict[str, str] = field(default_factory=dict)

    def of(self, what: str, find: Callable[[], Found]) -> Found | None:
        """Return what `find` gives; None, and a note, for an error: what one question meets must not hide the rest.

        Raises CannotLook, after which nothing that the target tells counts.
        """
        try:
            return find()
        except CannotLook:
            raise
        except Exception as error:
            named = "" if isinstance(error, Fp8PlanError) else f"{type(error).__name__}: "
            self.unseen[what] = f"{named}{' '.join(str(error).split())[:300]}"
            return None


def observe_engine(engine: AnyEngine, ask: Ask, given: Given) -> Observed:
    """Observe an engine of fp8plan's. ask: runs procedures on it"""
    notes, setup, state = Notes(), engine.launch.setup, engine.state
    last = getattr(engine, "observation", None)  # an AsyncRolloutEngine does not know which requests make a rollout
    sequences = engine.last_sequences if given.prompts is None else given.prompts
    most = None if engine.llm is None else getattr(engine.llm, "llm_engine", engine.llm).model_config.max_logprobs
    found = inside(ask, state, given, sequences, notes, most)
    return Observed(
        target=f"{type(engine).__name__} on {setup.gpu.name}",
        gpu=setup.gpu.name,
        precision=given.precision or setup.precision.name,
        measured_kernels=notes.of("measured_kernels", lambda: measured_kernels(setup.gpu.name, engine.facts)),
        preemptions=None if last is None else last.preemptions,
        requests=None if last is None else len(last.response_lengths),
        since="the last rollout began",
        version=state.version,
        refusal="it has died" if state.dead else state.refusal,
        **found,
        unseen=notes.unseen,
    )


def observe_llm(llm: LLM, given: Given) -> Observed:
    """Observe a plain vllm.LLM. Raises ConfigError while requests run."""
    notes, config = Notes(), llm.llm_engine.vllm_config
    state = SyncState(SyncSettings(), None, str(config.cache_config.cache_dtype).startswith("fp8"))
    state.longest_prompt, state.vocabulary = config.model_config.max_model_len - 1, config.model_config.get_vocab_size()
    found = inside(asking_llm(llm), state, given, given.prompts or (), notes, config.model_config.max_logprobs)
    counts = notes.of("preemptions", lambda: counts_of(llm))
    facts: Mapping[str, Any] = found["ranks"][0] if found["ranks"] else {}
    gpu, kernels = measured_on(given, facts, notes)
    return Observed(
        target=f"vllm.LLM of {config.model_config.model}",
        gpu=gpu,
        precision=given.precision,
        measured_kernels=kernels,
        preemptions=None if counts is None else counts[0],
        requests=None if counts is None else counts[1],
        **found,
        unseen=notes.unseen,
    )


def inside(
    ask: Ask, state: SyncState, given: Given, sequences: Sequence[Sequence[int]], notes: Notes, most: int | None
) -> dict[str, Any]:
    """The fields of an Observed that workers and requests tell.

    state:     for what its settings, limits and manifests say
    sequences: prompts that the engine has had, which may be cached
    most:      vLLM's max_logprobs

    What is cached is asked about first: all that follows is cached itself.
    """
    for what, tokens in (("prompts", sequences), ("scored", [one.tokens for one in given.scored])):
        refuse_tokens(what, tokens, state.vocabulary, state.longest_prompt)
    found = asked(ask, state, given, sequences, notes, most) if state.refusal is None else {}
    ranks = notes.of("ranks", lambda: ask(rpc("fp8plan_facts"))) or []
    scales = notes.of("kv_scales", lambda: ask(rpc("fp8plan_kv_scales"))[0]) if state.fp8_kv and ranks else None
    runs = preset_of(ranks[0]) if ranks else None
    found["ranks"], found["runs"], found["kv_scales"] = ranks, runs, scales
    found["kernels"] = kernel_names(ranks[0], PRESETS[runs]) if runs else dict(ranks[0]["kernels"]) if ranks else None
    ours = state if state.expected is not None or state.prepared else None
    found["weights"] = notes.of("weights", lambda: ask(asking.weights_of_ranks(ours, given.weights)))
    return found


def asked(
    ask: Ask,
    state: SyncState,
    given: Given,
    sequences: Sequence[Sequence[int]],
    notes: Notes,
    most: int | None = None,
) -> dict[str, Any]:
    """The fields of an Observed that requests tell; the workers are needed for `kv_amax` alone. most: max_logprobs"""
    prompts = probes(sequences, state)

    def tell(what: str, procedure: Generator[Call, Any, Any]) -> Any:
        return notes.of(what, lambda: ask(procedure))

    found = {"prefix": tell("prefix", asking.cached_against_fresh(sequences)) if sequences else None}
    if not sequences:
        notes.unseen["prefix"] = (
            "no prompt is known that the engine has had; type: doctor(..., prompts=), --prompts FILE"
        )
    found["decode"] = tell("decode", asking.decode_against_prefill(prompts))
    if given.scored:
        found["temperatures"] = tell(
            "temperatures", asking.temperatures(given.scored, given.temperature, most, state.vocabulary)
        )
    if state.fp8_kv and sequences:  # what random tokens reach says nothing of scales
        found["kv_amax"] = tell("kv_amax", asking.amax_of(prompts))
    return found


def probes(sequences: Sequence[Sequence[int]], state: SyncState) -> list[list[int]]:
    """Beginnings of the sequences that leave room for a decode; random tokens where there are none."""
    room = max(1, min(asking.PROMPT_TOKENS, (state.longest_prompt or 2 * asking.PROMPT_TOKENS) - asking.DECODED))
    if sequences:
        return [list(tokens[:room]) for tokens in sequences[: asking.MOST_PROMPTS]]
    import numpy as np

    size = (asking.MOST_PROMPTS, room)
    found: list[list[int]] = np.random.default_rng(0).integers(0, state.vocabulary or 1000, size).tolist()
    return found


def card(name: str) -> str:
    """The name of a GPU in fp8plan.model.hardware. Raises ConfigError for one that it does not know."""
    return find_gpu(name).name


def measured_on(given: Given, facts: Mapping[str, Any], notes: Notes) -> tuple[str | None, Mapping[str, str] | None]:
    """The GPU that was given, that the engine tells, or that is here, and the kernels that its profile was measured
    with."""
    told = facts.get("device")
    here = "auto" if told in (None, "cuda") else told
    gpu = notes.of("measured_kernels", lambda: given.gpu or card(here))
    return gpu, notes.of("measured_kernels", lambda: measured_kernels(gpu, facts))


def measured_kernels(gpu: str | None, facts: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The kernels that the best profile for this GPU and version of vLLM was measured with. Raises ProfileError where
    there is none."""
    if gpu is None or "vllm_version" not in facts:
        return None
    return load_profile(find_gpu(gpu), str(facts["vllm_version"]).partition("+")[0])[0].kernel_backends
