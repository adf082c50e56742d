"""Tensors in a manifest for which a rank has no place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.worker.prepare import _refuse_unknown

ELSEWHERE = ["model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.0.mlp.experts.3.down_proj.weight"]
TIED = SimpleNamespace(tie_word_embeddings=True)


def test_experts_of_other_ranks_are_passed_over_where_ranks_share_them_out() -> None:
    _refuse_unknown([*ELSEWHERE, "lm_head.weight"], TIED, shares_experts=True)
    with pytest.raises(ConfigError, match=r"unknown: model\.layers\.0\.mlp\.experts\.3\.gate_proj\.weight"):
        _refuse_unknown(ELSEWHERE, TIED)
    with pytest.raises(ConfigError, match=r"unknown: model\.layers\.0\.mlp\.gate_prj\.weight"):
        _refuse_unknown([*ELSEWHERE, "model.layers.0.mlp.gate_prj.weight"], TIED, shares_experts=True)
