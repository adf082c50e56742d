"""The fit to AIConfigurator's FP8 linears reads its tables."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.aic_fp8 import _linears, _prior
from fp8plan.model.hardware import find_gpu


def test_the_rows_with_one_scale_are_read_and_others_left_out(tmp_path: Path) -> None:
    shapes = [(4096, 12288), (24576, 4096), (512, 4096)]  # the last is narrower than any layer
    rows = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": 1e-3 * (20 + m), "kernel_source": "cutlass"}
        for dtype, m, (n, k) in product(("fp8", "fp8_block"), (1, 64, 32768), shapes)
    ]
    file = tmp_path / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(file)
    seen = _linears(tmp_path, find_gpu("h100"))
    assert np.allclose(sorted(seen.seconds), [21e-6, 21e-6, 84e-6, 84e-6])
    assert np.all(seen.predict(_prior(find_gpu("h100"))).seconds > 0)
