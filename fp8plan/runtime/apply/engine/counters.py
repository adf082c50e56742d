"""vLLM's counters, which it keeps in prometheus_client's default registry, and shows on a server's /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# vLLM's counters of a rollout -> fields of an Observation.
COUNTERS: Final[Mapping[str, str]] = {
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
# Those that an engine has counted since its start -> fields of an Observed (apply.doctor).
SINCE_START: Final[Mapping[str, str]] = {**COUNTERS, "vllm:request_success_total": "requests"}


def counts(counters: Mapping[str, str] = COUNTERS) -> dict[str, int]:
    """The counts of this process's engines so far, by the counters' fields; sums over engines.

    A counter that vLLM does not keep is left out.
    """
    from prometheus_client import REGISTRY

    # Only these metrics: LLM.get_metrics collects all hundred of vLLM's, which takes milliseconds.
    totals: dict[str, int] = {}
    for metric in REGISTRY.restricted_registry([*counters]).collect():
        for sample in metric.samples:
            field = counters[sample.name]
            totals[field] = totals.get(field, 0) + int(sample.value)
    return totals


def gains(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """The growth of each count; 0 for one that shrank, as those of a restarted server do."""
    return {name: max(0, count - before.get(name, 0)) for name, count in after.items()}
