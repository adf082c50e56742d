"""The replay of routes in transformers' models: bits, gradients, padding, packing, checkpointing and bad input."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fp8plan.errors import ConfigError
from fp8plan.runtime.replay import RULES, Replay, replayed
from fp8plan.runtime.routes import UNKNOWN, packed_routes, padded_routes, share_differing

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # larger than usual, so that the experts matter
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
EXPERTS, TOP_K, LAYERS = 8, 2, 3
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
}
DENSE = {"glm4_moe": [0]}  # layers without experts
BATCH, LENGTH = 2, 12


def model_of(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | more))
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def ids_of(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, COMMON["vocab_size"], (batch, length), generator=generator)


def own_routes(model: Any, ids: Tensor) -> Tensor:
    with replayed(model, None) as record:
        model(ids)
    return record.own_choice.reshape(*ids.shape, LAYERS, TOP_K)


def altered(routes: Tensor) -> Tensor:
    return torch.where(routes == UNKNOWN, routes, (routes + 1) % EXPERTS)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_models_own_routes_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model, ids = model_of(family, dtype), ids_of()
    before = model(ids).logits
    routes = own_routes(model, ids)
    with replayed(model, routes) as replay:
        logits = model(ids).logits
    assert torch.equal(logits, before)
    assert torch.equal(replay.own_choice, routes)
    assert replay.differing() == (0, 0)


# Class of a router -> its folder in transformers
FOLDERS = {
    "Qwen3MoeTopKRouter": "qwen3_moe",
    "Qwen2MoeTopKRouter": "qwen2_moe",
    "Qwen3NextTopKRouter": "qwen3_next",
    "OlmoeTopKRouter": "olmoe",
    "Qwen3_5MoeTopKRouter": "qwen3_5_moe",
    "Qwen3VLMoeTextTopKRouter": "qwen3_vl_moe",
    "MixtralTopKRouter": "mixtral",
    "GptOssTopKRouter": "gpt_oss",
    "Glm4MoeTopkRouter": "glm4_moe",
    "Glm4MoeLiteTopkRouter": "glm4_moe_lite",
    "DeepseekV3TopkRouter": "deepseek_v3",
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rule_of_a_router_gives_the_bits_of_its_own_forward(name: str, normed: bool, dtype: torch.dtype) -> None:
    folder = FOLDERS[name]
    kind = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    sizes = {"hidden_size": 16, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS}
    rest = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": normed}
    router = kind(SimpleNamespace(num_experts_per_tok=3, **sizes, **rest)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    torch.nn.init.normal_(router.weight, generator=generator)
    logits, weights, experts = router(torch.randn(64, 16, generator=generator).to(dtype))
    assert torch.equal(RULES[name](router, logits, experts).to(weights.dtype), weights)


def test_other_routes_change_the_logits_until_the_with_ends(family: str) -> None:
    model, ids = model_of(family), ids_of()
    before, routes = model(ids).logits, own_routes(model, ids)
    with replayed(model, altered(routes)) as replay:
        logits = model(ids).logits
    assert (logits - before).abs().max() > 0.1
    differing = replay.differing()
    assert differing.tokens == 1
    assert differing.choices > 0.9
    assert torch.equal(model(ids).logits, before)


def test_layers_without_experts_are_unknown_and_not_read(family: str) -> None:
    model, ids = model_of(family), ids_of()
    routes = own_routes(model, ids)
    dense = DENSE.get(family, [])
    assert (routes[:, :, dense] == UNKNOWN).all()
    others = [layer for layer in range(LAYERS) if layer not in dense]
    assert ((routes[:, :, others] >= 0) & (routes[:, :, others] < EXPERTS)).all()
    zeros = routes.clone()
    zeros[:, :, dense] = 0  # as vLLM returns them
    with replayed(model, zeros):
        assert torch.equal(model(ids).logits, model_of(family)(ids).logits)


def test_routers_learn_from_the_replayed_experts(family: str) -> None:
    """The gradient of a router is that of the replayed experts' weights: finite differences say the same."""
    model, ids = model_of(family, torch.float64), ids_of(1, 6)
    model.set_experts_implementation("eager")  # the others have no FP64
    routes = altered(own_routes(model, ids))

    def loss() -> Tensor:
        with replayed(model, routes):
            return model(ids).logits.logsumexp(-1).mean()

    found = gradients(model, loss())
    name = next(name for name in reversed(found) if name.endswith(("mlp.gate.weight", "mlp.router.weight")))
    weight = dict(model.named_parameters())[name]
    direction = torch.randn_like(weight, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        step = 1e-3
        weight += step * direction
        above = loss()
        weight -= 2 * step * direction
        below = loss()
    slope = (found[name] * direction).sum()
    assert abs(slope) > 1e-4
    # Weights of experts are computed in FP32, so differences carry its rounding.
    assert torch.isclose((above - below) / (2 * step), slope, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_same_experts(family: str, reentrant: bool) -> None:
    """The backward pass comes after the `with`, as in a trainer whose loss function has returned."""
    model, ids = model_of(family).train(), ids_of()
    routes = altered(own_routes(model, ids))

    def loss() -> Tensor:
        with replayed(model, routes):
            return model(ids).logits.logsumexp(-1).square().mean()

    expected = gradients(model, loss())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, loss())
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
    before = model_of(family).train()(ids).logits
    assert torch.equal(model(ids).logits, before)  # no hook stays


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_backward_of_several_micro_batches_keeps_them_apart(reentrant: bool) -> None:
    model, ids = model_of("qwen3_moe").train(), ids_of(4)
    routes = altered(own_routes(model, ids))

    def loss() -> Tensor:
        with replayed(model, routes[:2]):
            parts = [model(rows).logits for rows in ids[:2].split(1)]
        with replayed(model, routes[2:]):
            parts += [model(rows).logits for rows in ids[2:].split(1)]
        return torch.cat(parts).logsumexp(-1).square().mean()

    expected = gradients(model, loss())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, loss())
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_an_older_forward_is_recomputed_while_another_replay_is_open() -> None:
    model, ids = model_of("qwen3_moe").train(), ids_of()
    routes = altered(own_routes(model, ids))
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss() -> Tensor:
        with replayed(model, routes):
            return model(ids).logits.square().mean()

    expected = gradients(model, loss())
    older = loss()
    with replayed(model, altered(routes)):
        found = gradients(model, older)
        newer = model(ids).logits
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name
    with replayed(model, altered(routes)):
        assert torch.equal(model(ids).logits, newer)


