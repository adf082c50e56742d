"""vLLM's own layerwise reload, with the changes around it that runtime.apply.vllm_versions.PATCHES lists."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp8plan.errors import ConfigError, some

if TYPE_CHECKING:
    import torch


class Places:
    """The tensor and attribute objects of a live model's modules and quantisation methods, to be put back later.

    Values are not copied. A reload that fails in the middle leaves modules with tensors that no CUDA graph has
    captured, and vLLM forgets the captured ones: `_layerwise_process` raises before it puts them back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        layers = list(model.modules())
        methods = [method for layer in layers if (method := getattr(layer, "quant_method", None)) is not None]
        self._owners: list[tuple[Any, dict[str, Any]]] = [(owner, dict(vars(owner))) for owner in (*layers, *methods)]
        # vars hold the containers of a module's tensors, and a reload changes their content.
        self._containers: list[tuple[Any, Any]] = [
            (container, container.copy())
            for layer in layers
            for container in (layer._parameters, layer._buffers, layer._non_persistent_buffers_set)
        ]

    def put_back(self) -> None:
        """Give every module back the very objects that it had."""
        for owner, attributes in self._owners:
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._containers:
            container.clear()
            container.update(content)

    def changed(self, *owners: Any) -> list[str]:
        """List the attributes of modules or methods that have changed."""
        return [
            name
            for owner, before in self._owners
            if any(owner is other for other in owners)
            for name, value in vars(owner).items()
            if value is not before.get(name) and not _same(value, before.get(name))
        ]


def _same(value: Any, before: Any) -> bool:
    return type(value) is type(before) and isinstance(value, (bool, int, float, str, list, tuple)) and value == before


class Snapshot:
    """A copy of a live model to return to. On "cpu" it crosses the bus; on "cuda" the weights take twice the memory."""

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        once = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self._tensors = [(tensor, tensor.detach().to(device, copy=True)) for tensor in once.values()]
        self._places = Places(model)  # on a CPU, attributes of a layer hold its packed weights

    def restore(self) -> None:
        """Put back the tensors, which CUDA graphs have captured, and their values; `refresh` must follow."""
        self._places.put_back()
        for tensor, value in self._tensors:
            tensor.data.copy_(value)


