"""Boxes of views are checked by brute force; traces of a live vLLM model, by making the copies that they list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EXPERTS, started, weights

from fp8plan.errors import ConfigError
from fp8plan.runtime.apply.weight_sync.manifest import Entry, Manifest, manifest_of
from fp8plan.runtime.apply.worker.facts import digest
from fp8plan.runtime.apply.worker.load_map import LoadMap, box, joined, shared_of, trace
from fp8plan.runtime.apply.worker.prepare import meta_tensors

torch = pytest.importorskip("torch")

# --- box ------------------------------------------------------------------------------------------------------------


def numbered(shape: tuple[int, ...]) -> Any:
    return torch.arange(prod(shape)).view(shape)


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice | int, ...]]:
    """A shape and an index into it: a range, or one place, in every dimension."""
    shape = draw(shapes)
    index: list[slice | int] = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        index.append(draw(st.sampled_from([slice(start, stop), slice(None), start])))
    return shape, tuple(index)


@given(part=parts())
def test_every_part_of_a_tensor_is_a_box(part: tuple[tuple[int, ...], tuple[slice | int, ...]]) -> None:
    shape, index = part
    found = box(numbered(shape)[index], shape)
    bounds = [x.indices(size)[:2] if isinstance(x, slice) else (x, x + 1) for x, size in zip(index, shape, strict=True)]
    assert found == tuple(bounds)


@given(part=parts(), order=st.randoms(use_true_random=False), step=st.integers(1, 3), more=st.booleans())
def test_a_box_holds_what_the_view_holds(part: Any, order: Any, step: int, more: bool) -> None:
    shape, index = part
    view = numbered(shape)[index][..., None] if more else numbered(shape)[index]
    if view.dim():
        view = view.permute(order.sample(range(view.dim()), view.dim()))[::step]
    found = box(view, shape)
    held = None if found is None else numbered(shape)[tuple(slice(*extent) for extent in found)].flatten().tolist()
    assert held in (None, view.flatten().tolist())


@pytest.mark.parametrize(
    "view",
    [
        numbered((4, 6)).t(),
        numbered((4, 6))[::2],
        numbered((4, 6))[:, ::2],
        numbered((4, 6)).view(-1)[3:9],  # over the end of a row
        numbered((4, 6)).view(8, 3)[1:3],
        numbered((4, 1)).expand(4, 6),
    ],
)
def test_what_is_no_box_is_none(view: Any) -> None:
    assert box(view, (4, 6)) is None


# --- boxes that several names write --------------------------------------------------------------------------------

sides = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda side: (side[0], side[0] + side[1]))
written = st.dictionaries(st.tuples(sides, sides), st.lists(st.sampled_from("abcdef"), min_size=1), max_size=5)


def cells(box: Any) -> set[tuple[int, int]]:
    return {(row, column) for row in range(*box[0]) for column in range(*box[1])}


@given(st.lists(written, max_size=3))
def test_names_that_write_to_one_place_are_found(storages: list[dict[Any, list[str]]]) -> None:
    pairs = []
    for boxes in storages:
        for one, names in boxes.items():
            pairs += [(a, b) for other in boxes for a in names for b in boxes[other] if cells(one) & cells(other)]
    assert shared_of(storages) == joined(pairs)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3), max_size=6))
def test_sets_with_a_common_member_are_joined(sets: list[list[str]]) -> None:
    groups = [set(members) for members in sets]
    for _ in groups:
        for one in groups:
            for other in groups:
                if one & other:
                    one |= other
    assert joined(sets) == tuple(sorted({tuple(sorted(group)) for group in groups if len(group) > 1}))


def test_a_scalar_is_one_place() -> None:
    assert shared_of([{(): ["a", "b"]}, {((0, 2),): ["c"], ((2, 4),): ["d"]}]) == (("a", "b"),)


class Odd(torch.nn.Module):
    """A model whose parts, a draft head and a shared expert, are the embedding and another expert by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 4, bias=False)
        self.draft = torch.nn.Linear(8, 4, bias=False)
        self.draft.weight = self.embed.weight
        self.experts = torch.nn.Linear(8, 12, bias=False)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        rows = {"expert.0": 0, "expert.1": 4, "shared_expert": 8, "draft.shared_expert": 8}
        for name, tensor in weights:
            if name in rows:
                self.experts.weight[rows[name] : rows[name] + 4].copy_(tensor)
            else:
                getattr(self, name).weight.copy_(tensor)


@pytest.mark.vllm
def test_one_storage_by_two_names_is_found_whatever_they_are_called() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = Odd()
    record_metadata_for_reloading(model)
    names = ["embed", "draft", "expert.0", "expert.1", "shared_expert", "draft.shared_expert"]
    sent = meta_tensors([Entry(name, "float32", (4, 8)) for name in names])
    found = trace(model, sent)
    assert found.shared == (("draft", "embed"), ("draft.shared_expert", "shared_expert"))
    assert found.covered["experts", "weight"] == 12 * 8
    # A second value in a place does not fill the gap of another.
    gap = trace(model, {name: tensor for name, tensor in sent.items() if name != "expert.1"})
    assert gap.covered["experts", "weight"] == 8 * 8


