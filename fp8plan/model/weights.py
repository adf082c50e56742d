"""A sample of a model's weights: measured in the safetensors files of a local folder, or assumed normal.

The planner does not import torch, so this module reads the files itself: eight bytes with the length of a header, the
header in JSON (name -> dtype, shape, data_offsets), and the data (safetensors' format).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

SPREAD: Final = 0.02  # assumed standard deviation: initializer_range of most configs
SIDE: Final = 128  # rows and columns of the blocks that share a scale
POINTS: Final = 2**14  # quantiles that stand for normal weights
BLOCKS: Final = 16  # blocks that are read of each kind: 0.5 MB
KEPT: Final = 4  # one of so many values of a block is kept
MOST_HEADER: Final = 100_000_000  # bytes of a header that safetensors allows
DTYPES: Final[dict[str, np.dtype[Any]]] = {"BF16": np.dtype("u2"), "F16": np.dtype("f2"), "F32": np.dtype("f4")}

LAYERS, EMBEDDING, LM_HEAD = "layers", "embedding", "lm_head"
KINDS: Final = {  # kind of matrix -> what its name in a checkpoint holds; the first that fits counts
    EMBEDDING: r"(embed_tokens|tok_embeddings|word_embeddings|embeddings?|wte)\.weight$",
    LM_HEAD: r"(lm_head|embed_out|^output)\.weight$",
    LAYERS: r"\.\d+\..*(weight|proj)$",  # some families' experts are one tensor without ".weight"
}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Magnitudes of weights in blocks of 128 x 128.

    values:   [blocks, values]
    largest:  [blocks], the largest magnitude of each block
    measured: False if they are assumed
    """

    values: NDArray[np.float64]
    largest: NDArray[np.float64]
    measured: bool = True

    @property
    def spread(self) -> float:
        """Root mean square."""
        return float(np.sqrt(np.square(self.values).mean()))


@cache
def normal(spread: float = SPREAD) -> Weights:
    """Return normal weights of a standard deviation, in a block with the median of largest magnitudes."""
    quantile = NormalDist(0.0, spread).inv_cdf
    values = [quantile(0.5 + (number + 0.5) / (2 * POINTS)) for number in range(POINTS)]
    return Weights(np.array([values]), np.array([quantile(0.5 + 0.5 * 0.5 ** (1 / SIDE**2))]), measured=False)


def sampled(folder: Path, kinds: dict[str, str] = KINDS) -> dict[str, Weights]:
    """Return a sample of each kind of matrix in a folder's safetensors files, evenly over all of them.

    kinds: kind -> pattern of names, as KINDS. A kind has no entry unless all its matrices are BF16, FP16 or FP32. A
    tied lm_head has the embedding's

    A file that cannot be read is left out.
    """
    matrices = defaultdict[str, list[_Matrix]](list)
    for file in sorted(folder.glob("*.safetensors")):
        for name, matrix in _matrices(file):
            if kind := next((kind for kind, pattern in kinds.items() if re.search(pattern, name)), None):
                matrices[kind].append(matrix)
    plain = {kind: of_kind for kind, of_kind in matrices.items() if all(matrix.dtype in DTYPES for matrix in of_kind)}
    samples = {kind: _sample(of_kind) for kind, of_kind in plain.items()}
    measured = {kind: sample for kind, sample in samples.items() if sample is not None}
    if EMBEDDING in measured:
        measured.setdefault(LM_HEAD, measured[EMBEDDING])
    return measured


class _Matrix(NamedTuple):
    """A matrix in a file. offset: its first byte"""

    file: Path
    dtype: str
    rows: int
    columns: int
    offset: int

    def block(self, row: int, column: int) -> NDArray[np.float64]:
        """Return the magnitudes of the block that holds a place."""
        data = np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, (self.rows, self.columns))
        row, column = row // SIDE * SIDE, column // SIDE * SIDE
        stored = np.array(data[row : row + SIDE, column : column + SIDE]).ravel()
        if self.dtype == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return np.abs(stored.astype(np.float64))


def _matrices(file: Path) -> list[tuple[str, _Matrix]]:
    """Return the matrices in a file's header, with their names; [] for a file that is no safetensors file."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header: dict[str, Any] = json.loads(opened.read(length)) if length <= MOST_HEADER else {}
        size, matrices = file.stat().st_size - 8 - length, []
        for name, entry in header.items():
            if name == "__metadata__" or len(entry["shape"]) < 2:
                continue
            *leading, columns = entry["shape"]
            rows, (start, end) = int(np.prod(leading)), entry["data_offsets"]
            stored = DTYPES.get(entry["dtype"])
            whole = stored is None or end - start == rows * columns * stored.itemsize
            if rows * columns and end <= size and whole:
                matrices.append((name, _Matrix(file, entry["dtype"], rows, columns, 8 + length + start)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # such as a pointer of Git LFS
        return []
    return matrices


def _sample(matrices: list[_Matrix]) -> Weights | None:
    """Return BLOCKS blocks from evenly spaced places; None if all are zeros or not finite."""
    ends = np.cumsum([matrix.rows * matrix.columns for matrix in matrices])
    blocks = list[NDArray[np.float64]]()
    for place in ((np.arange(BLOCKS) + 0.5) / BLOCKS * ends[-1]).astype(np.int64):
        number = int(np.searchsorted(ends, place, side="right"))
        matrix = matrices[number]
        inside = int(place - (ends[number - 1] if number else 0))
        # A column of its own for each block: evenly spaced places may all be in one.
        blocks.append(matrix.block(inside // matrix.columns, (inside + 7919 * SIDE * len(blocks)) % matrix.columns))
    good = [block for block in blocks if np.isfinite(block).all() and block.any()]
    if not good:
        return None
    values = np.array([np.resize(block, SIDE * SIDE) for block in good])  # blocks at an edge are smaller
    return Weights(values[:, ::KEPT], values.max(axis=1))
