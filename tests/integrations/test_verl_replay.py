"""verl's own router replay with a planned engine: the engine returns experts, and verl's output carries them."""

from __future__ import annotations

import numpy as np
import pytest
import warm_processes  # noqa: F401 -- it changes how vLLM starts processes
from tiny_models import EXPERTS, LAYERS, PROMPTS, TOKENS
from trl_runs import model
from verl_parts import planned, serving

pytestmark = [pytest.mark.verl, pytest.mark.vllm]


def test_verls_output_has_the_experts_of_all_tokens_but_the_last() -> None:
    overrides = (
        f"actor_rollout_ref.model.path={model('moe')}",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    )
    with serving(planned("bf16"), *overrides) as served:
        assert served.server._front.facts["routed_experts"]
        output = served.answer(list(PROMPTS[0]))
        routes = np.asarray(output.routed_experts)
        assert routes.shape == (len(PROMPTS[0]) + TOKENS - 1, LAYERS, 2)
        assert (routes[..., 0] != routes[..., 1]).all()
        assert routes.max() < EXPERTS
