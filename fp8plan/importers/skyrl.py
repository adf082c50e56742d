"""The training batches that SkyRL dumps with `trainer.dump_data_batch=true`:
EXPORT_PATH/dumped_data/global_step_STEP_training_input.pkl.

Read in SkyRL 0.3.0 (commit a9564572e, August 2026): `dump_data` and `convert_to_training_input` of
`skyrl/train/trainer.py`, `skyrl/backends/skyrl_train/training_batch.py`. The pickle has tensors as bytes: `sequences`
and `attention_mask` [batch, prompt + response], `response_mask` and `loss_mask` [batch, response], all padded on the
left. So lengths are exact and no tokenizer is needed. Rows that pad the batch are at its end. A trajectory of several
turns is one sequence, tool output included, or with `step_wise_trajectories` one sequence per turn. The loss mask is 1
for generated tokens and 0 for tool output.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Masked, Measured, Note, Source, name_of, without_waits
from fp8plan.importers.turn_boundaries import masked

WRITER = "skyrl.backends.skyrl_train.training_batch"


def requests(file: Path, note: Note) -> Iterator[Measured]:
    """Read the requests of a file. Raises ConfigError for one that is not SkyRL's."""
    try:
        with file.open("rb") as content:
            state = _Reader(content).load()
        batch, padding = state["batch_dict"], int((state["metadata"] or {}).get("pad_size", 0))
        tokens, mask, responses = (_array(batch[name]) for name in ("sequences", "attention_mask", "response_mask"))
        counts = [int(row.sum()) for row in responses[: len(tokens) - padding]]
        losses = batch.get("loss_mask")
        readable = isinstance(losses, dict) and losses.get("format", "numpy") == "numpy"
        rows = zip(_array(losses), responses, strict=True) if readable else []
        masks = [masked(loss[real != 0] != 0) for loss, real in rows]
    except Exception as error:  # a damaged pickle raises anything
        raise ConfigError(f"cannot read {file} as a SkyRL training batch: {type(error).__name__}: {error}") from None
    singles = [Masked(0, without_waits([(response, 0)])) for response in counts]
    # A response without a mask was taken out of the loss, as overlong ones are.
    known = masks[: len(singles)] or [None] * len(singles)
    several = any(by_mask not in (None, single) for by_mask, single in zip(known, singles, strict=True))
    for row, (single, by_mask) in enumerate(zip(singles, known, strict=True)):
        real = tokens[row][mask[row] == 1]
        prompt = real[: len(real) - counts[row]]
        before, turns = by_mask or single
        unclear = not readable or (several and by_mask is None and counts[row] > 0)
        yield Measured(name_of(prompt.tobytes()), len(prompt) + before, turns, unclear)


class _State(dict[str, Any]):
    """A stand-in for any class of the pickle. No code of the class runs, and its content is skipped."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass


def _rebuilt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
    """SkyRL's `_rebuild_tensor_batch`, which takes the class and the state."""
    return state


class _Reader(pickle.Unpickler):
    """A reader of the data of a pickle that runs none of its code. SkyRL need not be installed."""

    def find_class(self, module: str, name: str) -> Any:
        return _rebuilt if (module, name) == (WRITER, "_rebuild_tensor_batch") else _State


def _array(tensor: dict[str, Any]) -> NDArray[Any]:
    return np.frombuffer(tensor["data"], np.dtype(tensor["dtype"])).reshape(tensor["shape"])


SOURCE = Source(
    re.compile(r"global_step_(\d+)_training_input\.pkl"),
    "trainer.dump_data_batch=true, with trainer.export_path",
    requests,
    folder="dumped_data",
    of_text=False,
    seconds="timing/generate",
)  # lengths are exact: there is no mean to compare
