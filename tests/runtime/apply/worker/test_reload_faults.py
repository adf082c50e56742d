"""An exception inside vLLM's own reload, in a trial or in a sync, costs the live model neither tensors nor weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tiny_models import PROMPTS, Outputs, answer, generate, quantised, started, weights

from fp8plan.errors import LostEngineError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.worker.vllm_reload import Places

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

CPU_LINEAR, KEEPS_NONE = "a reload also sets cpu_linear", "vLLM keeps no weight of the checkpoint's shape"
# Experts in BF16 and all linears are packed on a CPU; blockwise FP8 is written in place.
CASES = [("dense", "fp8_block"), ("moe", "bf16")]
Fault = Callable[[pytest.MonkeyPatch, Any, int], None]


class Subject(NamedTuple):
    kind: str
    precision: str
    engine: RolloutEngine
    references: dict[str, Outputs]

    def sync(self, which: str) -> Any:
        return self.engine.sync_weights(weights(self.kind, which))

    def serves(self, which: str) -> bool:
        self.engine.llm.reset_prefix_cache()
        return self.engine.serving and answer(self.engine, PROMPTS[0]) == self.references[which][0]

    def worker(self, method: Any, *arguments: Any) -> Any:
        return self.engine.llm.collective_rpc(method, args=arguments)[0]

    @property
    def model(self) -> Any:
        found: list[Any] = []
        self.engine.llm.apply_model(found.append)
        return found[0]

    def tensors(self) -> dict[str, tuple[int, int]]:
        """name -> which object, and where: what CUDA graphs would have captured."""
        model = self.model
        both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: (id(tensor), tensor.data_ptr()) for name, tensor in both}


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def started_subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    kind, precision = request.param
    with started(kind, "a", precision) as engine:
        references = {"a": generate(engine)}
        engine.sync_weights(weights(kind, "b"))
        references["b"] = generate(engine)
        assert references["a"] != references["b"]
        yield Subject(kind, precision, engine, references)


@pytest.fixture
def subject(started_subject: Subject) -> Subject:
    """An engine that serves the weights a."""
    started_subject.sync("a")
    return started_subject


@pytest.fixture
def settings(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the engine other SyncSettings for one test."""
    state = subject.engine.state
    return lambda **changes: monkeypatch.setattr(state, "settings", replace(state.settings, **changes))


def fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, first: bool) -> None:
    """The call-th call of a function runs out of memory, before or after its work."""
    original, left = getattr(owner, name), [call]

    def failing(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        result = original(*args, **kwargs) if left[0] or not first else None
        if not left[0]:
            raise torch.OutOfMemoryError("no memory left")
        return result

    monkeypatch.setattr(owner, name, failing)


def method_of(model: Any, *ends: str) -> Any:
    """Class of the quantisation method of the first module whose name ends so, and that has one."""
    return next(
        type(layer.quant_method)
        for name, layer in model.named_modules()
        if name.endswith(ends) and getattr(layer, "quant_method", None) is not None
    )


def no_memory(patch: pytest.MonkeyPatch, model: Any, call: int) -> None:
    fails(patch, import_module("vllm.model_executor.model_loader.reload.layerwise"), "materialize_layer", call, True)


def in_processing(patch: pytest.MonkeyPatch, model: Any, call: int) -> None:
    experts = [name for name, _ in model.named_modules() if ".experts" in name]
    method = method_of(model, *(experts or ["mlp.down_proj"]))
    fails(patch, method, "process_weights_after_loading", call, True)


def after_processing(patch: pytest.MonkeyPatch, model: Any, _: int) -> None:
    fails(patch, method_of(model, "embed_tokens"), "process_weights_after_loading", 1, False)


def at_the_end(patch: pytest.MonkeyPatch, model: Any, _: int) -> None:
    fails(patch, type(model.model.layers[0].self_attn.attn), "process_weights_after_loading", 2, True)


FAULTS: list[Fault] = [no_memory, in_processing, after_processing, at_the_end]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_trial_that_fails_leaves_the_old_weights_serving(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    before, digests = subject.tensors(), subject.worker("fp8plan_digests")
    subject.engine.state.prepared.clear()
    with monkeypatch.context() as patch:
        fault(patch, subject.model, 1)
        with pytest.raises(SyncError, match=r"no memory left.*the old weights serve"):
            subject.sync("b")
    assert subject.tensors() == before
    assert subject.worker("fp8plan_digests") == digests
    assert subject.serves("a")
    report = subject.sync("b")
    assert report.in_place > 0
    assert subject.serves("b")
    assert subject.tensors() == before


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("rollback", [None, "cpu"])
def test_a_sync_that_fails_inside_vllms_reload_is_healed_by_the_next(
    subject: Subject, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fault: Fault, rollback: str | None
) -> None:
    settings(in_place=False, rollback=rollback)
    before, digests = subject.tensors(), subject.worker("fp8plan_digests")
    says = "refuses to generate until a complete" if rollback is None else "the old weights serve"
    with monkeypatch.context() as patch:
        fault(patch, subject.model, 3)
        with pytest.raises(SyncError, match=f"no memory left.*{says}"):
            subject.sync("b")
    assert subject.tensors() == before
    if rollback is None:
        assert not subject.engine.serving
        subject.sync("a")
    assert subject.worker("fp8plan_digests") == digests
    assert subject.serves("a")
    for which in "ba":
        subject.sync(which)
        assert subject.serves(which)
    assert subject.tensors() == before


def test_weights_that_cannot_be_put_back_after_a_trial_are_lost(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8plan.runtime.apply.worker.binding import _put_back

    def broken(_: Places) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(Places, "put_back", broken)
    with (
        pytest.raises(LostEngineError, match=r"could not be put back after a trial: no device"),
        _put_back(subject.model, []),
    ):
        pass


@pytest.mark.parametrize("how", ["another parameter", "other data"])
def test_a_tensor_that_was_allocated_again_is_written_where_it_is(subject: Subject, how: str) -> None:
    """The memory of before may be anything by now."""
    name = "model.layers.1.input_layernorm"
    layer, sent = subject.model.get_submodule(name), weights(subject.kind, "b")
    sent[f"{name}.weight"].mul_(1.5)  # fresh checkpoints' norms are all ones
    old, memory = layer.weight, layer.weight.data
    if how == "other data":
        old.data = memory.clone()
    else:
        layer.weight = torch.nn.Parameter(memory.clone(), requires_grad=False)
        layer.weight.__dict__.update(old.__dict__)  # its loader
    try:
        assert subject.engine.sync_weights(sent).compared > 0
        assert torch.equal(layer.weight, sent[f"{name}.weight"])
        assert memory.eq(1).all()
    finally:
        layer.weight, old.data = old, memory
    subject.sync("a")
    assert subject.serves("a")


def test_every_shape_is_tried_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8plan.runtime.apply.worker import binding as shortcut

    tried: list[str] = []
    original = shortcut._why_not

    def noted(worker: Any, layers: Any, module: str, *rest: Any) -> Any:
        tried.append(module)
        return original(worker, layers, module, *rest)

    monkeypatch.setattr(shortcut, "_why_not", noted)
    subject.engine.state.prepared.clear()
    subject.sync("b")
    layers = dict(subject.model.named_modules())
    found = [(shortcut.kind(layers[name]), shortcut._shapes(layers[name])) for name in tried]
    assert len(set(found)) == len(found)
    if subject.precision == "fp8_block":  # one class, one kernel, other shapes
        assert {"self_attn.o_proj", "mlp.down_proj"} <= {name.split(".", 3)[-1] for name in tried}


def test_every_module_that_vllm_loads_is_explained(subject: Subject, settings: Callable[..., None]) -> None:
    counts = subject.engine.facts["layers"]
    report = subject.sync("b")
    assert report.reloaded == sum(counts[kind] for kind in report.why_reloaded) > 0
    linears = [why for kind, why in report.why_reloaded.items() if "UnquantizedLinearMethod" in kind]
    embeddings = [why for kind, why in report.why_reloaded.items() if "UnquantizedEmbeddingMethod" in kind]
    assert set(linears) == ({KEEPS_NONE} if subject.precision == "bf16" else set())
    assert embeddings == [CPU_LINEAR] * 2
    settings(in_place=False)
    report = subject.sync("a")
    assert report.reloaded == sum(counts[kind] for kind in report.why_reloaded)
    assert set(report.why_reloaded.values()) == {"in_place=False"}


@pytest.mark.parametrize("weights_in", ["bf16", "fp8_block"])
def test_a_kernel_that_swaps_halves_of_its_rows_is_not_written_in_place(
    subject: Subject, settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch, weights_in: str
) -> None:
    """As FlashInfer's kernels of experts do."""
    if subject.precision != "fp8_block":
        pytest.skip("has no FP8 to be written")
    method = method_of(subject.model, "mlp.gate_up_proj")
    original = method.process_weights_after_loading

    def swapped(self: Any, layer: Any) -> None:
        original(self, layer)
        if len(getattr(layer, "output_sizes", ())) == 2:
            for tensor in (layer.weight, layer.weight_scale_inv):
                tensor.data.copy_(tensor.data.roll(tensor.shape[0] // 2, 0))

    settings(weights_in=weights_in)
    monkeypatch.setattr(subject.engine.state, "expected", None)
    subject.engine.state.prepared.clear()
    sent = weights(subject.kind, "b")
    sent = quantised(sent, [name for name in sent if "proj" in name]) if weights_in == "fp8_block" else sent
    with monkeypatch.context() as patch:
        patch.setattr(method, "process_weights_after_loading", swapped)
        if weights_in == "fp8_block":
            with pytest.raises(SyncError, match=r"vLLM lays out MergedColumnParallelLinear.*in another way"):
                subject.engine.sync_weights(sent)
        else:
            report = subject.engine.sync_weights(sent)
            (reason,) = (why for kind, why in report.why_reloaded.items() if kind.startswith("MergedColumn"))
            assert reason.startswith("vLLM's kernel lays model.layers.")
    subject.engine.state.prepared.clear()
    subject.engine.sync_weights(sent)
    assert subject.serves("b")


# --- the KV cache ----------------------------------------------------------------------------------------------------


def test_nan_in_the_kv_cache_is_zeroed(subject: Subject) -> None:
    caches: list[Any] = []

    def poison(worker: Any) -> None:
        caches.extend(worker.model_runner.kv_caches)
        for cache in caches:
            cache.fill_(float("nan"))

    subject.worker(poison)
    assert subject.worker("fp8plan_zero_kv") == {"ok": sum(cache.nbytes for cache in caches)}
    assert caches
    assert not any(cache.count_nonzero() for cache in caches)
    assert subject.serves("a")


def test_caches_of_any_dtype_layout_and_nesting_are_zeroed() -> None:
    from fp8plan.runtime.apply.worker.facts import zero_kv

    shared = torch.full((4, 64), 0x7F, dtype=torch.uint8)  # NaN in E4M3; each layer's view leaves padding between
    views = [shared[:, :16].view(torch.float8_e4m3fn), shared[:, 32:48].view(torch.float8_e4m3fn).t()]
    states = [torch.full((3, 5), float("nan"), dtype=torch.bfloat16), (torch.ones(7), None, torch.empty(0))]
    worker = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[*views, states, None]))
    assert zero_kv(worker) == 4 * 64 + 3 * 5 * 2 + 7 * 4
    assert not any(tensor.any() for tensor in (shared, states[0], states[1][0]))


# --- without an engine -----------------------------------------------------------------------------------------------


def test_experts_own_scales_come_back_with_the_weights() -> None:
    """After a reload their kernel holds copies of the live scales."""
    from fp8plan.runtime.apply.worker.live_weights import LiveWeights, _Running
    from fp8plan.runtime.apply.worker.vllm_reload import Snapshot

    layer = torch.nn.Module()
    layer.w13_weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    config = SimpleNamespace(w1_scale=torch.ones(2, 2), w2_scale=None)
    layer.quant_method = SimpleNamespace(moe_quant_config=config)
    model = torch.nn.Sequential(layer)
    live = LiveWeights(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    live._running = _Running(None, None, 0, Snapshot(model, "cpu"), None, {}, 0)  # type: ignore[arg-type]
    layer.w13_weight_scale_inv.data.fill_(3.0)
    config.w1_scale.fill_(3.0)
    assert live.abort("it failed")
    assert torch.equal(config.w1_scale, layer.w13_weight_scale_inv)
    assert config.w1_scale.eq(1).all()


def test_modules_get_the_objects_back_that_they_had() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    linear, norm = model
    linear.quant_method = method = SimpleNamespace(moe_kernel="old")
    weight, mean, places = linear.weight, norm.running_mean, Places(model)
    del linear.weight, norm.running_mean
    linear.register_buffer("weight", torch.zeros(1), persistent=False)
    linear.packed, method.moe_kernel, method.more = torch.zeros(1), None, 1
    assert set(places.changed(linear, method)) == {"packed", "moe_kernel", "more"}
    places.put_back()
    assert (linear.weight is weight, norm.running_mean is mean) == (True, True)
    assert (linear._buffers, linear._non_persistent_buffers_set) == ({}, set())
    assert vars(method) == {"moe_kernel": "old"}
    assert not hasattr(linear, "packed")
