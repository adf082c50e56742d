"""Checks of the weights that serve, and of their log-probs by several ways that should agree."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Final

from fp8plan.errors import some
from fp8plan.runtime.apply.doctor.observed import NOTHING, Finding, Observed, fault, ok, unknown

# Allowed k3 per token. Kernels that add in another order leave 0.0001 to 0.003 between two ways through one engine; a
# broken way shows 0.1 and more.
MOST_K3: Final = 0.03
# A trainer at another temperature: least difference of log-probs, in nats on average; largest part of it that remains
# at the fitted temperature; least relative difference of the two temperatures.
NATS: Final = 0.05
PART: Final = 0.6
OTHER: Final = 0.05
# Mean difference, in nats, that no precision explains: FP8 is off by up to 0.2, other weights by more than 1.
DIFFERS: Final = 0.5
# Least share of other tensors than the trainer's on a rank that missed a sync. Norms hardly change in training; one
# layer of a model is far less.
STALE: Final = 0.25

NOT_GIVEN: Final = (
    "the trainer's log-probs were not given; type: fp8plan.doctor(engine, scored=[fp8plan.Scored(tokens, logprobs)], "
    "temperature=T)"
)
WHOLE: Final = (
    """vllm serve ... --weight-transfer-config '{"backend": "fp8plan"}', which quantises and checks what it """
    "writes; or serve the weights in BF16"
)
SYNC: Final = "engine.sync_weights(policy.state_dict())"
TIE: Final = "policy.tie_weights(); or give the engine a checkpoint with tie_word_embeddings=false and both tensors"


def version(seen: Observed) -> Finding:
    """Every rank serves the weights that should serve."""
    if seen.refusal is not None:
        why, _, todo = seen.refusal.partition("; type: ")
        return fault("version", "not_serving", f"the engine refuses to generate: {why}", todo or SYNC)
    versions = [facts.get("weights") for facts in seen.ranks]
    numbers = [number or 0 for number in versions]
    if not numbers or (seen.version is None and all(number is None for number in versions)):
        return unknown("version", seen.unseen.get("version", "these weights were not synced by fp8plan"))
    newest = max(numbers) if seen.version is None else seen.version
    late = [f"rank {rank} serves {number}" for rank, number in enumerate(numbers) if number != newest]
    if late:
        return fault("version", "stale_weights", f"{', '.join(late)}; weights {newest} should serve", SYNC)
    ranks = f" on {len(numbers)} ranks" if len(numbers) > 1 else ""
    return ok("version", f"weights {newest}{ranks}" if newest else f"the checkpoint{ranks}")


def weights(seen: Observed) -> Finding:
    """Live weights are sound, changed by syncs alone, and the trainer's."""
    if not seen.weights:
        return unknown("weights", seen.unseen.get("weights", NOTHING))
    if broken := _placed([[f"{name}: {why}" for name, why in rank.unsound.items()] for rank in seen.weights]):
        return fault("weights", "corrupted_layer", some(broken), SYNC)
    if changed := _placed([rank.changed or () for rank in seen.weights]):
        says = f"changed since they were last looked at, though no sync has come between: {some(changed)}"
        return fault("weights", "corrupted_layer", says, SYNC)
    if apart := [pair for rank in seen.weights for pair in rank.apart]:
        says = f"{' and '.join(apart[0])} of the trainer differ, and the engine has one storage for both"
        return fault("weights", "untied_weights", says, TIE)
    shares = {i: len(rank.differ or ()) / rank.compared for i, rank in enumerate(seen.weights) if rank.compared}
    stale = [number for number, share in shares.items() if share >= STALE]
    if stale:
        where = f"rank {', '.join(map(str, stale))}" if len(seen.weights) > 1 else "the engine"
        says = f"{where} serves other weights than the trainer's: {shares[stale[0]]:.0%} of the tensors differ"
        return fault("weights", "stale_weights", says, SYNC)
    if differ := _placed([rank.differ or () for rank in seen.weights]):
        return fault("weights", "corrupted_layer", f"not what the trainer has: {some(differ)}", SYNC)
    if seen.weights[0].compared is not None:
        compared = sum(rank.compared or 0 for rank in seen.weights)
        every = sum(rank.of or 0 for rank in seen.weights)
        rest = "" if compared == every else "; the others go through vLLM's loaders, and were not compared"
        return ok("weights", f"{compared} of {every} tensors are the trainer's{rest}")
    if seen.weights[0].changed is not None:
        return ok("weights", "sound, and as they were when last looked at")
    return ok(
        "weights", "sound: finite, no matrix of zeros (the trainer's were not given: doctor(engine, weights=...))"
    )