def test_a_backward_that_breaks_off_leaves_no_experts_behind() -> None:
    model, ids = model_of("qwen3_moe").train(), ids_of()
    before, routes = model(ids).logits, own_routes(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replayed(model, altered(routes)):
        logits = model(ids).logits

    def fail(gradient: Tensor) -> None:
        raise MemoryError

    model.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        logits.sum().backward()
    assert torch.equal(model(ids).logits, before)
    with replayed(model, routes):
        assert torch.equal(model(ids).logits, before)


def test_padding_on_either_side_is_left_to_the_model() -> None:
    """A padded batch gives each sequence the logits that it has alone. The last token of each has no route."""
    model, lengths = model_of("qwen3_moe"), (9, 5)
    sequences = [ids_of(1, length) for length in lengths]
    routes = [altered(own_routes(model, ids))[0, :-1].numpy().astype(np.uint8) for ids in sequences]
    alone = []
    for ids, part in zip(sequences, routes, strict=True):
        with replayed(model, padded_routes([part], torch.ones_like(ids))):
            alone.append(model(ids).logits[0])
    for before in (0, 2):
        mask = torch.zeros(2, 12, dtype=torch.long)
        ids = torch.zeros_like(mask)
        for row, sequence in enumerate(sequences):
            places = slice(before, before + lengths[row])
            mask[row, places], ids[row, places] = 1, sequence[0]
        batch = padded_routes(routes, mask)
        assert batch.shape == (2, 12, LAYERS, TOP_K)
        assert (batch[mask == 0] == UNKNOWN).all()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with replayed(model, batch) as replay:
            logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for row, expected in enumerate(alone):
            assert torch.allclose(logits[row, mask[row].bool()], expected, atol=1e-4)
        last = torch.zeros_like(mask)
        last[0, before + lengths[0] - 1] = 1
        with pytest.raises(ConfigError, match="no token has routes in both"):
            replay.differing(last)
        assert replay.differing(mask).tokens == 1


def test_packed_sequences_have_their_own_routes() -> None:
    model, lengths = model_of("qwen3_moe"), (9, 5)
    sequences = [ids_of(1, length) for length in lengths]
    routes = [altered(own_routes(model, ids))[0, :-1] for ids in sequences]
    alone = []
    for ids, part in zip(sequences, routes, strict=True):
        with replayed(model, packed_routes([part], [ids.shape[1]])):
            alone.append(model(ids).logits[0])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with replayed(model, packed_routes(routes, lengths)):
        logits = model(torch.cat(sequences, dim=1), position_ids=positions, use_cache=False).logits[0]
    for found, expected in zip(logits.split(lengths), alone, strict=True):
        assert torch.allclose(found, expected, atol=1e-4)


def altered_run() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, its input, routes that are not its own, and its logits with them."""
    model, ids = model_of("qwen3_moe"), ids_of()
    routes = altered(own_routes(model, ids))
    with replayed(model, routes):
        return model, ids, routes, model(ids).logits


def test_a_wrapped_model_and_its_backbone_replay_alike() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, ids, routes, expected = altered_run()
    with replayed(model, routes):  # a trainer that computes the head itself
        assert torch.equal(model.lm_head(model.model(ids).last_hidden_state), expected)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with replayed(wrapped, routes):
        assert torch.equal(wrapped(ids).logits, expected)


def test_routers_that_peft_trains_are_replayed_and_so_are_those_they_stand_for() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model, ids, routes, expected = altered_run()
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    wrapped = peft.get_peft_model(model, settings)
    wrapped.add_adapter("reference", settings)
    with replayed(wrapped, routes):
        assert torch.equal(wrapped(ids).logits, expected)
    with wrapped.disable_adapter(), replayed(wrapped, routes):  # as TRL's reference model
        assert torch.equal(wrapped(ids).logits, expected)


def test_the_share_that_differs_ignores_order_and_counts_what_is_known() -> None:
    routes = torch.tensor([[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]]])  # 1 x 3 tokens x 2 layers x 2
    others = torch.tensor([[[[1, 0], [2, 3]], [[4, 5], [6, 0]], [[-1, -1], [0, 1]]]])
    assert share_differing(routes, others) == pytest.approx((1 / 3, 1 / 5))
    assert share_differing(routes, others, torch.tensor([[1, 0, 1]])) == (0, 0)
    assert share_differing(routes, others, torch.tensor([[0, 1, 0]])) == (1, 0.5)


def replay_of(model: Any, routes: Tensor, ids: Tensor) -> Replay:
    with replayed(model, routes) as replay:
        model(ids)
    return replay


def test_bad_input_says_what_is_allowed() -> None:
    model, ids = model_of("qwen3_moe"), ids_of()
    routes = own_routes(model, ids)
    dense = Qwen3ForCausalLM(Qwen3Config(**(COMMON | {"num_hidden_layers": 1})))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no router") as error, replayed(dense, routes):
        pass
    assert all(name in str(error.value) for name in RULES)
    cases = {
        "routes have the shape": routes[:, :, 1:],
        r"allowed: \(batch, length, 3, 2\)": routes[0],
        "dtype torch.float32": routes.float(),
        "dtype torch.uint8": routes.to(torch.uint8),  # which has no number for UNKNOWN
        "allowed: 0 to 7": routes + 1,
        "name an expert twice": torch.zeros_like(routes),
        "the routes have 22 tokens, and the forwards have 24": routes[:, 1:],
        "the routes have 48 tokens, and the forwards had 24": torch.cat([routes, routes]),
    }
    for message, wrong in cases.items():
        with pytest.raises(ConfigError, match=message):
            replay_of(model, wrong, ids)
    with (
        pytest.raises(ConfigError, match="end that `with` first"),
        replayed(model, routes),
        replayed(model, None),
    ):
        pass
    with pytest.raises(ConfigError, match="no forward has run"), replayed(model, None) as record:
        record.own_choice  # noqa: B018
    with pytest.raises(ConfigError, match="nothing was replayed"):
        record.differing()
    assert torch.equal(own_routes(model, ids), routes)  # nothing stays of these


def test_a_forward_past_the_routers_is_refused() -> None:
    """As a kernel in place of the experts' module, or a compiled forward, would do it."""
    model, ids = model_of("qwen3_moe"), ids_of()
    routes = own_routes(model, ids)
    block = model.model.layers[1].mlp
    block.forward = lambda states: states
    with pytest.raises(ConfigError, match="1 of 3 routers were not called"):
        replay_of(model, routes, ids)


def test_bad_routes_of_sequences_say_what_is_allowed() -> None:
    mask = torch.ones(2, 4)
    part = np.zeros((3, LAYERS, TOP_K), np.uint8)
    with pytest.raises(ConfigError, match="1 sequences have routes, and the mask has 2 rows"):
        padded_routes([part], mask)
    with pytest.raises(ConfigError, match="sequence 1 has routes of 5 tokens; allowed: 4"):
        padded_routes([part, np.zeros((5, LAYERS, TOP_K), np.uint8)], mask)
    with pytest.raises(ConfigError, match=r"routed_experts=True"):
        padded_routes([part, None], mask)
    with pytest.raises(ConfigError, match=r"experts per token \[\(1, 1\), \(3, 2\)\]; allowed: of one model"):
        padded_routes([part, part[:, :1, :1]], mask)
    with pytest.raises(ConfigError, match="there are 1 lengths"):
        packed_routes([part, part], [4])
    with pytest.raises(ConfigError, match="the shapes are"):
        share_differing(padded_routes([part], mask[:1]), torch.zeros(1, 4, 1, 2))
