"""The committed errors of single kernels are those of the committed profile."""

from __future__ import annotations

import pytest

from benchmarks.kernel_errors import DIGITS, committed, unfitted
from fp8plan.model.calibrate.profile_of import STEPS


def test_the_table_of_single_kernels_is_the_profile_s() -> None:
    rows, now = committed(), unfitted()
    assert rows.keys() == {*now, STEPS}
    for kernel, columns in now.items():
        for name, value in columns.items():
            assert rows[kernel][name] == pytest.approx(value, abs=0.51 * 10**-DIGITS), (kernel, name)
