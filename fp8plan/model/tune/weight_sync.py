"""Levers on the weight sync of an RL step: sending FP8 weights, or only what a step has changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from fp8plan.model.plan.choice import SpeedUp
from fp8plan.model.plan.scene import NOTHING, UNKNOWN, Lever, Scene
from fp8plan.model.rl_step import Mode, SyncCost, WeightSync, sync_costs

USUAL_RATE: Final = 1e-6  # the default of TRL's GRPOConfig, for a plan without a learning rate


def sync_levers(scene: Scene) -> Iterator[Lever]:
    """A lever for the plan's own mode of sync, unless that is dense BF16, and for each mode that shortens the step.

    There is none without an RL step, or if verl or TRL sends the weights.
    """
    sync, choice = scene.request.sync, scene.choice
    if sync is None or choice.step_s is None:
        return
    own, assumed = choice.syncs[0], sync.learning_rate is None
    if assumed:
        sync = replace(sync, learning_rate=USUAL_RATE)
    costs = {cost.mode: cost for cost in sync_costs(scene.base.model, sync, scene.request.measures_scales)}
    dense = costs.pop(Mode.DENSE_BF16)
    for mode, cost in costs.items():
        if mode is own.mode:
            yield _lever(scene, sync, assumed, dense, cost, in_plan=True)
        elif cost.seconds < own.seconds:
            yield _lever(scene, sync, assumed, own, cost, in_plan=False)


def _lever(scene: Scene, sync: WeightSync, assumed: bool, before: SyncCost, after: SyncCost, in_plan: bool) -> Lever:
    """The lever from one cost of the sync to another one."""
    choice, rollout = scene.choice, scene.choice.timed
    assert choice.step_s is not None
    rest = choice.step_s - rollout.makespan_s - choice.syncs[0].seconds

    def ratio(rollout_s: float) -> float:
        return (rollout_s + rest + before.seconds) / (rollout_s + rest + after.seconds)

    gain = SpeedUp(ratio(rollout.makespan_s), ratio(rollout.makespan_high_s), ratio(rollout.makespan_low_s))
    setting = f"{after.bytes / 1e9:.3g} GB over {sync.link} instead of {before.bytes / 1e9:.3g} GB"
    if assumed and not after.mode.dense:
        setting += f", at an assumed learning rate of {USUAL_RATE:g} with {sync.optimizer}: type your --learning-rate"
    without_sync = rollout.makespan_s + rest
    return Lever(
        f"{after.mode} sync",
        setting,
        {"fp8plan": f"SyncSettings({_arguments(after.mode, sync)})"},
        without_sync + before.seconds,
        without_sync + after.seconds,
        gain,
        _price(after, scene),
        NOTHING if after.mode.lossless else UNKNOWN,
        in_plan,
        step=True,
    )


def _arguments(mode: Mode, sync: WeightSync) -> str:
    """The arguments of fp8plan's SyncSettings for a mode."""
    if mode is Mode.DENSE_FP8:
        return 'weights_in="fp8_block"'
    delta = 'delta="cpu"'
    return delta if mode is Mode.DELTA else f'{delta}, top_k=TopK.parse("{sync.top_k}")'


def _price(cost: SyncCost, scene: Scene) -> str:
    """The price of a sync besides its seconds. A delta keeps a copy of what the engine holds (SyncSettings)."""
    if cost.mode.dense:
        return "the trainer quantises"
    setup = scene.choice.setup
    return f"{setup.shape.weight_bytes(setup.precision) / 1e9:.3g} GB of the trainer's memory for a copy"