class NativeReload:
    """One reload of some modules of a worker's model: open, load chunks, close. Only complete modules make sense.

    An exception in any of them ends the reload. The tensors that CUDA graphs have captured are put back, with new
    values where vLLM had finished, and another reload may be opened.

    past: (module, param) that model code writes itself, past the loader that vLLM's reload listens to (gpt-oss). vLLM
          alone would silently keep the old weights; here these writes are handed to the reload
    """

    def __init__(self, worker: Any, past: Collection[tuple[str, str]] = ()) -> None:
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._past = past
        self._loaders: list[tuple[Any, Any]] = []
        self._kernels: list[tuple[Any, Any]] = []
        self._before: Places | None = None

    def open(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._before = Places(self._model)
        with self._guarded():
            self._kernels = _taken_kernels(self._model)
            self._take_loaders()
            initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a chunk. Raises ConfigError after the end, when vLLM's loaders would write to the live tensors."""
        with self._guarded(), _redirected(self._parameters_past()):
            self._model.load_weights(tensors)

    def close(self, modules: Iterable[str] = ()) -> None:
        """End the reload. Modules that got nothing keep their weights; incomplete ones hold garbage until the next.

        modules: those that must have got weights. Raises ConfigError if vLLM has seen none for one of them
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._guarded():
            self._refuse_unloaded(modules)
            finalize_layerwise_reload(self._model, self._worker.model_runner.model_config)
        for method, kernel in self._kernels:
            method.moe_kernel = kernel if method.moe_kernel is None else method.moe_kernel  # got no weights
        self._before = None
        self._give_loaders_back()
        refresh(self._model)

    def abandon(self) -> None:
        """End the reload as an exception does. Does nothing once it has ended."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        if self._before is None:
            return
        self._before.put_back()
        self._before = None
        for layer in self._model.modules():
            get_layerwise_info(layer).reset()
        self._give_loaders_back()

    def _take_loaders(self) -> None:
        """Give vLLM's plain loader to the parameters that model code writes whole."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module, param in self._past:
            twin = get_layerwise_info(self._model.get_submodule(module)).restore_metadata[0].get(param)
            if twin is not None:  # none for those that vLLM leaves live (SKIP_TENSORS), which are written to directly
                self._loaders.append((twin, vars(twin).pop("weight_loader", None)))

    def _give_loaders_back(self) -> None:
        for twin, loader in self._loaders:
            if loader is not None:
                twin.weight_loader = loader
        self._loaders = []

    def _parameters_past(self) -> list[torch.Tensor]:
        past = (self._model.get_submodule(module)._parameters.get(param) for module, param in self._past)
        return [tensor for tensor in past if tensor is not None and tensor.is_meta]

    def _refuse_unloaded(self, modules: Iterable[str]) -> None:
        """Raises ConfigError for a module whose new weights vLLM's reload has not seen. It would keep the old ones."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        infos = ((name, get_layerwise_info(self._model.get_submodule(name))) for name in modules)
        if lost := [name for name, info in infos if info.can_load() and info.load_numel <= 0]:
            raise ConfigError(f"vLLM's reload did not load {some(lost)}")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        if self._before is None:
            raise ConfigError("vLLM's reload has ended; allowed: another sync")
        # vLLM would warn of every module that gets nothing, and of parameters that it knows under other names.
        # With another level, Python would forget what it knows of every logger: 0.5 ms a message.
        log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        log.addFilter(_is_error)
        try:
            with set_current_vllm_config(self._worker.vllm_config):
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            log.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _redirected(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Turn each copy to one of these meta parameters into a call of its loader."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    waiting = {parameter.untyped_storage()._cdata: parameter for parameter in parameters}
    if not waiting:
        yield
        return

    class Redirect(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            parameter: Any = None
            if func is torch.ops.aten.copy_.default and args[0].is_meta:
                parameter = waiting.get(args[0].untyped_storage()._cdata)
            if parameter is None:
                return func(*args, **(kwargs or {}))
            parameter.weight_loader(parameter, args[1])
            return args[0]

    mode: Any = Redirect  # torch's own __init__ has no annotations
    with mode():
        yield


def refresh_expert_scales(model: torch.nn.Module) -> None:
    """Copy the live scales of experts, which CUDA graphs have captured, to those that a reload gave their kernels."""
    for layer in model.modules():
        config = getattr(getattr(layer, "quant_method", None), "moe_quant_config", None)
        for part, name in (("w1_scale", "w13_weight_scale_inv"), ("w2_scale", "w2_weight_scale_inv")):
            own, live = getattr(config, part, None), getattr(layer, name, None)
            if own is not None and live is not None and own.data_ptr() != live.data_ptr():
                own.copy_(live)


def _taken_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Take the kernels away from BF16 experts on a CPU, which are packed only while they have none.

    Returns their methods, each with its kernel.
    """
    kernels = []
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and _on_cpu(layer):
            kernels.append((method, method.moe_kernel))
            method.moe_kernel = None
    return kernels


def refresh(model: torch.nn.Module) -> None:
    """Refresh vLLM's copies of live tensors: scales of experts, and on a CPU Mamba 2's convolutions and a tied head."""
    refresh_expert_scales(model)
    for layer in model.modules():
        copied = getattr(layer, "conv_weights", None)  # the mixer reads these; the packed weights are elsewhere
        new = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if copied is not None and new is not None:
            copied.copy_(new)
    head = getattr(model, "lm_head", None)
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is None or embedding is None or not hasattr(head, "quant_method") or not _on_cpu(head):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():  # the head keeps a packed copy, which no loader refreshes
        head.quant_method.process_weights_after_loading(head)


def _on_cpu(layer: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in layer.parameters())
