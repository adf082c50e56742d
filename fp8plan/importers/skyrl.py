"""The training batches that SkyRL dumps with `trainer.dump_data_batch=true`:
EXPORT_PATH/dumped_data/global_step_STEP_training_input.pkl.

Read in SkyRL 0.3.0 (commit a9564572e, August 2026): `dump_data` and `convert_to_training_input` of
`skyrl/train/trainer.py`, `skyrl/backends/skyrl_train/training_batch.py`. The pickle holds tensors as bytes: `sequences`
and `attention_mask` [batch, prompt + response], `response_mask` and `loss_mask` [batch, response], all padded on the
left. So lengths are exact and no tokenizer is needed. Rows that pad the batch are at its end. A trajectory of several
turns is one sequence, tool output included, or with `step_wise_trajectories` one sequence per turn.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Counted, Source, counted

NAME = re.compile(r"global_step_(\d+)_training_input\.pkl")
WRITER = "skyrl.backends.skyrl_train.training_batch"


def rollouts(folder: Path) -> list[Counted]:
    """Read the rollouts of SkyRL's export folder, or of its folder `dumped_data`, by step.

    Raises ConfigError for a folder without any, and for a file that is not one of SkyRL's.
    """
    inside = folder / "dumped_data"
    paths = (inside if inside.is_dir() else folder).glob("*.pkl")
    files = {int(found[1]): path for path in paths if (found := NAME.fullmatch(path.name))}
    if not files:
        raise ConfigError(
            f"{folder} has no global_step_STEP_training_input.pkl; give SkyRL's trainer.export_path, and run it with "
            "trainer.dump_data_batch=true"
        )
    return [_rollout(step, files[step]) for step in sorted(files)]


def _rollout(step: int, file: Path) -> Counted:
    try:
        with file.open("rb") as content:
            state = _Reader(content).load()
        tensors = {name: _array(state["batch_dict"][name]) for name in ("sequences", "attention_mask", "response_mask")}
        padding = int((state["metadata"] or {}).get("pad_size", 0))
    except Exception as error:  # a damaged pickle raises anything
        raise ConfigError(f"cannot read {file} as a SkyRL training batch: {type(error).__name__}: {error}") from None
    rows = len(tensors["sequences"]) - padding
    real = [sequence[mask == 1] for sequence, mask in zip(tensors["sequences"], tensors["attention_mask"], strict=True)]
    responses = tensors["response_mask"].sum(1).astype(int).tolist()
    ends = [len(tokens) - n for tokens, n in zip(real, responses, strict=True)]  # of the prompts
    requests = [(real[row][: ends[row]].tobytes(), ends[row], responses[row]) for row in range(rows)]
    return counted(step, requests)


class _State(dict[str, Any]):
    """Stands for any class of the pickle: nothing of it runs, and what it holds is passed over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass


def _rebuilt(_: Any, state: dict[str, Any]) -> dict[str, Any]:
    """SkyRL's `_rebuild_tensor_batch`, which is given the class and the state."""
    return state


class _Reader(pickle.Unpickler):
    """Reads the data of a pickle without its code: a log is no program, and SkyRL need not be installed."""

    def find_class(self, module: str, name: str) -> Any:
        return _rebuilt if (module, name) == (WRITER, "_rebuild_tensor_batch") else _State


def _array(tensor: dict[str, Any]) -> NDArray[Any]:
    return np.frombuffer(tensor["data"], dtype=np.dtype(tensor["dtype"])).reshape(tensor["shape"])


SOURCE = Source(rollouts, seconds="timing/generate")  # lengths are exact: there is no mean to compare with
