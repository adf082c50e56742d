"""Logs as the trainers themselves write them.

verl: its own `_write_generations`, taken out of the installed source, as the modules around it import a whole trainer.
SkyRL: not installed here; `skyrl_dump` writes what its `TensorBatch.__reduce__` and `dump_data` do (read in commit
a9564572e), under the class's own name.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

VERL_WRITERS = ("trainer/ppo/ray_trainer.py", "trainer/ppo/v1/trainer_base.py")
TEXTS = (["w1 w2 w3", "w4 w5", "w1 w2 w3", "w4 w5"], ["w9 w9", "w9", "w8 w8 w8 w8", ""])
SKYRL_MODULE = "skyrl.backends.skyrl_train.training_batch"


def verl_writer(module: str) -> Callable[..., None]:
    """verl's `_write_generations(inputs, outputs, gts, scores, infos, folder, step)` of one of its trainers."""
    package = find_spec("verl")
    assert package is not None
    assert package.submodule_search_locations is not None
    source = Path(package.submodule_search_locations[0], module).read_text()
    (function,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    )
    function.decorator_list = []
    names: dict[str, Any] = {"os": os, "json": json, "np": np}
    exec(compile(ast.Module([function], []), module, "exec"), names)
    writer: Callable[..., None] = names["_write_generations"]
    return writer


def verl_dump(folder: Path, steps: int = 2, module: str = VERL_WRITERS[0]) -> Path:
    """Have verl write TEXTS, the prompts and responses of a rollout, for each step. Returns the folder."""
    for step in range(1, steps + 1):
        infos = {"acc": [True, False, True, False], "uid": ["a", "b", "a", "b"], "of the batch": [1]}
        with redirect_stdout(StringIO()):  # it prints the name of the file
            verl_writer(module)(*TEXTS, ["7"] * 4, [1.0] * 4, infos, str(folder), step)
    return folder


@contextmanager
def _module() -> Iterator[ModuleType]:
    """SkyRL's module while a pickle is written; it is gone when the pickle is read."""
    made: dict[str, ModuleType] = {}
    parts = SKYRL_MODULE.split(".")
    for end in range(1, len(parts) + 1):
        made[".".join(parts[:end])] = ModuleType(".".join(parts[:end]))
    sys.modules.update(made)
    try:
        yield made[SKYRL_MODULE]
    finally:
        for name in made:
            del sys.modules[name]


def skyrl_dump(file: Path, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a TrainingInputBatch as `TensorBatch.save` does."""
    with _module() as module:

        def _rebuild_tensor_batch(cls: Any, state: Any) -> Any:
            raise AssertionError("nothing of SkyRL is run when its dump is read")

        class TrainingInputBatch(dict[str, Any]):
            def __reduce__(self) -> Any:
                state = {
                    "batch_dict": {name: _serialised(x) for name, x in self.items()},
                    "batch_size": len(self["sequences"]),
                    "device": torch.device("cpu"),
                    "metadata": metadata,
                }
                return _rebuild_tensor_batch, (type(self), state)

        for thing in (_rebuild_tensor_batch, TrainingInputBatch):
            thing.__module__, thing.__qualname__ = SKYRL_MODULE, thing.__name__
            setattr(module, thing.__name__, thing)
        with file.open("wb") as content:
            pickle.dump(TrainingInputBatch(tensors), content)


def _serialised(tensor: Any) -> Any:
    if tensor is None:
        return None
    if tensor.dtype == torch.bfloat16:  # numpy has none: SkyRL saves it with torch
        return {"format": "torch", "data": b"not read"}
    array = tensor.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def skyrl_batch(requests: list[tuple[list[int], list[int]]], padding: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, metadata) of (prompt tokens, response tokens) pairs, laid out as convert_to_training_input does: padded
    on the left, with `padding` copies of the first row at the end."""
    rows = requests + requests[:1] * padding
    width, longest = max(len(p) + len(r) for p, r in rows), max(len(r) for _, r in rows)
    tensors = {
        "sequences": torch.tensor([[0] * (width - len(p) - len(r)) + p + r for p, r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(p) - len(r)) + [1] * len(p + r) for p, r in rows]),
        "response_mask": torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for _, r in rows]),
        "loss_mask": torch.ones(len(rows), longest),
        "values": None,
        "advantages": torch.zeros(len(rows), longest, dtype=torch.bfloat16),
    }
    metadata = {"pad_size": padding, "policy_prompt_boundaries": [(0, 2), (2, 4)], "avg_response_length": np.float64(3)}
    return tensors, metadata
