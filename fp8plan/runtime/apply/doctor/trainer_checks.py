"""Checks of what engine and trainer need in common: the routes of experts, and the grid of FP8 numbers."""

from __future__ import annotations

from typing import Final

from fp8plan.model.emit.trainers import ENGINE_E8M0, GRIDS, in_all_words, two_grids
from fp8plan.model.risk.remedies import BF16, BLOCK, POW2, TENSOR, TRAINER_PRECISIONS, Remedies
from fp8plan.runtime.apply.doctor.observed import NOTHING, Finding, Observed, fault, needs_e8m0, ok, unknown, warning

OF_TRAINERS: Final = (
    "your own loop: fp8plan.replayed",
    *in_all_words(Remedies(router_replay=True)),
)
REPLAY: Final = (
    "--enable-return-routed-experts, or LLM(enable_return_routed_experts=True), and replay them in the trainer ("
    f"{'; '.join(OF_TRAINERS)}); else keep token-level TIS, and watch the KL"
)
# vLLM's names of FP8 with one scale for each matrix, which it makes of a BF16 checkpoint.
PER_TENSOR: Final = "fp8_per_tensor"
PER_TENSOR_METHOD: Final = "Fp8PerTensorOnlineLinearMethod"
ALONE: Final = "run the rollout with FP8 weights (fp8plan plan ... --trainer-precision), or train in BF16"


def routing(seen: Observed) -> Finding:
    """The trainer can replay the routes of experts with FP8 weights (R3, "rollout routing replay")."""
    experts, weights = seen.facts.get("experts"), seen.weights_format
    if experts is None or (experts and ("routed_experts" not in seen.facts or weights is None)):
        return unknown("routing", seen.unseen.get("ranks", NOTHING))
    if not experts:
        return ok("routing", "no experts")
    if seen.facts["routed_experts"]:
        return ok("routing", "the routes of experts are returned; the trainer must replay them")
    if not weights:
        return ok("routing", "the routes of experts are not returned; weights are not quantised")
    says = (
        f"weights are {weights}, and the routes of experts are not returned, so a trainer picks its own. One router in "
        "ten picked others, for 94% of tokens one in some layer, and replay halved the KL (Qwen3-30B-A3B, arXiv "
        "2510.11370); FP8's rounding adds to it"
    )
    return warning("routing", "router_replay_off", says, REPLAY)


def trainer(seen: Observed) -> Finding:
    """Trainer and engine round weights and activations to the same numbers, or the trainer does not round."""
    theirs, ours = seen.trainer_precision, _grid(seen)
    if ours is None:
        return unknown("trainer", _untold(seen))
    if theirs is None:
        todo = f"--trainer-precision {'|'.join(TRAINER_PRECISIONS)}, in Python doctor(..., trainer_precision=)"
        return unknown("trainer", f"the trainer's precision is not told; type: {todo}")
    if theirs == ours:
        return ok("trainer", f"both sides have {GRIDS[ours]}")
    if differing := two_grids(theirs, ours):
        return fault("trainer", "recipes_differ", differing, _same(seen, ours))
    says = f"the trainer has {GRIDS[theirs]}, and the engine {GRIDS[ours]}"
    if theirs == BF16:
        return ok("trainer", f"{says}: the engine's rounding adds to the mismatch")
    return warning("trainer", "trainer_fp8_alone", f"{says}: the trainer's rounding adds to the mismatch", ALONE)


def _same(seen: Observed, ours: str) -> str:
    """Return what to type so that both have one grid: in the trainer, or in the engine if its GPU allows."""
    words = "; ".join(in_all_words(Remedies(trainer_precision=ours)))
    todo = f"in the trainer, for {GRIDS[ours]}: {words}"
    variables = {BLOCK: "0", POW2: "1"}
    if seen.trainer_precision in variables and ours in variables and not needs_e8m0(seen):
        todo += f"; or in the engine: export {ENGINE_E8M0}={variables[seen.trainer_precision]}, before vLLM is imported"
    return todo


def _grid(seen: Observed) -> str | None:
    """The grid of the engine's linears, as one of TRAINER_PRECISIONS; None: not known, or none of them."""
    if seen.weights_format == "":
        return BF16
    if seen.facts.get("e8m0") is not None:
        return POW2 if seen.facts["e8m0"] else BLOCK
    by_layers = any(PER_TENSOR_METHOD in kind for kind in seen.facts.get("layers", ()))
    return TENSOR if by_layers or seen.weights_format == PER_TENSOR else None


def _untold(seen: Observed) -> str:
    """The reason why the engine's grid is not known."""
    if seen.weights_format and "e8m0" in seen.facts:
        return f"the engine's weights are {seen.weights_format}, whose scales are none that the doctor compares"
    return seen.unseen.get("ranks", NOTHING)
