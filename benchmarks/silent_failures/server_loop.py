"""A client of `vllm serve` with fp8plan's plugin: rollouts and the doctor over HTTP, updates by vLLM's lifecycle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import requests
import torch
from native_client import send, trainer_of, without_cuda
from vllm_server import BLOCK_FP8, FP8_KV, Server, line_of, serving

from .lab import PROMPTS, Failure, Lab, cut, lora_twice
from .own_loop import RESPONSE, UPDATES
from .policy import Policy, Rollout, checkpoint

# What a request that wants its sampling known says; generation_config.json of this server has others.
NEUTRAL: Final = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 1.0}
DEFAULTS: Final = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "temperature": 0.7, "do_sample": True}


class ServeLab(Lab):
    """The lab with a server. The Monitor has no engine to ask; the doctor gets the server's address and prompts."""

    def __init__(self, server: Server, trainer: Any) -> None:
        self.server, self.trainer = server, trainer
        super().__init__(Policy("dense"), server.url, self._rolled)

    def _rolled(self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Rollout]:
        body = {"model": self.server.model, "prompt": [list(prompt) for prompt in prompts], "max_tokens": RESPONSE}
        body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True, "seed": None} | sampling
        body.pop("seed")
        answer = requests.post(f"{self.server.url}/v1/completions", json=body, timeout=300)
        answer.raise_for_status()
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return cut(
            Rollout(list(prompt), choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for prompt, choice in zip(prompts, choices, strict=True)
        )

    def roll(self, prompts: Sequence[Sequence[int]] | None = None, **sampling: Any) -> list[Rollout]:
        return super().roll(prompts, **(NEUTRAL | sampling))

    def sync(self, tensors: Any = None) -> None:
        send(self.trainer, self.policy.tensors() if tensors is None else tensors)

    def learn(self, updates: int = UPDATES) -> None:
        self.policy.learn(self.healthy.rollouts, updates)

    def calm(self) -> None:
        """See what a healthy run says.

        The doctor's own requests leave top_p and penalties unset, and vLLM fills them from generation_config.json. So a
        decode differs from a prefill by a k3 of 0.03, the limit, and a healthy server has that fault by chance.
        """
        super().calm()
        self.signs.known.add(("doctor", "decode_differs"))

    def examine(self) -> None:
        self.doctor(prompts=PROMPTS[:8])

    def go_on(self, **sampling: Any) -> None:
        self.last(self.roll(**sampling), self.roll(**sampling), sampling=sampling or None)
        self.examine()

    def restore(self) -> None:
        super().restore()
        self.sync()

    def attempt(self, act: Callable[[], Any]) -> None:
        try:
            super().attempt(act)
        except requests.HTTPError as error:
            self.signs.add("refusal", type(error).__name__, error.response.text)

    def scales(self) -> dict[str, list[float]]:
        """The KV scales of each layer: q, k, v."""
        return {
            layer: [parts[part] for part in "qkv"] for layer, parts in self.server.rpc("fp8plan_kv_scales")[0].items()
        }

    def put_scales(self, scales: dict[str, list[float]]) -> None:
        self.server.rpc("fp8plan_set_kv_scales", scales)


@contextmanager
def lab() -> Iterator[ServeLab]:
    """A lab on a fresh server, calm."""
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    path = checkpoint("dense")
    (path / "generation_config.json").write_text(json.dumps(DEFAULTS))
    with serving(line_of(path, *BLOCK_FP8, *FP8_KV)) as server, without_cuda():
        made = ServeLab(server, trainer_of(HTTPVLLMWeightSyncClient(server.url, timeout=120)))
        made.calm()
        yield made


# The failures


def sync_skipped(lab: ServeLab) -> None:
    lab.learn()
    lab.go_on()


def engine_of_the_checkpoint(lab: ServeLab) -> None:
    lab.learn(2 * UPDATES)
    lab.sync()
    lab.sync(lab.first)
    lab.go_on()


def without(part: str) -> Callable[[ServeLab], None]:
    """An update without some tensors, and one that keeps the old ones."""

    def inject(lab: ServeLab) -> None:
        old = lab.policy.tensors()
        lab.learn()
        new = lab.policy.tensors()
        kept = {name: old[name] if part in name else tensor for name, tensor in new.items()}
        lab.sync(kept)
        lab.go_on()

    return inject


def shards_swapped(lab: ServeLab) -> None:
    k, v, sent = "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj", lab.policy.tensors()
    swapped = {
        **{n: sent[n.replace(k, v)] for n in sent if k in n},
        **{n: sent[n.replace(v, k)] for n in sent if v in n},
    }
    lab.sync(sent | swapped)
    lab.go_on()


def nan_weights(lab: ServeLab) -> None:
    spoilt = lab.policy.tensors()
    spoilt["model.layers.1.self_attn.q_norm.weight"].fill_(torch.nan)
    lab.attempt(lambda: lab.sync(spoilt))
    lab.attempt(lab.go_on)


def kv_scales_unit(lab: ServeLab) -> None:
    lab.put_scales({layer: [1.0] * 3 for layer in lab.scales()})
    lab.go_on()


def kv_scales_stale(lab: ServeLab) -> None:
    kept = lab.scales()
    lab.grow(6)
    lab.sync()
    lab.put_scales(kept)
    lab.go_on()


def generation_config(lab: ServeLab) -> None:
    """Requests that leave their sampling unset, and a trainer that believes them neutral."""
    lab.last(lab._rolled(PROMPTS, {}))
    lab.examine()


def trainer_temperature(lab: ServeLab) -> None:
    lab.last(lab.roll(temperature=0.7))
    lab.doctor(prompts=PROMPTS[:8], temperature=0.7)


def sampled_with(**sampling: Any) -> Callable[[ServeLab], None]:
    return lambda lab: lab.go_on(**sampling)


def double_bos(lab: ServeLab) -> None:
    rollouts = lab.roll([[1, *prompt] for prompt in PROMPTS])
    lab.last([one._replace(prompt=one.prompt[1:]) for one in rollouts])
    lab.examine()


def responses_reordered(lab: ServeLab) -> None:
    """Each answer is taken for the next prompt's: its tokens and log-probs are its own."""
    rollouts = lab.roll()
    turned = [*rollouts[1:], rollouts[0]]
    taken = [one._replace(prompt=other.prompt) for one, other in zip(turned, rollouts, strict=True)]
    lab.last(taken)
    lab.examine()


FAILURES: Final = (
    Failure("sync_skipped", "8 updates without an update of the server", sync_skipped),
    Failure("engine_of_the_checkpoint", "16 updates; the server has the first weights", engine_of_the_checkpoint),
    Failure("lora_twice", "8 updates; the server gets the change twice", lora_twice),
    Failure("head_not_synced", "8 updates; the server gets the old lm_head", without("lm_head")),
    Failure("one_layer_stale", "8 updates; the server gets the old layer 1", without("layers.1.")),
    Failure("shards_swapped", "k and v of layer 1 in each other's place", shards_swapped),
    Failure("nan_weights", "a norm is sent as NaN", nan_weights),
    Failure("kv_scales_unit", "all KV scales are 1.0", kv_scales_unit),
    Failure("kv_scales_stale", "keys and values grow sixfold, the scales do not", kv_scales_stale),
    Failure(
        "generation_config", "requests leave sampling unset; generation_config.json has top_p 0.8", generation_config
    ),
    Failure("trainer_temperature", "sampled at 0.7, scored at 1", trainer_temperature),
    Failure("top_p", "top_p 0.8", sampled_with(top_p=0.8)),
    Failure("top_k", "top_k 5", sampled_with(top_k=5)),
    Failure("min_p", "min_p 0.1", sampled_with(min_p=0.1)),
    Failure("repetition_penalty", "repetition_penalty 1.1", sampled_with(repetition_penalty=1.1)),
    Failure("double_bos", "the engine's prompts begin with one more token", double_bos),
    Failure("responses_reordered", "each answer is taken for the prompt before", responses_reordered),
)