def sync(seen: Observed) -> Finding:
    """The backend of weight updates can write weights of the format that serves.

    vLLM's sparse_nccl casts the values of a patch to the parameter's dtype (checkpoint_weight_patch.py, 0.30). The
    scale of FP8 weights then multiplies values that were never divided by it.
    """
    backend, weights = seen.facts.get("weight_transfer"), seen.weights_format
    if "weight_transfer" not in seen.facts:
        return unknown("sync", seen.unseen.get("ranks", NOTHING))
    if backend is None or "sparse" not in backend:
        return ok("sync", f"backend {backend}" if backend else "vLLM has no backend of weight updates")
    if weights is None:
        return unknown("sync", f"backend {backend}; the weights' format is not told")
    if not weights:
        return ok("sync", f"backend {backend}; weights are not quantised")
    says = (
        f"{backend} writes patches into {weights} weights without their scales (0.6 lands as 0.006 at a scale of "
        "0.01), and reports success"
    )
    return fault("sync", "sparse_sync", says, WHOLE)


def decode(seen: Observed) -> Finding:
    """A decode gives the log-probs of a prefill of the same tokens."""
    compared = seen.decode
    if compared is None:
        return unknown("decode", seen.unseen.get("decode", "nothing was generated"))
    says = f"k3 {compared.k3:.1e} per token to a prefill of the same {compared.tokens} tokens"
    if compared.k3 <= MOST_K3:
        return ok("decode", says)
    why = "" if isfinite(compared.k3) else " (NaN: weights or KV cache are broken)"
    todo = "enforce_eager=True, then another attention_backend, to see which of the two it is; else " + SYNC
    return fault("decode", "decode_differs", f"{says}{why}; allowed: {MOST_K3:g}", todo)


def prefix_cache(seen: Observed) -> Finding:
    """The prefix cache is that of the weights that serve."""
    compared = seen.prefix
    if compared is None:
        return unknown("prefix_cache", seen.unseen.get("prefix", "nothing was generated"))
    if compared.cached == 0:
        return ok("prefix_cache", f"none of {compared.tokens} prompts was cached")
    says = f"next tokens of {compared.tokens} prompts: k3 {compared.k3:.1e} with the cache and without"
    if compared.k3 <= MOST_K3:
        return ok("prefix_cache", says)
    says += f" ({compared.mean_abs:.2f} nats): it holds keys and values of other weights"
    todo = "llm.reset_prefix_cache() after each weight update; POST /reset_prefix_cache on a server"
    return fault("prefix_cache", "prefix_cache_stale", says, todo)


def temperature(seen: Observed) -> Finding:
    """The log-probs of the trainer and of the engine are at the temperature of the rollouts."""
    both, mode = seen.temperatures, seen.facts.get("logprobs_mode", "")
    if both is None:
        return unknown("temperature", seen.unseen.get("temperatures", NOT_GIVEN))
    off, best, another = both.mean_abs, both.mean_abs_fitted, abs(both.fitted / both.sampled - 1) > OTHER
    if another and off > NATS and best <= min(PART * off, DIFFERS):
        says = (
            f"the trainer's log-probs are at temperature {both.fitted:.2f}, rollouts are sampled at "
            f"{both.sampled:g}: {off:.2f} nats off on average, {best:.3f} at its own"
        )
        todo = f"divide the trainer's logits by {both.sampled:g}, the temperature that the rollouts are sampled at"
        return fault("temperature", "trainer_temperature", says, todo)
    if off > DIFFERS:
        says = f"the trainer's log-probs are {off:.2f} nats off the engine's, {best:.2f} at the best temperature"
        return fault("temperature", "trainer_differs", says, f"{SYNC}; then look at tokens and chat template")
    if mode.startswith("raw") and both.sampled != 1:
        says = f"the engine's log-probs are at temperature 1 (logprobs_mode {mode}), samples at {both.sampled:g}"
        return fault("temperature", "engine_temperature", says, "--logprobs-mode processed_logprobs")
    return ok("temperature", f"the trainer's log-probs are at {both.sampled:g}: {both.mean_abs:.3f} nats off")


def _placed(ranks: Sequence[Sequence[str]]) -> list[str]:
    """The words on all ranks in one list, with the rank if there are several."""
    several = len(ranks) > 1
    return [f"{text} (rank {rank})" if several else text for rank, texts in enumerate(ranks) for text in texts]
