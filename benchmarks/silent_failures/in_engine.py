"""Failures that happen in a sync, in the engine or in how it samples, injected into an own loop."""

from __future__ import annotations

from typing import Any

import torch

from . import own_loop as inside
from .lab import PROMPTS, Failure, lora_twice
from .own_loop import OwnLab

LONG = [[(7 * n + 31 * row) % 1000 for n in range(129)] for row in range(8, 32)]  # a block of the KV cache, and a token
K, V = "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"


def sync_skipped(lab: OwnLab) -> None:
    lab.learn()
    lab.go_on()


def lora_never_sent(lab: OwnLab) -> None:
    base = lab.policy.tensors()
    lab.learn()
    lab.sync(base)
    lab.go_on()


def without(lab: OwnLab, part: str) -> None:
    """A sync without the tensors that have `part` in their names; fp8plan's, and one that keeps the old ones."""
    old = lab.policy.tensors()
    lab.learn()
    new = lab.policy.tensors()
    lab.attempt(lambda: lab.sync({name: tensor for name, tensor in new.items() if part not in name}))
    lab.sync({name: old[name] if part in name else tensor for name, tensor in new.items()})
    lab.go_on()


def one_replica_of_the_checkpoint(lab: OwnLab) -> None:
    lab.learn()
    first = lab.roll(seed=1)[::2]  # this replica has the checkpoint
    lab.examine()
    lab.sync()
    lab.last([*first, *lab.roll(seed=2)[1::2]])


def engine_of_the_checkpoint(lab: OwnLab) -> None:
    lab.learn()
    lab.sync()
    lab.step(lab.roll(seed=1))
    lab.learn()
    lab.sync(lab.first)
    lab.go_on()


def sent_otherwise(lab: OwnLab, **places: str) -> None:
    """A sync with the tensors of some modules in the place of others. places: name -> the one that is sent instead"""
    sent = lab.policy.tensors()
    given = {name: tensor.clone() for name, tensor in sent.items()}
    for here, there in places.items():
        here, there = here.replace("__", "."), there.replace("__", ".")
        for name in sent:
            if name.startswith(here):
                given[name] = sent[name.replace(here, there)]
    lab.sync(given)
    lab.go_on()


def shards_swapped(lab: OwnLab) -> None:
    sent_otherwise(lab, **{K: V, V: K})


def experts_permuted(lab: OwnLab) -> None:
    up, gate = (f"model.layers.1.mlp.experts.0.{name}_proj" for name in ("up", "gate"))
    sent_otherwise(lab, **{up: gate, gate: up})


def bias_dropped(lab: OwnLab) -> None:
    lab.worker(inside.fill, "qkv_proj.bias", 0.0)
    lab.go_on()


def block_scales_stale(lab: OwnLab) -> None:
    """The weights of layer 1 have grown by half since the scales were made."""
    old = lab.worker(inside.scales)
    with torch.no_grad():
        for name, parameter in lab.policy.model.named_parameters():
            if "layers.1." in name and "proj" in name:
                parameter.mul_(1.5)
    lab.sync()
    lab.worker(inside.put_scales, old)
    lab.go_on()


def bf16_into_fp8(lab: OwnLab) -> None:
    lab.worker(inside.drop_a_scale)
    lab.go_on()


def scale_inverted(lab: OwnLab) -> None:
    lab.worker(inside.invert_a_scale)
    lab.go_on()


def rope_cache_lost(lab: OwnLab) -> None:
    lab.worker(inside.fill, "cos_sin_cache", 0.0)
    lab.go_on()


def optimizer_restores_old_weights(lab: OwnLab) -> None:
    lab.learn()
    lab.sync()
    lab.policy.load(lab.first)
    lab.go_on()


def kv_scales_unit(lab: OwnLab) -> None:
    lab.worker(inside.put_kv_scales, 1.0)
    lab.go_on()


def kv_scales_zero(lab: OwnLab) -> None:
    """As good as 0: at 0 the CPU's kernel raises an error, and a GPU's goes on."""
    lab.worker(inside.put_kv_scales, 1e-6)
    lab.go_on()


def kv_scales_stale(lab: OwnLab) -> None:
    """Keys grow by 6, values by 6, and the scales stay."""
    kept = {layer: [parts[part] for part in "qkv"] for layer, parts in lab.engine.kv_scales().items()}
    lab.grow(6)
    lab.sync()
    lab.engine.llm.collective_rpc("fp8plan_set_kv_scales", args=(kept,))
    lab.go_on()


def prefix_cache_not_reset(lab: OwnLab) -> None:
    """Keys and values have grown threefold since the prompts were cached."""
    lab.roll(LONG, seed=1)
    lab.grow(3)
    lab.engine._reset_prefix_cache = lambda: None
    lab.sync()
    lab.last(lab.roll(LONG, seed=2))
    lab.examine()


def mixed_versions(lab: OwnLab) -> None:
    """The first 24 tokens of each response are sampled before a sync, the others after it."""
    begun = lab.roll(seed=1, max_tokens=24)
    lab.learn()
    lab.sync()
    ended = lab.roll([[*one.prompt, *one.response] for one in begun], seed=2, max_tokens=24)
    whole = [
        one._replace(response=[*one.response, *rest.response], logprobs=[*one.logprobs, *rest.logprobs])
        for one, rest in zip(begun, ended, strict=True)
    ]
    lab.last(whole)
    lab.examine()


