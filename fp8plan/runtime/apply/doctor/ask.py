"""The doctor's questions to an engine, as procedures without input or output (see runtime.apply.weight_sync.procedure).

An engine here, a plain vllm.LLM and a server over HTTP answer the same Calls. No question changes weights or scales.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError, NotServingError, first_line
from fp8plan.runtime.apply.doctor.observed import Compared, RankWeights, Temperatures
from fp8plan.runtime.apply.engine.base import driven, requests
from fp8plan.runtime.apply.engine.counters import SINCE_START, counts
from fp8plan.runtime.apply.weight_sync.calls import Call, Generate, Rpc, rpc
from fp8plan.runtime.apply.weight_sync.kv_scales import Amax, largest
from fp8plan.runtime.apply.weight_sync.manifest import pairs_of
from fp8plan.runtime.apply.weight_sync.procedure import announced, prepared, streamed
from fp8plan.runtime.apply.weight_sync.scored import Scored
from fp8plan.runtime.apply.weight_sync.state import SyncState
from fp8plan.runtime.apply.worker.extension import EXTENSION, Fp8PlanWorker
from fp8plan.runtime.watch.mismatch.sums import LIMIT, k3

if TYPE_CHECKING:
    from vllm import LLM

MOST_PROMPTS: Final = 8
PROMPT_TOKENS: Final = 256  # most tokens of a prompt before a decode
DECODED: Final = 32
# Likeliest tokens of which a distribution's temperature is changed: vLLM's default of max_logprobs is enough.
FEW: Final = 20
ENOUGH: Final = 1024
# A server fills unset fields of a request from the model's generation_config.json.
NEUTRAL: Final = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
VOCABULARY: Final = 150_000  # tokens of an unknown vocabulary
COLDEST, HOTTEST = 0.05, 20.0  # bounds of the search for a trainer's temperature


def cached_against_fresh(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Compared]:
    """Compare the next token's log-prob after each prompt with the prefix cache and without.

    prompts: token ids of earlier prompts of the engine
    """
    next_token = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    with_cache = yield Generate(prompts, next_token)
    without = yield Generate(prompts, next_token | {"prompt_logprobs": 0})  # vLLM then reads no cache
    fresh, cached = [], []
    for computed, read in zip(without, with_cache, strict=True):
        (token,), (row,) = computed.outputs[0].token_ids, computed.outputs[0].logprobs
        listed = read.outputs[0].logprobs[0]
        # A token that is not listed is less likely than all that are.
        entry = listed[token] if token in listed else min(listed.values(), key=lambda entry: entry.logprob)
        fresh.append(row[token].logprob)
        cached.append(entry.logprob)
    counts = [output.num_cached_tokens for output in with_cache]
    return _compared(fresh, cached, None if None in counts else sum(counts))


def decode_against_prefill(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Compared]:
    """Sample DECODED tokens after each prompt, and compare their log-probs with those of a prefill of all of it."""
    sample = NEUTRAL | {"max_tokens": DECODED, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    outputs = yield Generate(prompts, sample)
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    again = yield Generate(whole, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
    decoded, prefilled = [], []
    for output, once_more, response in zip(outputs, again, responses, strict=True):
        rows = once_more.prompt_logprobs[-len(response) :]
        decoded += [row[token].logprob for token, row in zip(response, output.outputs[0].logprobs, strict=True)]
        prefilled += [row[token].logprob for token, row in zip(response, rows, strict=True)]
    return _compared(prefilled, decoded)


def temperatures(
    scored: Sequence[Scored], sampled: float, most: int | None, vocabulary: int | None
) -> Generator[Call, Any, Temperatures]:
    """Find the temperature at which the engine's log-probs are nearest to the trainer's.

    most: vLLM's max_logprobs, -1 for all of the vocabulary; None: not known

    The engine answers with the log-probs of the likeliest tokens at temperature 1. Other temperatures divide them and
    normalise again; the remaining mass is spread evenly over the rest of the vocabulary.
    """
    from scipy.optimize import minimize_scalar

    size = vocabulary or VOCABULARY
    allowed = FEW
    if most is not None:
        allowed = ENOUGH if most < 0 else min(most, ENOUGH)
    alternatives = min(allowed, size)
    ask = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": alternatives}
    outputs = yield Generate([sequence.tokens for sequence in scored], ask)
    rows = [
        (row[token].logprob, [entry.logprob for entry in row.values()])
        for sequence, output in zip(scored, outputs, strict=True)
        for token, row in zip(sequence.tokens[1:], output.prompt_logprobs[1:], strict=True)
    ]
    trainer = np.concatenate([np.asarray(sequence.logprobs, dtype=np.float64) for sequence in scored])
    tokens = np.array([logprob for logprob, _ in rows])
    listed = np.full((len(rows), max(len(row) for _, row in rows)), -np.inf)
    for number, (_, row) in enumerate(rows):
        listed[number, : len(row)] = row

    def off(log_temperature: float) -> float:
        return float(np.abs(trainer - at_temperature(tokens, listed, float(np.exp(log_temperature)), size)).mean())

    grid = np.linspace(np.log(COLDEST), np.log(HOTTEST), 61)  # without a fit there is more than one minimum
    near = grid[int(np.argmin([off(point) for point in grid]))]
    step = grid[1] - grid[0]
    best = float(minimize_scalar(off, bounds=(near - step, near + step), method="bounded").x)
    return Temperatures(sampled, float(np.exp(best)), off(float(np.log(sampled))), off(best))


def at_temperature(
    tokens: NDArray[np.float64], listed: NDArray[np.float64], temperature: float, vocabulary: int
) -> NDArray[np.float64]:
    """Compute log-probs at a temperature from those at 1.

    tokens: [n], the tokens' own; listed: [n, k], those of the likeliest tokens, the token's included; -inf: no more
    """
    others = np.maximum(vocabulary - np.isfinite(listed).sum(1), 1)
    rest = np.log(np.maximum(1 - np.exp(listed).sum(1), 1e-12) / others) / temperature + np.log(others)
    every = np.concatenate([listed / temperature, rest[:, None]], 1)
    return tokens / temperature - np.logaddexp.reduce(every, 1)  # type: ignore[no-any-return]


def amax_of(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Amax]:
    """Record the largest |q|, |k| and |v| of each attention layer on prompts.

    Raises ConfigError if no layer was seen, because prompts ran in whole CUDA graphs.
    """
    yield from rpc("fp8plan_record_amax", True)
    try:
        yield Generate(prompts, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
    finally:
        ranks = yield from rpc("fp8plan_record_amax", False)
    amax = largest(ranks)
    if not any(any(parts) for parts in amax.values()):
        raise ConfigError("no attention was seen: prompts ran in whole CUDA graphs")
    return amax


def weights_of_ranks(state: SyncState | None, tensors: Any) -> Generator[Call, Any, list[RankWeights]]:
    """Examine every rank's weights, and compare them with the trainer's.

    state:   that of an engine of fp8plan's; None: nothing can be compared
    tensors: the trainer's, in a form that `sync_weights` takes; None: no comparison
    """
    examined = yield from rpc("fp8plan_examine")
    compared: Sequence[Mapping[str, Any]] = [{}] * len(examined)
    if tensors is not None:
        if state is None:
            raise ConfigError("weights= needs an engine of fp8plan's; type: RolloutEngine.from_setup(...)")
        sent = announced(state, tensors, None)
        checked = yield from prepared(state, sent)
        yield from rpc("fp8plan_compare", checked.number)
        yield from streamed(state, pairs_of(tensors), sent, checked, "fp8plan_compare_with")
        compared = yield from rpc("fp8plan_compared")
    return [
        RankWeights(
            unsound=rank["unsound"],
            changed=rank["changed"] if rank["since"] else None,
            **{name: comparison.get(name) for name in ("differ", "compared", "of")},
            apart=comparison.get("apart", ()),
        )
        for rank, comparison in zip(examined, compared, strict=True)
    ]


def _compared(logprobs: Sequence[float], others: Sequence[float], cached: int | None = None) -> Compared:
    ratios = np.clip(np.asarray(logprobs, np.float64) - np.asarray(others, np.float64), -LIMIT, LIMIT)
    return Compared(len(ratios), float(np.abs(ratios).mean()), float(k3(ratios).mean()), cached)


ATTACH: Final = f"LLM(..., worker_extension_cls={EXTENSION!r}), or export VLLM_ALLOW_INSECURE_SERIALIZATION=1"


class Ask(Protocol):
    """Runs a procedure of Calls to its end. Raises an Fp8PlanError for a Call that this engine does not answer."""

    def __call__(self, procedure: Generator[Call, Any, Any]) -> Any: ...


def asking_llm(llm: LLM) -> Ask:
    """Ask a plain vllm.LLM. Raises ConfigError while requests run.

    Its workers need not have fp8plan's methods: vLLM hands them a function if it runs in this process, or allows that.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise ConfigError("requests are running, which would be mixed up with the doctor's; wait for them")
    ours = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls == EXTENSION

    def answer(call: Call) -> Any:
        if isinstance(call, Generate):
            prompts, params = requests(call)
            return llm.generate(prompts, params, use_tqdm=False)
        if not isinstance(call, Rpc):
            raise ConfigError(f"{type(call).__name__} is not for an engine that is only looked at")
        method: Any = call.method
        if not ours and isinstance(method, str):
            method = getattr(Fp8PlanWorker, method)
        try:
            return llm.collective_rpc(method, args=call.arguments)
        except Exception as error:  # another process takes no functions; or the engine is dead
            if "EngineDead" in type(error).__name__:
                raise NotServingError("the engine has died; start another") from error
            raise ConfigError(f"its workers do not answer ({first_line(error):.120}); type: {ATTACH}") from error

    return partial(driven, answer=answer)


def counts_of(llm: LLM) -> dict[str, Any]:
    """A plain LLM's counts since its start, by field of an Observed. Raises ConfigError without statistics."""
    if not llm.llm_engine.log_stats:
        raise ConfigError("the LLM keeps no statistics; type: LLM(..., disable_log_stats=False)")
    return counts(SINCE_START)
