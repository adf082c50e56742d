"""The waterfall of a tuned plan: bars that join, and colours that tell what they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed
from fp8plan.model.tune.answer import Answer, Level, Waterfall
from fp8plan.model.tune.request import TuneRequest
from fp8plan.model.tune.search import search
from fp8plan.model.workload import Workload
from fp8plan.views.run_plots import BLUE, GREEN, RED
from fp8plan.views.tuned_page import GREY, bars, draw

FALL = Waterfall(
    before=Level("before: bf16", 20.0, 18.0, 23.0),
    changes=(Level("fp8_block", 21.0), Level("max_num_seqs 512", 15.0)),
    tuned=Level("tuned: fp8_block", 15.0, 14.0, 16.0),
    beyond=(Level("waiting for the host", 12.0), Level("kernels slower than the datasheet", 5.0)),
    limit=Level("datasheet's bandwidth and peak", 5.0),
    longest_alone_s=3.0,
)


def test_bars_join_and_have_the_colour_of_what_they_do() -> None:
    shown = [(bar.begin, bar.end, bar.colour, bar.text) for bar in bars(FALL)]
    assert shown == [
        (0.0, 20.0, BLUE, "20 s"),
        (20.0, 21.0, RED, "+1 s (+5%)"),
        (21.0, 15.0, GREEN, "-6 s (-30%)"),
        (0.0, 15.0, BLUE, "15 s"),
        (15.0, 12.0, GREY, "-3 s (-20%)"),
        (12.0, 5.0, GREY, "-7 s (-47%)"),
        (0.0, 5.0, GREY, "5 s"),
    ]
    assert [bar.doubt for bar in bars(FALL) if bar.doubt] == [(18.0, 23.0), (14.0, 16.0)]


def test_a_png_has_every_kind_of_bar_and_another_suffix_is_refused(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    tuned = search(TuneRequest("Qwen/Qwen3-0.6B", "h200", Workload(75, 8, Fixed(64), Fixed(48))))
    answer, path = Answer.of(tuned), tmp_path / "tuned.png"
    draw(tuned.prediction, path, answer=answer)
    image = imread(path)[..., :3]
    for colour in {bar.colour for bar in bars(answer.waterfall)}:
        assert (np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum() > 50, colour
    with pytest.raises(ConfigError, match=r"ends in \.png or \.html"):
        draw(tuned.prediction, tmp_path / "tuned.svg", answer=answer)
