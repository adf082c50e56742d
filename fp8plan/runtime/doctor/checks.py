"""All checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fp8plan.runtime.doctor import log_checks, settings_checks, weights_checks
from fp8plan.runtime.doctor.finding import Finding
from fp8plan.runtime.doctor.observed import Observed

CHECKS: Final[tuple[Callable[[Observed], Finding], ...]] = (
    settings_checks.precision,
    settings_checks.kernels,
    settings_checks.e8m0,
    settings_checks.router,
    settings_checks.routing,
    settings_checks.kv_scales,
    settings_checks.cuda_graphs,
    settings_checks.preemption,
    weights_checks.version,
    weights_checks.weights,
    weights_checks.sync,
    weights_checks.decode,
    weights_checks.prefix_cache,
    weights_checks.temperature,
    log_checks.mismatch,
)


def findings(seen: Observed) -> list[Finding]:
    """One finding of each check, and of each alarm that a run's log has."""
    return [*(check(seen) for check in CHECKS), *log_checks.alarms(seen)]
