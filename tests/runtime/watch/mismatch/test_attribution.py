"""The KL of known mixtures, split by cause: each part within 20% of what the full distributions say."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from plans import choice, plan

from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.plan import Plan
from fp8plan.runtime.watch.guard.observation import EngineFacts
from fp8plan.runtime.watch.mismatch.attribution import Part, attributed, sentence
from fp8plan.runtime.watch.mismatch.expectation import Expected
from fp8plan.runtime.watch.mismatch.measure import measure, pack
from fp8plan.runtime.watch.mismatch.metrics import Mismatch
from fp8plan.runtime.watch.mismatch.sampling import Sampling
from fp8plan.runtime.watch.monitor.monitor import Monitor
from fp8plan.runtime.watch.monitor.sinks import Callback
from fp8plan.schemas import ROUTING_DIFFERS, KlPart

ROWS, LENGTH, VOCABULARY = 16, 3_000, 100
STALE, NOISE = 0.09, 0.06  # standard deviations of the logits' change
ROUTED, REROUTED = 0.25, 0.1  # that of other experts, and the share of tokens that have some


class Mixture(NamedTuple):
    """Log-probs of a sample under four policies, each [ROWS, LENGTH], and the exact KL of each cause."""

    train: torch.Tensor
    synced: torch.Tensor
    replayed: torch.Tensor
    rollout: torch.Tensor
    kl: dict[str, float]


def mixture(
    stale: float = 0.0, noise: float = 0.0, top_p: float = 1.0, rerouted: float = 0.0, seed: int = 0
) -> Mixture:
    """The engine has the synced weights with noise on the logits, and samples a nucleus; the trainer went on.

    rerouted: share of the tokens for which the engine picks other experts
    """
    chance = torch.Generator().manual_seed(seed)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    sums = dict.fromkeys(("staleness", "routing", "precision", "sampling"), 0.0)
    for _ in range(ROWS):
        logits = 2.5 * torch.randn(LENGTH, VOCABULARY, generator=chance)
        synced = logits.log_softmax(-1)
        train = (logits + stale * torch.randn(logits.shape, generator=chance)).log_softmax(-1)
        routed = logits
        if rerouted:
            differs = torch.rand(LENGTH, 1, generator=chance) < rerouted
            routed = logits + differs * ROUTED * torch.randn(logits.shape, generator=chance)
        replayed = routed.log_softmax(-1)
        engine = (routed + noise * torch.randn(logits.shape, generator=chance)).log_softmax(-1)
        order, index = engine.exp().sort(-1, descending=True)
        kept = torch.zeros_like(engine, dtype=torch.bool).scatter(-1, index, order.cumsum(-1) - order < top_p)
        mass = (engine.exp() * kept).sum(-1, keepdim=True)
        sampled_from = torch.where(kept, engine.exp() / mass, torch.zeros(()))
        on_kept = torch.where(kept, replayed.exp(), torch.zeros(())).sum(-1, keepdim=True)
        surplus = engine - mass.log() - replayed + on_kept.log()  # of two distributions over the kept set
        sums["staleness"] += float((sampled_from * (synced - train)).sum(-1).mean()) / ROWS
        sums["routing"] += float((sampled_from * (replayed - synced)).sum(-1).mean()) / ROWS
        sums["precision"] += float((sampled_from * surplus).sum(-1).mean()) / ROWS
        sums["sampling"] += float((on_kept - 1 - on_kept.log()).mean()) / ROWS
        token = torch.multinomial(sampled_from, 1, generator=chance)
        for side, logprobs in zip(parts, (train, synced, replayed, engine - mass.log()), strict=True):
            side.append(logprobs.gather(-1, token).squeeze(-1))
    return Mixture(*map(torch.stack, parts), sums)


def expecting(kl: float) -> Plan:
    """A plan whose chosen precision is expected to have a KL around `kl`."""
    return plan(choices=(choice("fp8_block", kl_k3=kl, kl_k3_low=kl / 2, kl_k3_high=2 * kl + 1e-9),))


MIXTURES: dict[str, dict[str, float]] = {
    "staleness and precision": {"stale": STALE, "noise": NOISE},
    "sampling and precision": {"noise": NOISE, "top_p": 0.9},
    "all three": {"stale": STALE, "noise": NOISE, "top_p": 0.95},
    "staleness alone": {"stale": STALE},
    "routing and precision": {"noise": NOISE, "rerouted": REROUTED},
    "all four": {"stale": STALE, "noise": NOISE, "top_p": 0.95, "rerouted": REROUTED},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_each_part_of_a_known_mixture_is_within_20_percent(name: str) -> None:
    recipe = MIXTURES[name]
    mixed = mixture(**recipe)
    records: list[Any] = []
    monitor = Monitor(
        sampling={"top_p": recipe.get("top_p", 1.0)}, sinks=[Callback(records.append)],
        plan=expecting(mixed.kl["routing"] + mixed.kl["precision"]),
    )  # fmt: skip
    step = monitor.step(
        mixed.train, mixed.rollout, torch.ones(ROWS, LENGTH), synced_logprobs=mixed.synced,
        replayed_logprobs=mixed.replayed, routing_differs=0.25,
    )  # fmt: skip
    by_cause = {part.causes: part for part in step.attribution}
    assert sum(part.kl for part in step.attribution) == pytest.approx(step.mismatch.k3)
    for cause, kl in mixed.kl.items():
        part = by_cause.get((cause,))
        if kl < 0.02 * step.mismatch.k3:
            assert part is None or part.kl < 0.05 * step.mismatch.k3, cause
        else:
            assert part is not None, cause
            assert part.kl == pytest.approx(kl, rel=0.2), cause
            assert part.low * 0.8 <= kl <= part.high * 1.2
    assert records[-1]["attribution"] == [asdict(part) for part in step.attribution]
    assert records[-1]["metrics"][ROUTING_DIFFERS] == 0.25


def test_causes_that_nothing_tells_apart_are_one_part() -> None:
    mixed = mixture(stale=STALE, noise=NOISE)
    mismatch = measure(pack(mixed.train, mixed.rollout, torch.ones(ROWS, LENGTH))).metrics()
    (part,) = attributed(mismatch)
    assert part.causes == ("precision", "staleness", "sampling", "rest")
    assert part.kl == pytest.approx(mismatch.k3)
    (part,) = attributed(mismatch, sampling=Sampling(), fresh=True, routed=True)
    assert part.causes == ("precision", "routing", "rest")
    kl = mixed.kl["precision"]
    known, rest = attributed(mismatch, sampling=Sampling(), expected=Expected(kl, kl / 2, 2 * kl))
    assert (known.causes, rest.causes) == (("precision",), ("staleness", "rest"))
    assert known.kl == pytest.approx(kl)
    assert known.low <= kl <= known.high
    for odd in (Sampling(temperature=0.7), Sampling(repetition_penalty=1.1), Sampling(top_p=0.9, temperature=0.7)):
        (part,) = attributed(mismatch, sampling=odd, fresh=True)
        assert part.causes == ("precision", "sampling", "rest"), odd


def test_a_cut_and_a_precision_of_unknown_size_are_one_part_unless_the_bounds_are_tight() -> None:
    mixed = mixture(noise=0.02, top_p=0.9)
    mismatch = measure(pack(mixed.train, mixed.rollout, torch.ones(ROWS, LENGTH))).metrics()
    (part,) = attributed(mismatch, sampling=Sampling(top_p=0.9), fresh=True)
    assert part.causes == ("sampling", "precision", "rest")
    coarse = mixture(noise=NOISE, top_p=0.9)
    mismatch = measure(pack(coarse.train, coarse.rollout, torch.ones(ROWS, LENGTH))).metrics()
    sampling, rest = attributed(mismatch, sampling=Sampling(top_p=0.9), fresh=True)
    assert sampling.low <= coarse.kl["sampling"] <= sampling.high
    assert sampling.kl == pytest.approx(coarse.kl["sampling"], rel=0.2)
    assert rest.kl == pytest.approx(coarse.kl["precision"], rel=0.2)


def test_versions_give_a_lower_bound_of_staleness() -> None:
    mixed, current = mixture(stale=STALE, noise=NOISE), mixture(noise=NOISE, seed=1)
    versions = torch.tensor([3] * ROWS + [4] * ROWS)
    both = [torch.cat(pair) for pair in ((mixed.train, current.train), (mixed.rollout, current.rollout))]
    mismatch = measure(pack(*both, torch.ones(2 * ROWS, LENGTH)), versions).metrics()
    stale, rest = attributed(mismatch, sampling=Sampling())
    assert (stale.causes, stale.how) == (("staleness",), "bounded")
    assert stale.kl == pytest.approx(mixed.kl["staleness"] / 2, rel=0.2)  # of half of the tokens
    assert rest.causes == ("precision", "rest")


def test_what_exceeds_the_expectation_is_the_rest() -> None:
    mixed = mixture(noise=0.3)
    mismatch = measure(pack(mixed.train, mixed.rollout, torch.ones(ROWS, LENGTH))).metrics()
    kl = mismatch.k3 / 10
    known, rest = attributed(mismatch, sampling=Sampling(), fresh=True, expected=Expected(kl, kl / 2, 2 * kl))
    assert (known.kl, rest.causes) == (kl, ("rest",))
    assert rest.kl == pytest.approx(mismatch.k3 - kl)
    (known,) = attributed(mismatch, sampling=Sampling(), fresh=True, expected=Expected(kl, kl / 2, 20 * kl))
    assert known.kl == pytest.approx(mismatch.k3)


def test_the_sentence_names_the_largest_first() -> None:
    parts = [
        Part(("precision", "routing"), 2e-3, 1e-3, 3e-3, "expected"),
        Part(("staleness",), 4e-3, 4e-3, 4e-3, "measured"), Part(("rest",), 1e-6, 0.0, 1e-6, "left over"),
    ]  # fmt: skip
    assert sentence(parts) == "KL 6e-3: 4e-3 staleness, 2e-3 precision or routing"
    assert sentence([msgspec.convert(asdict(part), KlPart) for part in parts]) == sentence(parts)
    assert sentence([]) == ""
    assert sentence([Part(("precision", "rest"), 1.3e-3, 0.0, 1.0, "left over")]) == "KL 1.3e-3: precision or rest"


def of(train: torch.Tensor, rollout: torch.Tensor) -> Mismatch:
    return measure(pack(train, rollout)).metrics()


def test_replayed_experts_make_routing_a_part_of_its_own() -> None:
    mixed = mixture(noise=NOISE, rerouted=REROUTED)
    whole, replayed = of(mixed.train, mixed.rollout), of(mixed.replayed, mixed.rollout)
    (joined,) = attributed(whole, sampling=Sampling(), fresh=True, routed=True)
    assert joined.causes == ("precision", "routing", "rest")
    routing, rest = attributed(whole, replayed=replayed, sampling=Sampling(), fresh=True, routed=True)
    assert (routing.causes, routing.how, rest.causes) == (("routing",), "measured", ("precision", "rest"))
    assert (routing.kl, rest.kl) == (whole.k3 - replayed.k3, pytest.approx(replayed.k3))
    assert routing.kl == pytest.approx(mixed.kl["routing"], rel=0.2)
    # An expectation covers both: what of it is not routing is precision.
    both = mixed.kl["routing"] + mixed.kl["precision"]
    expected = Expected(both, both / 2, 1.1 * both)
    parts = attributed(whole, replayed=replayed, sampling=Sampling(), fresh=True, expected=expected, routed=True)
    assert [part.causes for part in parts] == [("routing",), ("precision",)]
    alone = Expected(mixed.kl["precision"], 0.0, 2 * mixed.kl["precision"], replayed=True)  # of a plan with replay
    parts = attributed(whole, replayed=replayed, sampling=Sampling(), fresh=True, expected=alone, routed=True)
    assert [part.causes for part in parts] == [("routing",), ("precision",)]
    assert parts[1].kl == pytest.approx(replayed.k3)
    parts = attributed(
        whole, sampling=Sampling(), fresh=True, expected=alone, routed=True
    )  # the trainer does not replay
    assert [part.causes for part in parts] == [("precision",), ("routing", "rest")]
    assert parts[1].kl == pytest.approx(mixed.kl["routing"], rel=0.2)
    small = Expected(routing.kl / 2, 0.0, 0.9 * routing.kl)  # the routing alone exceeds it
    parts = attributed(whole, replayed=replayed, sampling=Sampling(), fresh=True, expected=small, routed=True)
    assert [(part.causes, part.kl) for part in parts[1:]] == [(("precision",), 0.0), (("rest",), rest.kl)]


@pytest.mark.parametrize(("name", "cause"), [("synced_logprobs", "staleness"), ("replayed_logprobs", "routing")])
def test_log_probs_of_too_few_tokens_measure_nothing(name: str, cause: str) -> None:
    """The tokens without a log-prob have all of the KL here, so the others' KL is no part of it."""
    rollout = torch.full((16, 50), -2.0)
    train = rollout + 0.3 * (torch.arange(16) < 8)[:, None]
    halved = torch.where(train == rollout, train, math.nan)
    for side, causes in ((train * math.nan, "precision"), (halved, "precision"), (train, cause)):
        arguments: dict[str, Any] = {name: side}
        parts = Monitor(sampling=Sampling()).step(train, rollout, fresh=True, **arguments).attribution
        assert parts[0].causes[0] == causes


