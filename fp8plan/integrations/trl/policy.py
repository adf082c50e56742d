"""The policy's tensors as an engine takes them: under the checkpoint's names, in its dtypes, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from trl.generation.vllm_generation import VLLMGeneration

from fp8plan.errors import ConfigError
from fp8plan.runtime.weight_sync.manifest import Manifest, dtype_named
from fp8plan.runtime.weight_sync.state import SyncReport

Sent = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor


class PolicyTensors(VLLMGeneration):
    """TRL's VLLMGeneration, which knows how to gather a policy, with what an engine needs beside.

    before_sync: called before each sync: what a verdict advises is done or said there

    report: of the last sync; None before the first
    """

    _sent: Sent | None = None

    def __init__(self, *args: Any, before_sync: Callable[[], None], **kwargs: Any) -> None:
        self._before_sync = before_sync
        self.report: SyncReport | None = None
        super().__init__(*args, **kwargs)

    @property
    def expected(self) -> Manifest | None:
        """The tensors of the checkpoint; None where they are not known. A colocated engine and a server each know."""
        raise NotImplementedError

    def announced(self) -> Sent:
        """The tensors that will be sent, which stay the same. Gathering them takes all processes."""
        if self._sent is None:
            dtypes = self._checkpoint_dtypes()
            self._sent = [(name, dtypes.get(name, "bfloat16"), list(x.shape)) for name, x in self.tensors()]
        return self._sent

    def _checkpoint_dtypes(self) -> dict[str, str]:
        """The dtype of each of the checkpoint's tensors where it mixes BF16 with others (a router's bias in FP32)."""
        dtypes = {entry.name: entry.dtype for entry in self.expected or ()}
        return dtypes if "bfloat16" in dtypes.values() else {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors under the checkpoint's names: parameters, and buffers that the checkpoint has.

        Transformers holds all experts of a layer in one tensor, and renames some parts; that is undone here. Raises
        ConfigError for a quantised policy.
        """
        from transformers.core_model_loading import revert_weight_conversion

        policy = self.accelerator.unwrap_model(self.model)
        known = {entry.name for entry in self.expected or ()}
        buffers = ((name, x) for name, x in policy.named_buffers() if name in known)
        for name, tensor in chain(self._iter_named_params(), buffers):
            if not tensor.is_floating_point():
                raise ConfigError(
                    f"{name} of the policy is {str(tensor.dtype).removeprefix('torch.')}; allowed with a plan: a "
                    "policy in BF16 or FP32 (leave quantization_config out), or plan=None"
                )
            if known and name not in known:
                yield from revert_weight_conversion(policy, {name: tensor}).items()
            else:
                yield name, tensor

    def copies(self, sent: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same as they are sent. Each is a copy, as TRL shards or unmerges one once it has handed out the next."""
        dtypes = {name: dtype_named(dtype) for name, dtype, _ in sent}
        for name, tensor in self.tensors():
            yield name, tensor.detach().to(dtypes[name], copy=True)
