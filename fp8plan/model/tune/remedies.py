"""Levers that lower the mismatch: router replay, layers in BF16, and a trainer on the rollout's grid.

They save no time. Their rows say what they cost, and the KL with and without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import Experts
from fp8plan.model.architecture.kept import OUTPUTS, Kept
from fp8plan.model.emit.trainers import ENGINE_E8M0, TRAINERS
from fp8plan.model.emit.vllm import kept_patterns
from fp8plan.model.plan.candidates import risks
from fp8plan.model.plan.choice import power
from fp8plan.model.plan.scene import Lever, Scene
from fp8plan.model.plan.ways import engine_with, matching_trainer
from fp8plan.model.risk.remedies import BF16, BLOCK, POW2, Remedies
from fp8plan.model.rollout import simulate

TRIED: Final[tuple[Kept, ...]] = ((1, 1), (4, 4), (0, 0, OUTPUTS))  # values of keep_bf16 that have a row


def remedy_levers(scene: Scene) -> Iterator[Lever]:
    """A lever for each remedy of the plan, and for each that its choice lacks."""
    setup, own = scene.choice.setup, scene.request.remedies
    if own.router_replay:
        yield from _lever(scene, replace(own, router_replay=False), in_plan=True)
    elif setup.shape.parts_of(Experts) and setup.limits.enable_prefix_caching:
        yield from _lever(scene, replace(own, router_replay=True))
    if not setup.precision.in_blocks or setup.shape.stored is not None:
        return
    if any(own.keep_bf16):
        yield from _lever(scene, replace(own, keep_bf16=(0, 0)), in_plan=True)
    else:
        for kept in TRIED:
            yield from _lever(scene, replace(own, keep_bf16=kept))
    if own.trainer_precision != BF16:
        yield from _lever(scene, replace(own, trainer_precision=BF16), in_plan=True)
    else:
        yield from _lever(scene, replace(own, trainer_precision=matching_trainer(setup)))


def _lever(scene: Scene, other: Remedies, in_plan: bool = False) -> Iterator[Lever]:
    """The lever between the plan's remedies and others, unless no engine can have the others.

    other:   the plan's remedies with one more, or with one less
    in_plan: with one less
    """
    choice, own = scene.choice, scene.request.remedies
    engine = engine_with(choice.setup, other)
    if engine is None:
        return
    run, remedy = scene.before, own.beyond(other) if in_plan else other.beyond(own)
    if remedy.trainer_precision == BF16 or engine.setup.e8m0 != choice.setup.e8m0:
        run = simulate(engine.setup, scene.request.batch, scene.profile, memory=engine.memory).rollout
    risk, _ = risks(engine.setup, scene.request)
    before, after = (run, scene.before) if in_plan else (scene.before, run)
    lower, higher = (choice.expected, risk) if in_plan else (risk, choice.expected)
    words = _words(remedy, scene, own if in_plan else other)
    name, setting = remedy.words(fp8_weights=True), f"plan with {remedy.options}"
    mismatch = f"KL k3 {power(lower.kl_k3)} instead of {power(higher.kl_k3)}"
    shown = {"mismatch": mismatch, "in_plan": in_plan, "remedy": True}
    yield scene.lever(name, setting, words, after, _price(remedy), before, **shown)


def _price(remedy: Remedies) -> str:
    if remedy.trainer_precision != BF16:
        return "another training: its linears round to FP8"
    if remedy.router_replay:
        return "the trainer has to replay the experts"
    return "more memory for weights"


def _words(remedy: Remedies, scene: Scene, remedies: Remedies) -> Mapping[str, str]:
    """The remedy in the words of each program that has some. remedies: all of the engine with it"""
    if any(remedy.keep_bf16):
        patterns = ", ".join(kept_patterns(replace(scene.choice.setup, remedies=remedies)))
        return {"vllm": f"quantization_config ignore: {patterns}", "fp8plan": f"keep_bf16={remedies.keep_bf16}"}
    words = {}
    if remedy.router_replay:
        words["vllm"] = "--enable-return-routed-experts"
    elif remedy.trainer_precision == POW2 and matching_trainer(scene.choice.setup) == BLOCK:
        words["vllm"] = f"{ENGINE_E8M0}=1"
    for trainer in TRAINERS:
        try:
            words[trainer.target] = trainer.typed(remedy)
        except ConfigError:  # a trainer without this remedy
            continue
    return words
