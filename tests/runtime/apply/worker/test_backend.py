"""The backend in one process, driven by vLLM's own LLM and trainer engine: what is written, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from native_client import (
    InProcess,
    digests_of,
    digests_of_fresh,
    ended,
    engine_of,
    send,
    send_in_parts,
    trainer_of,
    without_cuda,
)
from tiny_models import quantised, weights

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, int]]:
    return digests_of_fresh("dense", "fp8_block")


@pytest.fixture(scope="module")
def trainer(references: Any) -> Iterator[Any]:
    llm = engine_of("dense")
    with without_cuda():
        yield trainer_of(InProcess(llm))
    ended(llm)


def digests(trainer: Any) -> dict[str, int]:
    return digests_of(trainer.client.llm)


def status(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = trainer.client.llm.collective_rpc("fp8plan_status")[0]["ok"]
    return found


def test_an_update_leaves_the_bits_of_a_fresh_engine(trainer: Any, references: Any) -> None:
    assert (status(trainer)["version"], status(trainer)["last_update"]) == (0, None)
    for number, which in enumerate("bab", 1):
        send(trainer, weights("dense", which))
        assert digests(trainer) == references[which]
        found = status(trainer)
        assert (found["version"], found["refusal"]) == (number, None)
        report = found["last_update"]
        assert (report["version"], report["tensors"]) == (number, len(weights("dense", which)))
        assert report["compared"] > 0
        assert report["weight_error"] == pytest.approx(0.0265, abs=0.0015)
        assert report["in_place"] > 20  # the CPU packs embedding and head, which vLLM reloads
        assert set(report["seconds"]) == {"prepare", "load", "finish", "check", "total"}


def test_tensors_one_by_one_and_unpacked(trainer: Any, references: Any) -> None:
    """The first such update waits on the host for its end; the next ones are written as they come."""
    for which in "abab":
        send_in_parts(trainer, [{name: tensor} for name, tensor in weights("dense", which).items()])
        assert digests(trainer) == references[which]
    other = trainer_of(trainer.client, packed=False)
    send(other, weights("dense", "a"))
    assert digests(trainer) == references["a"]
    again = trainer_of(trainer.client)
    trainer.model_update_group, trainer.packed = again.model_update_group, True


def test_master_weights_in_fp32_are_rounded_as_vllm_rounds_them(trainer: Any, references: Any) -> None:
    send(trainer, {name: tensor.float() for name, tensor in weights("dense", "b").items()})
    assert digests(trainer) == references["b"]


def test_a_trainer_may_quantise_by_itself(trainer: Any, references: Any) -> None:
    names = [name for name in weights("dense", "a") if name.endswith("_proj.weight")]
    sent = quantised(weights("dense", "a"), names)
    send(trainer, dict(sorted(sent.items(), key=lambda pair: -pair[1].element_size())))
    assert digests(trainer) == references["a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sent: sent.pop("model.layers.1.self_attn.q_proj.weight"), r"missing: .*qkv_proj"),
        (lambda sent: sent.update(more=sent["model.norm.weight"]), r"vLLM's loader does not take more"),
        (lambda sent: sent.update({"lm_head.weight": sent["lm_head.weight"].half()}), r"lm_head.weight is float16"),
        (
            lambda sent: sent.update({"model.norm.weight": sent["model.norm.weight"][:7].clone()}),
            r"model.norm.weight",
        ),
    ],
    ids=["missing", "unknown", "dtype", "shape"],
)
def test_what_the_model_does_not_take_leaves_the_old_weights(
    trainer: Any, references: Any, change: Any, words: str
) -> None:
    send(trainer, weights("dense", "a"))
    version, sent = status(trainer)["version"], weights("dense", "b")
    change(sent)
    with pytest.raises(ValueError, match=words):
        send(trainer, sent)
    release(trainer)
    assert digests(trainer) == references["a"]
    assert status(trainer)["refusal"] is None
    assert status(trainer)["version"] == version
    send(trainer, weights("dense", "b"))
    assert digests(trainer) == references["b"]


def release(trainer: Any) -> None:
    """End what vLLM's worker still counts as an open update."""
    try:
        trainer.client.finish_weight_update()
    except RuntimeError as error:
        assert "without a matching start" in str(error)  # noqa: PT017


