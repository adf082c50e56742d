"""The picture of a run whose threshold moves."""

from __future__ import annotations

import pytest

from benchmarks.learning.picture import PANELS, PICTURE, RUN, picture
from fp8plan import jsonl, schemas
from fp8plan.views.page import as_svg


def test_the_threshold_of_the_run_falls_from_4_to_2_while_the_kl_grows() -> None:
    metrics = [row["metrics"] for row in jsonl.rows(RUN)]
    bounds, kl = ([each[name] for each in metrics] for name in (schemas.TIS, schemas.K3_ROBUST))
    assert (bounds[0], bounds[-1]) == pytest.approx((4.0, 2.0))
    assert bounds == sorted(bounds, reverse=True)
    assert kl[-1] > 100 * kl[0]


def test_the_page_has_the_picture_of_this_run() -> None:
    """To the byte, where the same matplotlib draws it."""
    matplotlib = pytest.importorskip("matplotlib")
    drawn, committed = as_svg(picture()) + "\n", PICTURE.read_text(encoding="utf-8")
    assert all(label in text for label in PANELS for text in (drawn, committed))
    if f"Matplotlib v{matplotlib.__version__}," in committed:
        assert drawn == committed
