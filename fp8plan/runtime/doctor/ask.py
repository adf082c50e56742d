"""The questions to an engine, as procedures that do no input or output themselves (see runtime.weight_sync.procedure).

An engine here, and a server over HTTP, answer the same Calls. Nothing that is asked changes weights or scales.

Engines of this process that answer procedures: fp8plan's own, and a plain vllm.LLM.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.doctor.observed import Compared, RankWeights, Temperatures
from fp8plan.runtime.engine.base import requests
from fp8plan.runtime.mismatch.sums import LIMIT, k3
from fp8plan.runtime.weight_sync.kv_scales import Amax, largest
from fp8plan.runtime.weight_sync.manifest import pairs_of
from fp8plan.runtime.weight_sync.procedure import announced, prepared, streamed
from fp8plan.runtime.weight_sync.state import Call, Scored, SyncState, driven, rpc
from fp8plan.runtime.worker.extension import EXTENSION, Fp8PlanWorker

if TYPE_CHECKING:
    from vllm import LLM

MOST_PROMPTS: Final = 8
PROMPT_TOKENS: Final = 256  # of a prompt whose decode is compared
DECODED: Final = 32
# Tokens of each distribution that one at another temperature is made of: what vLLM gives unless max_logprobs says more,
# and what is enough.
FEW: Final = 20
ENOUGH: Final = 1024
# What a request leaves unset a server fills in from the model's generation_config.json.
NEUTRAL: Final = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
VOCABULARY: Final = 150_000  # where it is not known
COLDEST, HOTTEST = 0.05, 20.0  # temperatures of a trainer that are looked for


def cached_against_fresh(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Compared]:
    """Compare the next token's log-prob after each prompt: with what the prefix cache has of it, and without.

    prompts: token ids; of any use only if the engine has had them before
    """
    next_token = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    with_cache = yield Call("generate", (prompts, next_token))
    without = yield Call("generate", (prompts, next_token | {"prompt_logprobs": 0}))  # vLLM then reads no cache
    fresh, cached = [], []
    for one, other in zip(without, with_cache, strict=True):
        (token,), (row,) = one.outputs[0].token_ids, one.outputs[0].logprobs
        there = other.outputs[0].logprobs[0]
        # What is not even listed is less likely than all that is.
        found = there[token] if token in there else min(there.values(), key=lambda entry: entry.logprob)
        fresh.append(row[token].logprob)
        cached.append(found.logprob)
    counts = [output.num_cached_tokens for output in with_cache]
    return _compared(fresh, cached, None if None in counts else sum(counts))


def decode_against_prefill(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Compared]:
    """Sample DECODED tokens after each prompt, and compare their log-probs with those of a prefill of all of it."""
    sample = NEUTRAL | {"max_tokens": DECODED, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    outputs = yield Call("generate", (prompts, sample))
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    again = yield Call("generate", (whole, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}))
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

    The engine tells the log-probs of the likeliest tokens at temperature 1. At another one they are divided by it and
    normalised anew; what is left is spread evenly over the rest of the vocabulary.
    """
    from scipy.optimize import minimize_scalar

    size = vocabulary or VOCABULARY
    alternatives = min(FEW if most is None else ENOUGH if most < 0 else min(most, ENOUGH), size)
    ask = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": alternatives}
    outputs = yield Call("generate", ([one.tokens for one in scored], ask))
    rows = [
        (row[token].logprob, [entry.logprob for entry in row.values()])
        for one, output in zip(scored, outputs, strict=True)
        for token, row in zip(one.tokens[1:], output.prompt_logprobs[1:], strict=True)
    ]
    trainer = np.concatenate([np.asarray(one.logprobs, dtype=np.float64) for one in scored])
    tokens = np.array([logprob for logprob, _ in rows])
    listed = np.full((len(rows), max(len(row) for _, row in rows)), -np.inf)
    for number, (_, row) in enumerate(rows):
        listed[number, : len(row)] = row

    def off(log_temperature: float) -> float:
        return float(np.abs(trainer - at_temperature(tokens, listed, float(np.exp(log_temperature)), size)).mean())

    grid = np.linspace(np.log(COLDEST), np.log(HOTTEST), 61)  # it has more than one minimum where nothing fits
    near = grid[int(np.argmin([off(x) for x in grid]))]
    step = grid[1] - grid[0]
    best = float(minimize_scalar(off, bounds=(near - step, near + step), method="bounded").x)
    return Temperatures(sampled, float(np.exp(best)), off(float(np.log(sampled))), off(best))


