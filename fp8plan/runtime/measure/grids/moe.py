"""The routed-expert calls that are measured, and where their tokens go. Pure: numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fp8plan.model.architecture import ModelShape, parts
from fp8plan.model.calibrate.held_out import MOE
from fp8plan.runtime.measure.kernels.sweep import Point

# Of one layer: number of experts, experts per token, hidden size, inner size of an expert.
Experts = tuple[int, int, int, int]
TINY: Experts = (16, 2, 512, 256)
MODELS = ("Qwen/Qwen3-30B-A3B", *MOE, "mistralai/Mixtral-8x7B-v0.1", "fp8plan/moe-7b")
# Other proportions: wide models with few experts, and narrow experts in hundreds.
OTHER_MODELS = ("deepseek-ai/DeepSeek-V2-Lite", "zai-org/GLM-4.7-Flash", "fp8plan/qwen3-next-16-layers")
FEW_WIDE: tuple[Experts, ...] = ((32, 4, 3072, 3072), (16, 2, 4096, 6400))

DTYPES = ("bf16", "fp8_block")
SKEWS = ("even", "lognormal_0.5", "power_law_1.2")
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
FEW_TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
DRAWS = 2  # routings of one point; layers take them in turn


def experts_of(model: str) -> Experts:
    """The experts of a model whose layers have alike ones, or none."""
    shape = ModelShape.from_hf(model)
    if not (found := shape.parts_of(parts.Experts)):
        raise ValueError(f"{model} has no routed experts")
    [(experts, _)] = found
    return experts.num_experts, experts.experts_per_token, shape.hidden_size, experts.intermediate_size


def points(grid: str) -> list[Point]:
    """All points of the "quick" or the "full" grid, in an order that can be cut anywhere: neighbours are unrelated."""
    found = list(dict.fromkeys(_quick() if grid == "quick" else _full()))
    order = np.random.default_rng(0).permutation(len(found))
    return [_point(*found[i]) for i in order]


Key = tuple[str, Experts, str, int]  # dtype, layer, skew, tokens


def _quick() -> Iterator[Key]:
    reference, other = experts_of(MODELS[0]), experts_of(MODELS[3])
    yield from product(DTYPES, (reference,), ("even",), FEW_TOKENS)
    yield from product(DTYPES, (reference,), ("power_law_1.2",), (32, 256, 2048))
    yield from product(DTYPES, (other, experts_of(MODELS[2])), ("even",), FEW_TOKENS[::2])
    yield from product(DTYPES, (experts_of(MODELS[1]), TINY), ("even",), (8, 128, 2048))


def _full() -> Iterator[Key]:
    yield from _quick()
    layers = [experts_of(model) for model in MODELS]
    yield from product(DTYPES, layers[::3], ("even",), TOKENS)
    yield from product(DTYPES, [*layers, TINY], ("even",), TOKENS[::2] + TOKENS[-1:])
    yield from product(DTYPES, layers[:1], SKEWS[1:], (8, *FEW_TOKENS[2:]))
    yield from product(DTYPES, layers[1:], ("power_law_1.2",), (32, 128, 512, 4096))
    others = [*map(experts_of, OTHER_MODELS), *FEW_WIDE]
    yield from product(DTYPES, others, ("even",), TOKENS[::2] + TOKENS[-1:])


def _point(dtype: str, layer: Experts, skew: str, tokens: int) -> Point:
    experts, top_k, hidden, inner = layer
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden, "inner": inner, "skew": skew}
    return Point(f"moe.{dtype}", shape)


def popularity(experts: int, skew: str) -> NDArray[np.float64]:
    """Relative popularity of each expert, busiest last, as quantiles of a law.

    "power_law_A" has density x^-A on [1, experts], after AIConfigurator, which draws loads so with A of 1.01 and 1.2
    (on this range the two differ little). "lognormal_S" is milder: ln x has standard deviation S.
    """
    if skew == "even":
        return np.ones(experts)
    law, _, number = skew.rpartition("_")
    quantiles = (np.arange(experts) + 0.5) / experts
    if law == "lognormal":
        return np.asarray(np.exp(float(number) * ndtri(quantiles)))
    power = 1 - float(number)
    return np.asarray((1 + quantiles * (float(experts) ** power - 1)) ** (1 / power))


def route(tokens: int, experts: int, top_k: int, skew: str, seed: int) -> NDArray[np.bool_]:
    """The experts that each token goes to, bool of shape (tokens, experts): top_k distinct ones by popularity.

    The top k of popularity plus Gumbel noise are draws without replacement (Plackett-Luce).
    """
    rng = np.random.default_rng(seed)
    weights = rng.permutation(popularity(experts, skew))
    scores = np.log(weights) + rng.gumbel(size=(tokens, experts))
    chosen = np.zeros((tokens, experts), np.bool_)
    np.put_along_axis(chosen, np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k], True, axis=1)
    return chosen


def load(routings: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    """The number of experts that a routing hits, and the tokens of the busiest one: means over `routings`."""
    loads = [routing.sum(axis=0) for routing in routings]
    return {
        "hit": float(np.mean([np.count_nonzero(x) for x in loads])),
        "busiest": float(np.mean([x.max() for x in loads])),
    }


def expert_elements(layer: Experts) -> int:
    """Weights of one expert: gate, up and down."""
    return 3 * layer[2] * layer[3]
