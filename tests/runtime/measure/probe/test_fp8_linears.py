"""The reference in a trainer's FP8: the modules that are rounded, experts of all layouts, and the end of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import checkpoint

from fp8plan.errors import ConfigError
from fp8plan.model.emit.vllm import ROUTER_PATTERN, ignored
from fp8plan.model.precision import FP8_BLOCK
from fp8plan.model.risk.remedies import Remedies
from fp8plan.model.setup import EngineSetup
from fp8plan.runtime.measure.probe import fp8_linears as module
from fp8plan.runtime.measure.probe.fp8_linears import fp8_linears

torch = pytest.importorskip("torch")

TOKENS = torch.arange(40).view(2, 20) * 7


def loaded(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(kind, "a"), dtype=torch.bfloat16).eval().model


def states(decoder: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = decoder(input_ids=TOKENS).last_hidden_state
    return found


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears that round nothing."""

    def linear(tokens: torch.Tensor, weight: torch.Tensor, bias: Any, precision: str) -> torch.Tensor:
        return torch.nn.functional.linear(tokens, weight, bias)

    monkeypatch.setattr(module, "linear", linear)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_context_changes_linears_and_experts_and_ends(kind: str) -> None:
    decoder = loaded(kind)
    before = states(decoder)
    with fp8_linears(decoder, "fp8_block", [ROUTER_PATTERN]):
        rounded = states(decoder)
    assert torch.equal(states(decoder), before)
    apart = (rounded - before).float().std() / before.float().std()
    assert 0.05 < apart < 0.6


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_without_rounding_the_model_is_its_own(kind: str, plainly: None) -> None:
    decoder = loaded(kind)
    before = states(decoder)
    with fp8_linears(decoder, "fp8_block", [ROUTER_PATTERN]):
        assert torch.allclose(states(decoder), before, rtol=2e-2, atol=2e-2)


def test_modules_that_vllm_leaves_in_bf16_are_not_rounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Routers, kept linears, and those whose input is no multiple of 128. lm_head is outside the decoder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    in_bf16 = ignored(EngineSetup(str(tmp_path), "cpu", FP8_BLOCK, remedies=Remedies(keep_bf16=(1, 1, "o_proj"))))
    with fp8_linears(model.model, "fp8_block", in_bf16):
        rounded = {name for name, part in model.named_modules() if "forward" in vars(part)}
    names = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj".split()
    assert rounded == {f"model.layers.1.{name}" for name in names}


def test_halves_of_an_expert_that_end_in_a_block_are_rounded_each() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=64, num_experts=2, num_experts_per_tok=1)
    experts = Qwen3MoeExperts(config)
    torch.manual_seed(0)
    with torch.no_grad():
        experts.gate_up_proj.normal_().mul_(torch.tensor([1.0, 100.0]).repeat_interleave(64)[:, None])
        experts.down_proj.normal_()
        tokens, place, weights = torch.randn(3, 128), torch.tensor([[1], [0], [1]]), torch.full((3, 1), 0.5)
        found = module._experts(experts, "fp8_block", tokens, place, weights)
        for row, (token, (expert,)) in enumerate(zip(tokens, place.tolist(), strict=True)):
            gate, up = (
                module.linear(token[None], part, None, "fp8_block") for part in experts.gate_up_proj[expert].chunk(2)
            )
            inner = torch.nn.functional.silu(gate) * up
            outer = module.linear(inner, experts.down_proj[expert], None, "fp8_block")
            assert torch.allclose(found[row], outer[0] * 0.5, rtol=1e-5, atol=1.0)


def test_experts_that_are_transposed_and_have_biases(plainly: None) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    experts = GptOssExperts(GptOssConfig(hidden_size=128, intermediate_size=64, num_local_experts=4))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.1)
        tokens, places = torch.randn(5, 128), torch.tensor([[0, 1], [3, 0], [2, 1], [1, 3], [0, 2]])
        weights = torch.rand(5, 2)
        wanted = type(experts).forward.__wrapped__(experts, tokens, places, weights)
        assert torch.allclose(
            module._experts(experts, "fp8_block", tokens, places, weights), wanted, rtol=1e-4, atol=1e-5
        )


def test_experts_of_an_unknown_form_are_refused() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 128, 128))

    decoder = torch.nn.ModuleDict({"experts": Experts()})
    with (
        pytest.raises(ConfigError, match=r"^model.experts \(Experts\) has experts of a form that this reference"),
        fp8_linears(decoder, "fp8_block", []),
    ):
        pass
    with fp8_linears(decoder, "fp8_block", [r"re:.*\.experts$"]):  # vLLM leaves them in BF16
        pass