def at_temperature(
    tokens: NDArray[np.float64], listed: NDArray[np.float64], temperature: float, vocabulary: int
) -> NDArray[np.float64]:
    """Compute log-probs at a temperature from those at 1.

    tokens: [n] of the tokens; listed: [n, k] of the likeliest ones, the token among them, -inf where there are fewer
    """
    others = np.maximum(vocabulary - np.isfinite(listed).sum(1), 1)
    rest = np.log(np.maximum(1 - np.exp(listed).sum(1), 1e-12) / others) / temperature + np.log(others)
    every = np.concatenate([listed / temperature, rest[:, None]], 1)
    return tokens / temperature - np.logaddexp.reduce(every, 1)  # type: ignore[no-any-return]


def amax_of(prompts: Sequence[Sequence[int]]) -> Generator[Call, Any, Amax]:
    """Record the largest |q|, |k| and |v| of each attention layer on prompts. Raises ConfigError if no layer was seen
    (prompts in whole CUDA graphs)."""
    yield from rpc("fp8plan_record_amax", True)
    try:
        yield Call("generate", (prompts, {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}))
    finally:
        ranks = yield from rpc("fp8plan_record_amax", False)
    found = largest(ranks)
    if not any(any(parts) for parts in found.values()):
        raise ConfigError("no attention was seen: prompts ran in whole CUDA graphs")
    return found


def weights_of_ranks(state: SyncState | None, tensors: Any) -> Generator[Call, Any, list[RankWeights]]:
    """Examine every rank's weights, and compare them with the trainer's where those are given.

    state:   of an engine of fp8plan's; without one nothing can be compared
    tensors: as `sync_weights` takes them, or None
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
            unsound=one["unsound"],
            changed=one["changed"] if one["since"] else None,
            differ=other.get("differ"),
            compared=other.get("compared"),
            of=other.get("of"),
        )
        for one, other in zip(examined, compared, strict=True)
    ]


def _compared(wanted: Sequence[float], found: Sequence[float], cached: int | None = None) -> Compared:
    ratios = np.clip(np.asarray(wanted, np.float64) - np.asarray(found, np.float64), -LIMIT, LIMIT)
    return Compared(len(ratios), float(np.abs(ratios).mean()), float(k3(ratios).mean()), cached)


Counts = tuple[int, int]  # preemptions, finished requests

PREEMPTIONS: Final = "vllm:num_preemptions"
FINISHED: Final = "vllm:request_success"
ATTACH: Final = f"LLM(..., worker_extension_cls={EXTENSION!r}), or export VLLM_ALLOW_INSECURE_SERIALIZATION=1"


class Ask(Protocol):
    """Runs a procedure of Calls to its end. Raises an Fp8PlanError for a Call that this engine does not answer."""

    def __call__(self, procedure: Generator[Call, Any, Any]) -> Any: ...


def asking_llm(llm: LLM) -> Ask:
    """Ask a plain vllm.LLM.

    Its workers need not have fp8plan's methods: vLLM hands them a function, where it runs in this process or allows
    that. Raises ConfigError while requests run.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise ConfigError("requests are running, which would be mixed up with the doctor's; wait for them")
    ours = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls == EXTENSION

    def answer(call: Call) -> Any:
        if call.what == "generate":
            prompts, params = requests(call)
            return llm.generate(prompts, params, use_tqdm=False)
        if call.what != "rpc":
            raise ConfigError(f"{call.what} is not for an engine that is only looked at")
        method, arguments = call.arguments
        try:
            return llm.collective_rpc(method if ours else getattr(Fp8PlanWorker, method), args=arguments)
        except Exception as error:  # another process takes no functions, or the engine is dead
            if "EngineDead" in type(error).__name__:
                raise NotServingError("the engine has died; start another") from error
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"its workers do not answer ({first:.120}); type: {ATTACH}") from error

    return partial(driven, answer=answer)


def counts_of(llm: LLM) -> Counts:
    """Count a plain LLM's preemptions and finished requests since its start. Raises ConfigError if it keeps no
    statistics."""
    try:
        metrics = llm.get_metrics()
    except Exception:  # an AssertionError in 0.30
        raise ConfigError("the LLM keeps no statistics; type: LLM(..., disable_log_stats=False)") from None
    totals = [int(sum(getattr(m, "value", 0) for m in metrics if m.name == name)) for name in (PREEMPTIONS, FINISHED)]
    return totals[0], totals[1]
