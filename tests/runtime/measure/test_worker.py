"""Measurements inside vLLM's worker, on stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fp8plan.runtime.measure.rollouts.worker import route_evenly  # noqa: E402


def parameters(**shapes: tuple[int, ...]) -> list[tuple[str, Any]]:
    """Dummy weights as vLLM makes them. A dot in a name is written as __."""
    made = {name.replace("__", "."): torch.rand(shape) * 2e-3 - 1e-3 for name, shape in shapes.items()}
    return [(name, torch.nn.Parameter(x.to(torch.bfloat16))) for name, x in made.items()]


def test_tokens_go_to_all_experts() -> None:
    layer = "model__layers__0__"
    named = parameters(
        **{
            f"{layer}mlp__gate__weight": (64, 2048),
            f"{layer}mlp__gate__e_score_correction_bias": (64,),
            f"{layer}mlp__experts__routed_experts__w2_bias": (64, 128),
            f"{layer}input_layernorm__weight": (2048,),
            f"{layer}self_attn__qkv_proj__weight": (256, 128),
        }
    )
    before = {name: value.detach().clone() for name, value in named}
    x = torch.randn(512, 2048)

    def chosen() -> int:
        normed = (x * named[3][1]).to(torch.bfloat16)
        scores = (normed @ named[0][1].T).sigmoid() + named[1][1]
        return len(scores.detach().topk(4, dim=1).indices.unique())

    few = chosen()
    assert route_evenly(named) == 1
    assert few < chosen() == 64
    after = dict(named)
    names = list(before)
    assert after[names[0]].detach().float().std() == pytest.approx(2048**-0.5, rel=0.02)
    assert not after[names[1]].any()
    assert not after[names[2]].any()
    assert (after[names[3]] == 1).all()
    assert torch.equal(after[names[4]], before[names[4]])


@pytest.mark.parametrize("embedding", ["embed_tokens", "embedding"])
def test_an_embedding_outweighs_what_layers_add(embedding: str) -> None:
    """So that a token decides its route by itself, and not the prompt that it shares with other samples."""
    name = f"model__{embedding}__weight"
    named = parameters(
        **{name: (512, 256), "model__layers__0__mlp__gate__weight": (8, 256), "lm_head__weight": (512, 256)}
    )
    head = named[2][1].detach().clone()
    assert route_evenly(named) == 1
    assert named[0][1].detach().float().std() == pytest.approx(1.0, rel=0.02)
    assert torch.equal(named[2][1], head)


def test_an_embedding_that_is_the_head_too_keeps_its_weights() -> None:
    named = parameters(model__embed_tokens__weight=(512, 256), model__layers__0__mlp__gate__weight=(8, 256))
    before = named[0][1].detach().clone()
    assert route_evenly(named) == 1
    assert torch.equal(named[0][1], before)


def test_a_dense_model_is_left_alone() -> None:
    named = parameters(
        model__norm__weight=(8,), model__layers__0__mlp__gate_up_proj__weight=(16, 8), lm_head__bias=(4,)
    )
    before = [value.detach().clone() for _, value in named]
    assert route_evenly(named) == 0
    assert all(torch.equal(old, value) for old, (_, value) in zip(before, named, strict=True))
