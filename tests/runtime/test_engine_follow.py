"""What the guard advises, done to a live engine: recalibrate, or start again in a safer precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import CALIBRATION, checkpoint, cpu_plan, generate, started, started_beside_references, weights

from fp8plan.errors import ConfigError, NotServingError
from fp8plan.runtime.engine import RolloutEngine
from fp8plan.runtime.guard import Guard, Verdict
from fp8plan.runtime.guarding.ladder import Action

pytestmark = pytest.mark.vllm


def verdict(action: Action) -> Verdict:
    return Verdict(1.0, 2.0, 1.9, 2.1, 0.5, within=False, causes=(), action=action, reason="a test")


@pytest.mark.parametrize(
    ("before", "action", "after"),
    [
        ("fp8_block+fp8_kv", Action.KV_TO_BF16, "fp8_block"),
        ("fp8_block", Action.ALL_BF16, "bf16"),
    ],
)
def test_an_engine_that_steps_down_is_the_safer_one_after_the_next_sync(
    before: str, action: Action, after: str
) -> None:
    with started_beside_references("dense", after) as (_, expected):
        pass
    with started("dense", "a", before) as engine:
        assert generate(engine) != expected["a"]
        engine.follow(verdict(action))
        assert engine.launch.precision == after
        assert engine.state.fp8_kv == after.endswith("fp8_kv")
        with pytest.raises(NotServingError, match="started again"):
            generate(engine)
        engine.sync_weights(weights("dense", "b"))
        assert generate(engine) == expected["b"]


def test_recalibrating_leaves_the_engine_serving_with_the_scales_of_its_last_rollout() -> None:
    with started("dense", "a", "fp8_kv") as engine:
        generate(engine)
        first = engine.kv_scales()
        engine.follow(verdict(Action.RECALIBRATE_KV))
        assert engine.serving
        assert engine.kv_scales() != first
        engine.follow(verdict(Action.NONE))
        engine.follow(None)
        assert engine.serving


def test_an_action_that_changes_nothing_is_an_error() -> None:
    with started("dense", "a", "bf16") as engine, pytest.raises(ConfigError, match="all_bf16 changes nothing in bf16"):
        engine.follow(verdict(Action.ALL_BF16))


def test_a_rollout_is_compared_with_the_prediction_for_it() -> None:
    """fp8plan/dense-50m's CPU profile predicts any small dense model; how well is not the point here."""
    with started("dense", "a", "fp8_kv") as engine:
        assert isinstance(engine.guard, Guard), engine.guard_off
        assert engine.verdict is None
        generate(engine)
        found = engine.verdict
        assert found is not None
        assert found.tokens_per_s > 0
        assert found.predicted_tokens_per_s > 0


def test_an_engine_that_no_profile_can_predict_says_so_and_works() -> None:
    with started("dense", "a", "fp8_block") as engine:
        assert engine.guard is None
        assert "cannot be predicted on cpu" in str(engine.guard_off)
        generate(engine)
        assert engine.verdict is None


def test_a_plan_without_the_safer_precision_cannot_step_down() -> None:
    alone = cpu_plan("fp8_kv")
    alone = replace(alone, choices=(alone.choices[alone.chosen],), chosen=0)
    engine = RolloutEngine.from_plan(alone, str(checkpoint("dense", "a")), skip_tokenizer_init=True)
    try:
        with pytest.raises(ConfigError, match="the plan has no bf16"):
            engine.follow(verdict(Action.KV_TO_BF16))
        engine.sync_weights(weights("dense", "a"), kv_prompts=CALIBRATION)
        assert engine.serving
    finally:
        engine.shutdown()
