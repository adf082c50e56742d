"""Matrices of zeros that the checkpoint has otherwise are refused, in every precision for the same reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_models import CALIBRATION, EXPERTS, Outputs, checkpoint, generate, started, weights

from fp8plan.errors import NotServingError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.checkpoint import not_zero
from fp8plan.runtime.apply.weight_sync.manifest import Part
from fp8plan.runtime.apply.worker.prepare import is_matrix

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"  # zero in the checkpoint of some subjects
LOST = "model.layers.0.self_attn.v_proj.weight"


class Subject(NamedTuple):
    kind: str
    engine: RolloutEngine
    before: Outputs

    def sync(self, *zeros: str, **how: Any) -> Any:
        """Send b, with some tensors of zeros."""
        sent = weights(self.kind, "b")
        return self.engine.sync_weights(sent | {name: torch.zeros_like(sent[name]) for name in zeros}, **how)


@pytest.fixture(scope="module", params=["dense bf16", "dense fp8_kv", "dense fp8_block", "moe fp8_block+fp8_kv"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """An engine on a checkpoint in which GATE is zero, if it has one."""
    from safetensors.torch import save_file

    kind, precision = request.param.split()
    folder = Path(shutil.copytree(checkpoint(kind, "a"), tmp_path_factory.mktemp("zeros") / "model"))
    tensors = weights(kind, "a")
    tensors |= {GATE: torch.zeros_like(tensors[GATE])} if GATE in tensors else {}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with started(folder, "", precision) as engine:
        yield Subject(kind, engine, generate(engine))


def matrices(kind: str) -> list[str]:
    return [name for name, tensor in weights(kind, "a").items() if is_matrix(tensor.shape)]


def test_a_lost_matrix_is_named_and_nothing_generates_until_a_whole_sync(subject: Subject) -> None:
    lost = [LOST, "lm_head.weight", "model.embed_tokens.weight"]
    if subject.kind == "moe":
        lost += ["model.layers.1.mlp.gate.weight", f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight"]
    for name in lost:
        with pytest.raises(SyncError, match=rf"all zeros: {name}, and not in the checkpoint; allowed: "):
            subject.sync(name)
        with pytest.raises(NotServingError, match="all zeros"):
            generate(subject.engine)
    assert subject.sync(kv_prompts=CALIBRATION).tensors
    generate(subject.engine)


def test_all_of_them_are_refused_for_the_same_reason_in_every_precision(subject: Subject) -> None:
    every = matrices(subject.kind)
    count = len(every) - (GATE in every)
    for _ in range(2):  # a failed sync is no reference for the next one
        with pytest.raises(SyncError, match=rf"all zeros: .* and {count - 4} more, and not in the checkpoint"):
            subject.sync(*every)
    subject.sync(kv_prompts=CALIBRATION)


def test_what_may_be_zero_is_taken(subject: Subject) -> None:
    """A matrix that training begins with at zero, and any vector."""
    fresh = [GATE] if GATE in matrices(subject.kind) else []
    subject.sync(*fresh, NORM, kv_prompts=CALIBRATION)
    assert subject.engine.serving
    subject.sync(kv_prompts=CALIBRATION)


def test_the_weights_of_before_come_back_with_a_copy() -> None:
    with started("dense", "a", "bf16", rollback="cpu") as engine:
        before = generate(engine)
        tensors = weights("dense", "b")
        with pytest.raises(SyncError, match=r"all zeros: .*; the old weights serve"):
            engine.sync_weights(tensors | {LOST: torch.zeros_like(tensors[LOST])})
        assert generate(engine, cold=True) == before


def test_parts_are_looked_up_in_the_files_that_have_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    half = torch.zeros(4, 6)
    half[:, 3:] = 1
    save_file({"half": half}, tmp_path / "a.safetensors")
    save_file({"zero": torch.zeros(2, 2)}, tmp_path / "b.safetensors")
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    assert not_zero(tmp_path, [Part("half", left), Part("zero"), Part("elsewhere")]) == []
    assert not_zero(tmp_path, [Part("half", left), Part("half", right), Part("half")]) == ["half"]


@pytest.mark.parametrize(
    ("shape", "expected"), [((8,), False), ((8, 1), False), ((1, 1, 9), False), ((2, 2), True), ((4, 1, 3), True)]
)
def test_a_matrix_has_two_sides(shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(shape) == expected
