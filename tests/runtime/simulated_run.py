"""Records of a run as a Monitor would write them, with the troubles of a real one: drift, spikes, a compile, a step
down of the guard."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

BEGIN = datetime(2026, 11, 20, 8, 0, tzinfo=UTC)
STEP_S = 412.0


def simulated(steps: int = 500, seed: int = 0, begin: datetime = BEGIN) -> list[dict[str, Any]]:
    """One record a step."""
    chance = np.random.default_rng(seed)
    cap, smooth, rows = 2.0, 1e-3, []
    for step in range(1, steps + 1):
        at = step / steps
        kl = 8e-4 * np.exp(1.6 * at) * chance.lognormal(0, 0.12)
        spike = chance.random() < 0.012 or 0.55 < at < 0.575
        kl *= 7 if spike else 1
        kl *= 0.5 if at > 0.8 else 1  # the guard has stepped down
        smooth = 0.7 * smooth + 0.3 * kl
        limit = 4e-3
        wanted = float(np.clip(2.0 * (2e-3 / smooth) ** 0.35, 1.1, 4.0))
        decision, before = "hold", cap
        if abs(np.log(wanted / cap)) > 0.1:
            cap = float(np.clip(wanted, cap / 2, cap * 1.15))
            decision = "tighten" if cap < before else "relax"
        reason = f"KL {smooth:.2e} of {limit:.0e}: C {before:.2f} to {cap:.2f}" if decision != "hold" else "within 10%"
        sigma = np.sqrt(2 * kl)
        alarms = (["kl"] if smooth > limit else []) + (["tail"] if kl > 2e-2 else [])
        rows.append(
            _rollout(chance, at)
            | {
                "step": step,
                "date": (begin + timedelta(seconds=STEP_S * step)).isoformat(timespec="milliseconds"),
                "thresholds": {"tis": cap, "band": None},
                "decision": "warm_up" if step <= 3 else decision,
                "reason": reason,
                "alarms": alarms,
                "escalate": None,
                "metrics": _metrics(kl, smooth, limit, cap, float(sigma)),
                "profile": [
                    {"first": first, "last": 2 * first - 1 if first else 63, "tokens": 1000, "k1": kl, "k3": kl * grown}
                    for grown, first in zip(np.linspace(0.7, 1.5, 9), (0, *(64 << i for i in range(8))), strict=True)
                ],
                "versions": {},
            }
        )
        rows[-1]["guard"] = _guard(rows[-1], step, steps)
        rows[-1]["metrics"] |= _speed(rows[-1])
    return rows


def _metrics(kl: float, smooth: float, limit: float, cap: float, sigma: float) -> dict[str, float | None]:
    above = float(min(0.2, 0.02 * sigma * np.exp(-np.log(cap) / (4 * sigma))))
    return {
        "critic/rewards/mean": 0.9 - 0.5 * sigma,
        "rollout_corr/kl": kl * 0.95,
        "rollout_corr/k3_kl": kl,
        "fp8plan/k3_robust": kl * 0.9,
        "fp8plan/kl_smoothed": smooth,
        "fp8plan/kl_limit": limit,
        "fp8plan/ess_raw": float(np.exp(-5 * sigma**2)) * 0.98,
        "rollout_corr/rollout_is_eff_sample_size": float(np.exp(-3 * sigma**2)),
        "rollout_corr/ppl_ratio": 1 + kl,
        "fp8plan/threshold_tis": cap,
        "fp8plan/threshold_low": None,
        "fp8plan/threshold_high": None,
        "fp8plan/clip_fraction": above,
        "fp8plan/clipped_mass": above * 0.4,
        "fp8plan/lost_tokens": above * 0.1,
        "fp8plan/tokens": 1_400_000.0,
    }


def _rollout(chance: np.random.Generator, at: float) -> dict[str, Any]:
    lengths = np.clip(chance.lognormal(5, 0.8, 16), 1, 2048).astype(int).tolist()
    return {
        "model": "Qwen/Qwen3-8B",
        "gpu": "h200_sxm",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "precision": "fp8_block" if at > 0.8 else "fp8_block+fp8_kv",
        "tensor_parallel": 1,
        "data_parallel": 1,
        "prompt_lengths": [256] * 16,
        "response_lengths": lengths,
        "seconds": sum(lengths) / (9000.0 * (0.62 if 0.3 < at < 0.33 else 1.0) * chance.normal(1, 0.02)),
        "preemptions": 0,
    }


def _guard(row: dict[str, Any], step: int, steps: int) -> dict[str, Any]:
    achieved = sum(row["response_lengths"]) / row["seconds"]
    as_fast, down = achieved > 8200, step == int(0.8 * steps)
    cause = {"cause": "compiling", "sentence": "3 files of kernels were compiled during the rollout", "lost_s": 3.1}
    said = f"{achieved:,.0f} tokens/s, predicted for what ran are 9,200 (8,700 to 9,800)"
    why = "kv_to_bf16, because KL 4.4e-3 is over its limit 4e-3, in 3 rollouts" if down else "nothing to do"
    verdict = {
        "tokens_per_s": achieved,
        "predicted_tokens_per_s": 9200.0,
        "low_tokens_per_s": 8700.0,
        "high_tokens_per_s": 9800.0,
        "ratio": achieved / 9200.0,
        "as_fast": as_fast,
        "causes": [] if as_fast else [cause],
        "action": "kv_to_bf16" if down else "none",
        "reason": f"{said}{'' if as_fast else ': too slow'}; {why}",
        "cold": False,
        "anchored": True,
    }
    rung = "kv_to_bf16" if step >= int(0.8 * steps) else "none"
    return {"verdict": verdict, "state": {"rung": rung, "slow": 0 if as_fast else 1, "mismatched": 0}, "off": None}


def _speed(row: dict[str, Any]) -> dict[str, float]:
    verdict = row["guard"]["verdict"]
    return {
        "fp8plan/tokens_per_s": verdict["tokens_per_s"],
        "fp8plan/predicted_tokens_per_s": verdict["predicted_tokens_per_s"],
        "fp8plan/predicted_tokens_per_s_low": verdict["low_tokens_per_s"],
        "fp8plan/predicted_tokens_per_s_high": verdict["high_tokens_per_s"],
    }
