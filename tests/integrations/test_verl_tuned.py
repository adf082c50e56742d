"""A tuned plan starts verl's server on the CPU, and its limits reach the engine."""

from __future__ import annotations

import pytest
import warm_processes  # noqa: F401 -- it changes how vLLM starts processes
from tiny_models import TOKENS
from trl_runs import model
from verl_parts import serving

from fp8plan.model.distributions import Fixed
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload

pytestmark = [pytest.mark.verl, pytest.mark.vllm]
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")


@pytest.mark.slow
def test_the_limits_of_a_tuned_plan_reach_verls_engine() -> None:
    eager = EngineLimits.for_gpu(find_gpu("cpu"), enforce_eager=True)
    tuned = search(
        TuneRequest(model(), "cpu", Workload(75, 8, Fixed(32), Fixed(64)), limits=eager, precisions=["bf16"])
    )
    assert tuned.changes == {"max_num_seqs": (256, 600)}
    plan = tuned.prediction.plan
    with serving(plan) as served:
        limits = served.do(served.server.fp8plan_seen())["facts"].limits
        assert [getattr(limits, name) for name in LIMITS] == [getattr(plan.limits, name) for name in LIMITS]
        assert limits.max_num_seqs == served.server.engine.vllm_config.scheduler_config.max_num_seqs == 600
        assert len(served.answer([1, 2, 3], "tuned").token_ids) == TOKENS
