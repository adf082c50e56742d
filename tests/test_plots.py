"""Pictures: both formats can be read back, and their curves keep what the rollout made."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.planner import Prediction, predict
from fp8plan.model.precision import PRESETS
from fp8plan.model.rollout import Timeline
from fp8plan.model.workload import Fixed, LogNormal, Workload
from fp8plan.plots import BINS, COLOURS, binned, curves, panels, plot, title

SMALL = Workload(8, 4, Fixed(64), LogNormal(200, 0.8, 1000))


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict("Qwen/Qwen3-8B", "h200", SMALL, limits=EngineLimits(num_gpu_blocks=180))  # starved of KV


def test_there_is_one_colour_per_precision() -> None:
    assert list(COLOURS) == list(PRESETS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_png_is_a_picture_with_every_colour_in_it(prediction: Prediction, tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    plot(prediction, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = imread(path)[..., :3]
    assert image.shape[0] > 500
    for colour in COLOURS.values():
        assert (np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum() > 50, colour


def test_an_html_page_stands_alone_and_names_every_precision(prediction: Prediction, tmp_path: Path) -> None:
    path = tmp_path / "picture.html"
    plot(prediction, str(path))
    page = path.read_text()
    assert "<html>" in page[:100]
    assert "Plotly.newPlot" in page
    assert re.findall("<script[^>]* src=", page) == []  # needs no network
    for choice in prediction.plan.choices:
        assert f"{choice.precision} ({choice.makespan_s:.3g} s)" in page
    assert "predicted, not measured" in page
    assert len(re.findall(r" s\), chosen", page)) > 0
    assert "waiting requests" in page  # starved of KV


@pytest.mark.parametrize("name", ["picture.svg", "picture", "picture.PNG.txt", "absent/picture.png"])
def test_another_suffix_or_a_folder_that_is_not_there_is_refused(
    prediction: Prediction, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="cannot plot to"):
        plot(prediction, tmp_path / name)


def test_a_file_that_cannot_be_written_is_refused(prediction: Prediction, tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*taken\.png"):
        plot(prediction, tmp_path / "taken.png")


@pytest.mark.parametrize(("suffix", "package"), [("png", "matplotlib"), ("html", "plotly")])
def test_a_plotting_package_that_is_not_installed_is_named(
    prediction: Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"needs {package}.*fp8plan\[report\]"):
        plot(prediction, tmp_path / f"picture.{suffix}")


def test_curves_are_the_available_choices_on_the_chosen_layout() -> None:
    one_card = predict("Qwen/Qwen3-0.6B", "a100", SMALL)
    assert [c.precision for c in curves(one_card)] == ["bf16"]
    assert [c.name.endswith(", chosen") for c in curves(one_card)] == [True]
    two_cards = predict("Qwen/Qwen3-0.6B", "h200", SMALL, gpus=2)
    assert len(two_cards.plan.choices) == 2 * len(PRESETS)
    lines, plan = curves(two_cards), two_cards.plan
    assert [c.precision for c in lines] == list(PRESETS)
    assert [c.precision for c in lines if "chosen" in c.name] == [plan.choices[plan.chosen].precision]


def test_the_title_says_what_is_rolled_out_and_which_replica_is_drawn(prediction: Prediction) -> None:
    first, second = title(prediction.plan)
    for part in ("Qwen/Qwen3-8B", "h200_sxm", "8 prompts x 4 samples", "1,000 tokens"):
        assert part in first
    assert "calibrated" in second
    assert "replica" not in second
    split = predict("Qwen/Qwen3-0.6B", "h200", SMALL, limits=EngineLimits(data_parallel_size=4, tensor_parallel_size=2))
    assert "slowest of 4 replicas, TP 2" in title(split.plan)[1]


def test_waiting_requests_get_a_panel_only_where_there_are_any(prediction: Prediction) -> None:
    starved = curves(prediction)
    assert max(line.waiting.max() for line in starved) > 1
    assert "waiting" in dict(panels(starved))
    assert "waiting" not in dict(panels([line._replace(waiting=0 * line.waiting) for line in starved]))


def test_curves_keep_the_tokens_and_stay_within_the_pool(prediction: Prediction) -> None:
    made = prediction.plan.workload["response_tokens"]
    for curve, choice in zip(curves(prediction), prediction.plan.choices, strict=True):
        assert choice.makespan_s is not None
        width = choice.makespan_s / BINS
        assert (curve.tokens_per_s * width).sum() == pytest.approx(made)
        assert curve.seconds[[0, -1]] == pytest.approx([width / 2, choice.makespan_s - width / 2])
        assert curve.occupancy.min() >= 0
        assert 0.95 < curve.occupancy.max() <= 1
        assert 0 < curve.running.max() <= 32


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 500), st.integers(0, 99)), min_size=1, max_size=20))
def test_binning_keeps_tokens_whatever_the_rows(rows: list[tuple[float, int, int]]) -> None:
    lengths, tokens, blocks = (np.array(column) for column in zip(*rows, strict=True))
    line = Timeline(np.cumsum(lengths), tokens, 2 * tokens, blocks, tokens)
    seconds, rate, occupancy, running, waiting = binned(line, 100, 37)
    assert (waiting == 2 * running).all()
    assert (rate * lengths.sum() / 37).sum() == pytest.approx(tokens.sum())
    assert (np.diff(seconds) > 0).all()
    assert occupancy.max() <= blocks.max() / 100
    assert set(running) <= set(tokens)