def nan_weights(lab: OwnLab) -> None:
    lab.worker(inside.fill, "layers.1.self_attn.q_norm", float("nan"))
    lab.go_on()


def trainer_temperature(lab: OwnLab) -> None:
    lab.last(lab.roll(seed=1, temperature=0.7))
    lab.doctor(temperature=0.7)


def raw_logprobs(lab: OwnLab) -> None:
    lab.worker(inside.give, "raw_logprobs")
    rollouts = lab.roll(seed=1, temperature=0.7)
    lab.last(lab.example(rollouts, lab.policy.scores(rollouts, temperature=0.7)))
    lab.doctor(lambda chosen: lab.policy.scores(chosen, temperature=0.7), temperature=0.7)


def sampled_with(**sampling: Any) -> Any:
    def inject(lab: OwnLab) -> None:
        lab.go_on(**sampling)

    return inject


def double_bos(lab: OwnLab) -> None:
    rollouts = lab.roll([[1, *prompt] for prompt in PROMPTS], seed=1)
    lab.last([one._replace(prompt=one.prompt[1:]) for one in rollouts])
    lab.examine()


def version_label_wrong(lab: OwnLab) -> None:
    """Half of the batch is of old weights; all of it is labelled as new."""
    old = lab.roll(seed=1)[::2]
    lab.learn(2)
    lab.sync()
    rollouts = [*old, *lab.roll(seed=2)[1::2]]
    lab.last(rollouts, versions=[lab.policy.version] * len(rollouts))
    lab.examine()


def router_replay_off(lab: OwnLab) -> None:
    """Nothing is changed: the trainer chooses experts by its own router, in float32."""
    lab.signs.known.clear()
    lab.go_on()


DENSE = (
    Failure("sync_skipped", "8 updates without a sync", sync_skipped),
    Failure("lora_never_sent", "8 updates; the sync sends the weights of before", lora_never_sent),
    Failure("lora_twice", "8 updates; the sync sends the change twice", lora_twice),
    Failure(
        "head_not_synced", "8 updates; lm_head is left out, or is the old one", lambda lab: without(lab, "lm_head")
    ),
    Failure(
        "one_layer_stale", "8 updates; layer 1 is left out, or is the old one", lambda lab: without(lab, "layers.1.")
    ),
    Failure("small_tensors_not_synced", "8 updates; norms are left out, or old", lambda lab: without(lab, "norm")),
    Failure("bias_dropped", "the biases of q, k and v are 0 in the engine", bias_dropped),
    Failure("one_replica_of_the_checkpoint", "half of the batch is the first policy's", one_replica_of_the_checkpoint),
    Failure("engine_of_the_checkpoint", "after 16 updates the engine has the first weights", engine_of_the_checkpoint),
    Failure("shards_swapped", "k and v of layer 1 in each other's place", shards_swapped),
    Failure("block_scales_stale", "layer 1 grows by half, and its block scales stay", block_scales_stale),
    Failure("bf16_into_fp8", "one weight is cast to E4M3 without its scale", bf16_into_fp8),
    Failure("scale_inverted", "the scales of one weight are inverted", scale_inverted),
    Failure("rope_cache_lost", "the table of sines and cosines is 0 in the engine", rope_cache_lost),
    Failure(
        "optimizer_restores_old_weights",
        "after a sync the trainer has the weights of 8 updates before",
        optimizer_restores_old_weights,
    ),
    Failure("kv_scales_unit", "all KV scales are 1.0", kv_scales_unit),
    Failure("kv_scales_stale", "keys and values grow sixfold, the scales do not", kv_scales_stale),
    Failure("kv_scales_zero", "all KV scales are 1e-6", kv_scales_zero),
    Failure(
        "prefix_cache_not_reset",
        "keys and values grow threefold; the sync does not reset the prefix cache",
        prefix_cache_not_reset,
    ),
    Failure("mixed_versions", "8 updates and a sync in the middle of each response", mixed_versions),
    Failure("nan_weights", "a norm is NaN in the engine", nan_weights),
    Failure("trainer_temperature", "sampled at 0.7, scored at 1", trainer_temperature),
    Failure("raw_logprobs", "sampled at 0.7, scored at 0.7; the engine's log-probs are at 1", raw_logprobs),
    Failure("top_p", "top_p 0.8", sampled_with(top_p=0.8)),
    Failure("top_k", "top_k 5", sampled_with(top_k=5)),
    Failure("min_p", "min_p 0.1", sampled_with(min_p=0.1)),
    Failure("repetition_penalty", "repetition_penalty 1.1", sampled_with(repetition_penalty=1.1)),
    Failure("double_bos", "the engine's prompts begin with one more token", double_bos),
    Failure("version_label_wrong", "half of the batch is 2 updates old, and labelled as new", version_label_wrong),
)
MOE = (
    Failure("experts_permuted", "gate and up of one expert in each other's place", experts_permuted),
    Failure("router_replay_off", "a MoE with FP8 weights, as it is", router_replay_off),
)