# --- trace ----------------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    kind: str
    model: Any
    manifest: Manifest
    found: LoadMap


CASES = [("moe", "fp8_block"), ("ragged", "fp8_block"), ("tied", "bf16")]


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    kind, precision = request.param
    manifest = manifest_of(weights(kind, "a")) or ()
    with started(kind, "a", precision) as engine:
        models: list[Any] = []
        engine.llm.apply_model(lambda model: models.append(model))
        yield Subject(kind, models[0], manifest, trace(models[0], meta_tensors(manifest)))


@pytest.mark.vllm
def test_every_parameter_is_covered_once(subject: Subject) -> None:
    found = subject.found
    assert not found.opaque
    assert not found.shared
    tied = {("lm_head", "weight")} if subject.kind == "tied" else set()  # the embedding under another name
    assert {home for home, count in found.covered.items() if count != prod(found.shapes[home])} <= tied
    assert sum(found.covered.values()) == sum(entry.numel for entry in subject.manifest)
    assert found.taken == {entry.name: entry.numel for entry in subject.manifest}


@pytest.mark.vllm
def test_making_the_copies_gives_the_fused_tensors(subject: Subject) -> None:
    sent = weights(subject.kind, "a")
    made = {home: torch.full(shape, torch.nan) for home, shape in subject.found.shapes.items()}
    for name, copies in subject.found.copies.items():
        for copy in copies:
            source = sent[name][tuple(slice(*extent) for extent in copy.source)].float()
            target = made[copy.module, copy.param][tuple(slice(*extent) for extent in copy.target)]
            target.copy_(source.view(target.shape))
    covered = {home: tensor for home, tensor in made.items() if subject.found.covered[home]}
    assert covered
    for home, tensor in covered.items():
        assert torch.equal(tensor, fused(sent, *home).float()), home


def fused(sent: dict[str, Any], module: str, param: str) -> Any:
    """The tensor that vLLM's parameter should hold, put together by hand from what was sent."""
    parent, _, last = module.rpartition(".")
    if last == "qkv_proj":
        return torch.cat([sent[f"{parent}.{part}_proj.weight"] for part in "qkv"])
    if last == "gate_up_proj":
        return torch.cat([sent[f"{parent}.{part}_proj.weight"] for part in ("gate", "up")])
    if param in ("w13_weight", "w2_weight"):
        names = ("gate", "up") if param == "w13_weight" else ("down",)
        layer = module.partition(".experts")[0]
        return torch.stack(
            [torch.cat([sent[f"{layer}.experts.{e}.{n}_proj.weight"] for n in names]) for e in range(EXPERTS)]
        )
    return sent[f"{module}.{param}"]


@pytest.mark.vllm
def test_a_module_is_fed_by_all_its_parts(subject: Subject) -> None:
    assert all(len(modules) == 1 for modules in subject.found.modules.values())
    parts = Counter(module for (module,) in subject.found.modules.values())
    many = {"qkv_proj": 3, "gate_up_proj": 2, "routed_experts": 3 * EXPERTS}
    assert all(count == many.get(module.rpartition(".")[2], 1) for module, count in parts.items())
    assert {module.rpartition(".")[2] for module in parts} & many.keys()


@pytest.mark.vllm
def test_a_trace_leaves_the_model_as_it_was(subject: Subject) -> None:
    def state() -> Any:
        layers = list(subject.model.modules())
        tensors = {name: (id(tensor), digest(tensor.data)) for name, tensor in subject.model.named_parameters()}
        loaders = [getattr(tensor, "weight_loader", None) for tensor in subject.model.parameters()]
        return tensors, loaders, [(id(layer._parameters), id(layer._buffers)) for layer in layers]

    before = state()
    trace(subject.model, meta_tensors(subject.manifest))
    with pytest.raises(ConfigError):
        trace(subject.model, meta_tensors([*subject.manifest, Entry("model.layers.0.x.weight", "bfloat16", (2,))]))
    assert state() == before


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("shape", "says"),
    [((255, 256), r"shape \[255, 256\]"), ((256, 255), r"shape \[256, 255\]"), ((256,), r"shape \[256\]")],
)
def test_a_shape_that_a_loader_does_not_take_is_named(subject: Subject, shape: tuple[int, ...], says: str) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    wrong = [entry._replace(shape=shape) if entry.name == name else entry for entry in subject.manifest]
    with pytest.raises(ConfigError, match=f"vLLM's loader does not take {name} of {says} .*; allowed: the names and"):
        trace(subject.model, meta_tensors(wrong))


@pytest.mark.vllm
def test_what_is_missing_is_not_covered(subject: Subject) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    entry = next(entry for entry in subject.manifest if entry.name == name)
    found = trace(subject.model, meta_tensors([other for other in subject.manifest if other is not entry]))
    home = ("model.layers.1.self_attn.qkv_proj", "weight")
    assert prod(found.shapes[home]) - found.covered[home] == entry.numel