def test_nan_is_named_and_the_weights_must_not_be_used(trainer: Any, references: Any) -> None:
    sent = weights("dense", "b")
    sent["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"not finite: model.layers.2.mlp.down_proj.weight"):
        send(trainer, sent)
    assert "not finite: model.layers.2.mlp.down_proj.weight" in status(trainer)["refusal"]
    release(trainer)
    send(trainer, weights("dense", "b"))
    assert status(trainer)["refusal"] is None
    assert digests(trainer) == references["b"]


def test_nothing_sent_and_a_trainer_that_begins_again(trainer: Any, references: Any) -> None:
    trainer.client.start_weight_update()
    with pytest.raises(ValueError, match="nothing was sent between start and finish"):
        trainer.client.finish_weight_update()
    release(trainer)
    assert status(trainer)["refusal"] is None


def test_parts_that_are_not_those_of_the_update_before(trainer: Any, references: Any) -> None:
    pairs = list(weights("dense", "a").items())
    parts = [dict(pairs[:9]), dict(pairs[9:])]
    send_in_parts(trainer, parts)
    assert digests(trainer) == references["a"]
    with pytest.raises(ValueError, match="was not expected here; allowed: the parts of an update"):
        send_in_parts(trainer, [parts[0], dict(reversed(parts[1].items()))])
    assert "was not expected here" in status(trainer)["refusal"]
    send_in_parts(trainer, [parts[0], dict(reversed(parts[1].items()))])  # it is learned anew
    assert digests(trainer) == references["a"]


class Brief(InProcess):
    """The client of vLLM 0.33's trainer, whose rounds after the first announce nothing if nothing has changed."""

    last: Any = None

    def update_weights(self, update_info: Any) -> None:
        new, self.last = update_info != self.last, update_info
        super().update_weights(update_info if new else update_info | {"names": [], "dtype_names": [], "shapes": []})


def test_from_0_33_on_an_empty_announcement_means_the_one_before(
    trainer: Any, references: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33's engine has this dict, and clears it when a trainer connects."""
    from fp8plan.runtime.apply.worker.nccl_receive import PlainReceiver

    notes: dict[Any, Any] = {}
    monkeypatch.setattr(PlainReceiver, "_last_update_info", notes, raising=False)
    brief = trainer_of(Brief(trainer.client.llm))
    for which in "babab":
        send(brief, weights("dense", which))
        assert digests(trainer) == references[which]
    assert len(notes) == 1
    again = trainer_of(trainer.client)
    assert not notes
    trainer.model_update_group = again.model_update_group


def test_what_vllm_loads_into_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.33 on vLLM notes each target of an update, with what was announced to it."""
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from fp8plan.runtime.apply.worker.arriving import Arriving
    from fp8plan.runtime.apply.worker.nccl_receive import PlainReceiver

    def received(engine: Any, announced: str) -> None:
        assert engine.model is arriving
        notes[engine.model] = announced
        seen.append(dict(notes))

    config = SimpleNamespace(parallel_config=None, model_config=None)
    receiver = PlainReceiver(SimpleNamespace(), config, torch.device("cpu"), torch.nn.Identity())
    notes = receiver._last_update_info = {}
    arriving = Arriving(None)
    seen: list[dict[Any, str]] = []
    monkeypatch.setattr(NCCLWeightTransferEngine, "receive_weights", received)
    receiver.take("as vLLM's receive_weights does", arriving, 60.0)
    assert (len(seen), notes) == (1, {})
    assert isinstance(receiver.model, torch.nn.Identity)


def test_a_draft_models_weights_are_refused_by_vllm(trainer: Any) -> None:
    with pytest.raises(RuntimeError, match="Fp8PlanTransfer does not support draft model"):
        trainer.client.llm.start_draft_weight_update()
