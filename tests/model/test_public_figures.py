"""Figures that others published of vLLM and of models, each with its source."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from benchmarks import public_figures
from benchmarks.public_figures import DATA, KINDS, Figure, Verdict
from fp8plan.model.architecture import Experts
from fp8plan.model.configs import bundled_configs

FIGURES = public_figures.figures()


def name_of(figure: Figure) -> str:
    return f"{figure.kind}-{figure.model.rpartition('/')[2]}-{figure.public:g}"


@pytest.mark.parametrize("figure", FIGURES, ids=map(name_of, FIGURES))
def test_a_public_figure_agrees_or_its_miss_is_explained(figure: Figure) -> None:
    assert figure.source
    assert figure.agrees != bool(figure.why), "a figure needs `why` if it does not agree, and only then"
    assert not (figure.unknown and figure.otherwise)
    if figure.otherwise:
        assert replace(figure, **figure.otherwise).agrees


def test_every_kind_and_verdict_has_a_figure_and_every_config_a_use() -> None:
    assert {figure.kind for figure in FIGURES} == set(KINDS)
    assert {figure.verdict for figure in FIGURES} == set(get_args(Verdict))
    assert set(DATA["configs"]) <= {figure.model for figure in FIGURES}
    assert not set(DATA["configs"]) & set(bundled_configs())


def test_a_figure_that_differs_by_one_does_not_agree() -> None:
    exact = [x for x in FIGURES if not x.why and x.kind.startswith(("pool", "request_blocks", "block", "token_bytes"))]
    assert len(exact) >= 10
    for figure in exact:
        assert not replace(figure, public=figure.public + 1).agrees


def test_longcat_flash_has_the_active_parameters_of_its_model_card() -> None:
    """27 billion on average."""
    shape = next(x for x in FIGURES if "LongCat" in x.model).shape
    [(experts, layers)] = shape.parts_of(Experts)
    assert (layers, experts.experts_per_token, experts.choices_per_token) == (28, 8, 12)
    idle = layers * (experts.num_experts - experts.experts_per_token) * 3 * experts.intermediate_size * 6144
    assert (shape.num_parameters - idle - shape.vocab_size * 6144) / 1e9 == pytest.approx(27, rel=0.02)
