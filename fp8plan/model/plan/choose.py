"""The choice among the candidates, and the figures of each that a plan reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fp8plan.model.plan.candidates import Candidate
from fp8plan.model.plan.choice import Choice
from fp8plan.model.plan.speedup import speed_up, timed
from fp8plan.model.profile.profile import Profile
from fp8plan.model.risk.budget import LEAST_GAIN, RiskBudget
from fp8plan.model.risk.expected import MismatchRisk
from fp8plan.model.shards import refusals


def choose(candidates: Sequence[Candidate], budget: RiskBudget) -> int:
    """The index of the chosen candidate.

    Among the candidates whose risk the budget accepts, it has the lowest KL of those that are within LEAST_GAIN of the
    fastest. If the budget accepts none, it has the lowest KL of all.

    A layout that no measurement has seen stands back, unless it is faster than the fastest measured one by more than
    one standard deviation of what its times are in doubt.
    """
    runnable = [i for i, c in enumerate(candidates) if c.rollout is not None]
    accepted = [i for i in runnable if budget.accepts(candidates[i].expected.level)]
    compared = _without_doubtful(candidates, accepted or runnable)
    fastest = min(candidates[i].seconds for i in compared)
    close = [i for i in compared if candidates[i].seconds <= fastest * (1 + LEAST_GAIN)]
    return min(close if accepted else compared, key=lambda i: (candidates[i].expected.kl_k3, candidates[i].seconds))


def _without_doubtful(candidates: Sequence[Candidate], compared: list[int]) -> list[int]:
    """Those of `compared` that were measured, and those that are faster even if their doubt goes against them."""
    measured = [candidates[i].seconds for i in compared if not candidates[i].layout_doubt]
    best = min(measured, default=math.inf)
    return [i for i in compared if not candidates[i].layout_doubt or candidates[i].cautious_s < best]


def as_choices(candidates: Sequence[Candidate], profile: Profile) -> tuple[Choice, ...]:
    """A Choice for each candidate, with its speed-up over BF16 on the same layout."""
    bf16 = {c.setup.limits: c for c in candidates if c.setup.precision.name == "bf16" and c.rollout is not None}
    return tuple(_choice(c, bf16.get(c.setup.limits), profile) for c in candidates)


def _choice(candidate: Candidate, bf16: Candidate | None, profile: Profile) -> Choice:
    rollout, risk, memory, setup = candidate.rollout, candidate.risk, candidate.memory, candidate.setup
    size, whole_experts = setup.limits.cut
    figures: dict[str, Any] = dict.fromkeys(field.name for field in fields(Choice))
    figures |= {"precision": setup.precision.name, "reason": candidate.reason, "refused_by": {}}
    figures |= {"tensor_parallel": size, "data_parallel": setup.limits.data_parallel_size}
    figures["expert_parallel"] = whole_experts
    if rollout is None or risk is None or memory is None:
        return Choice(**figures | {"available": False})
    for name in ("makespan_s", "makespan_low_s", "makespan_high_s", "output_tokens_per_s", "preemptions"):
        figures[name] = getattr(rollout, name)
    for name in ("kl_k3", "kl_k3_low", "kl_k3_high", "ess_raw", "clip_fraction", "seq_reject_fraction"):
        figures[name] = getattr(risk, name)
    figures |= {"risk": risk.level, "unit_kv_scales": _unit_kv_scales(candidate.unit_risk)}
    figures |= {"rl_step_s": candidate.step_s, "kv_cache_tokens": memory.kv_cache_tokens}
    figures |= {"tail_fraction": rollout.tail_fraction, "extrapolated": candidate.extrapolated}
    if bf16 is not None:
        figures |= _speedups(bf16, candidate, profile)
    refused_by = refusals(setup.shape, setup.precision, size, whole_experts, setup.gpu)
    return Choice(**figures | {"available": True, "refused_by": refused_by})


def _speedups(bf16: Candidate, candidate: Candidate, profile: Profile) -> dict[str, float | None]:
    """The fields of a Choice on its speed-up over BF16 on the same layout: of the rollout, and of a known RL step."""
    pairs = {"speedup": (None, None)} | ({"step_speedup": (bf16.step_s, candidate.step_s)} if candidate.step_s else {})
    made: dict[str, float | None] = {}
    for name, (theirs, own) in pairs.items():
        cut = candidate.setup.limits.cut
        gain = speed_up(timed(bf16.timed, cut, theirs), timed(candidate.timed, cut, own), profile)
        made |= {name: gain.ratio, f"{name}_low": gain.low, f"{name}_high": gain.high}
    return made


def _unit_kv_scales(risk: MismatchRisk | None) -> dict[str, Any] | None:
    if risk is None:
        return None
    return {"kl_k3": risk.kl_k3, "kl_k3_low": risk.kl_k3_low, "kl_k3_high": risk.kl_k3_high, "risk": risk.level}