def test_a_trainer_that_replays_has_no_routing_in_its_kl() -> None:
    mixed = mixture(noise=NOISE, rerouted=REROUTED)
    facts = EngineFacts("Qwen/Qwen3-30B-A3B", "h200_sxm", "0.30.0", "fp8_block", EngineLimits())
    engine = SimpleNamespace(engine_facts=lambda: facts, guard=None, guard_off=None, report_kl=print, observation=None)
    engine.verdict = None
    sources: list[dict[str, Any]] = [{"facts": facts}, {"engine": engine}]
    for replay, source in product((False, True), sources):
        monitor = Monitor(sampling=Sampling(), router_replay=replay, **source)
        (part,) = monitor.step(mixed.replayed, mixed.rollout, fresh=True).attribution
        assert ("routing" in part.causes) is not replay


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_the_kl_whatever_is_known(seed: int) -> None:
    """Also where noise makes a difference negative, or a log-prob is NaN, or the KL was expected of a replay."""
    chance = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(4, 30, generator=chance)
    spreads = 0.2 * torch.rand(3, 1, 1, generator=chance)
    sides = rollout + spreads * torch.randn(3, 4, 30, generator=chance)
    sides = torch.where(torch.rand(sides.shape, generator=chance) < 0.02, torch.tensor(math.nan), sides)
    train, synced, replayed = (of(side, rollout) for side in sides)
    versions = torch.arange(4) % 2
    batches = [train, measure(pack(sides[0], rollout), versions).metrics()]
    low, kl, high = sorted((0.02 * torch.rand(3, generator=chance)).tolist())
    expectations = None, Expected(kl, low, high), Expected(kl, low, high, replayed=True)
    for mismatch, sampling, known in product(batches, (None, Sampling(), Sampling(top_p=0.9)), expectations):
        for first, second in product((None, synced), (None, replayed)):
            nearer = {"synced": first, "replayed": second}
            parts = attributed(mismatch, sampling=sampling, expected=known, routed=True, **nearer)
            assert sum(part.kl for part in parts) == pytest.approx(mismatch.k3)
            assert all(part.kl >= 0 for part in parts)
            named = [cause for part in parts for cause in part.causes]
            assert len(named) == len(set(named))
            assert (("routing",) in [part.causes for part in parts]) == (second is not None)


def test_without_a_figure_there_is_no_part() -> None:
    nothing = torch.full((2, 4), math.nan)
    assert attributed(measure(pack(nothing, nothing, torch.ones(2, 4))).metrics()) == ()
