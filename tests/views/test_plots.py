"""Pictures: both formats can be read back, and their curves keep what the rollout made."""

from __future__ import annotations

import html
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.planner import Prediction, predict
from fp8plan.model.plan.request import PlanRequest
from fp8plan.model.precision import PRESETS, STORED_PRESETS
from fp8plan.model.risk.expected import RiskBudget
from fp8plan.model.rollout import Timeline
from fp8plan.model.setup import KV_SCALES
from fp8plan.model.workload import Workload
from fp8plan.views import plan_pictures as plots
from fp8plan.views.plan_page import draw
from fp8plan.views.plan_pictures import (
    BINS,
    COLOURS,
    band,
    binned,
    closed,
    colour_of,
    curves,
    front,
    label,
    panels,
    points,
    title,
)
from fp8plan.views.report import plan_text

SMALL = Workload(8, 4, Fixed(64), LogNormal(200, 0.8, 1000))


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(
        PlanRequest("Qwen/Qwen3-8B", "h200", SMALL, limits=EngineLimits(num_gpu_blocks=180))
    )  # starved of KV


def test_there_is_one_colour_per_precision() -> None:
    assert list(COLOURS) == list(PRESETS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_png_is_a_picture_with_every_colour_in_it(prediction: Prediction, tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    path = tmp_path / "picture.png"
    draw(prediction, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = imread(path)[..., :3]
    assert image.shape[0] > 500
    for colour in COLOURS.values():
        assert (np.abs(image - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum() > 50, colour


def test_an_html_page_stands_alone_and_names_every_precision(prediction: Prediction, tmp_path: Path) -> None:
    path = tmp_path / "picture.html"
    draw(prediction, path)
    page = path.read_text()
    assert page.startswith("<!doctype html>\n<html ")
    assert page.count("<svg ") == 1
    assert "<script" not in page
    assert len(page) < 1_000_000
    for choice in prediction.plan.choices:
        assert f"{choice.precision} ({choice.makespan_s:.3g} s)" in page
    assert "predicted, not measured" in page
    assert len(re.findall(r" s\), chosen", page)) > 0
    assert "waiting requests" in page  # starved of KV


@pytest.mark.parametrize("name", ["picture.svg", "picture", "picture.PNG.txt"])
def test_another_suffix_is_refused(prediction: Prediction, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot plot to"):
        draw(prediction, tmp_path / name)


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_a_plotting_package_that_is_not_installed_is_named(
    prediction: Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*fp8plan\[report\]"):
        draw(prediction, tmp_path / f"picture.{suffix}")


def test_curves_are_the_chosen_choice_and_the_fastest_of_each_other_precision() -> None:
    one_card = predict(PlanRequest("Qwen/Qwen3-0.6B", "a100", SMALL, precisions=["bf16"]))
    assert [c.precision for c in curves(one_card)] == ["bf16"]
    assert [c.name.endswith(", chosen") for c in curves(one_card)] == [True]
    two_cards = predict(PlanRequest("Qwen/Qwen3-0.6B", "h200", SMALL, gpus=2))
    assert len(two_cards.plan.choices) == 2 * len(PRESETS)
    plan = two_cards.plan
    slow = next(i for i, c in enumerate(plan.choices) if c.makespan_s == max(c.makespan_s or 0 for c in plan.choices))
    for number in (plan.chosen, slow):
        picked = replace(two_cards, plan=replace(plan, chosen=number))
        lines, chosen = curves(picked), plan.choices[number]
        assert [c.precision for c in lines] == list(PRESETS)
        assert [c.precision for c in lines if "chosen" in c.name] == [chosen.precision]
        for line in lines:
            times = [c.makespan_s for c in plan.choices if c.precision == line.precision]
            width = line.seconds[1] - line.seconds[0]
            drawn = chosen.makespan_s if line.precision == chosen.precision else min(times)
            assert line.seconds[-1] + width / 2 == pytest.approx(drawn)
            assert re.search(r"TP \d x DP \d", line.name)
        assert "fastest of 2 layouts" in title(picked.plan)[1]


def test_the_title_says_what_is_rolled_out_and_which_replica_is_drawn(prediction: Prediction) -> None:
    first, second = title(prediction.plan)
    for part in ("Qwen/Qwen3-8B", "h200_sxm", "8 prompts x 4 samples", "1,000 tokens"):
        assert part in first
    assert "calibrated" in second
    assert "replica" not in second
    split = predict(
        PlanRequest("Qwen/Qwen3-0.6B", "h200", SMALL, limits=EngineLimits(data_parallel_size=4, tensor_parallel_size=2))
    )
    assert "slowest of 4 replicas, TP 2" in title(split.plan)[1]


def test_bands_span_the_interval(prediction: Prediction) -> None:
    for curve, choice in zip(curves(prediction), prediction.plan.choices, strict=True):
        end, low_s, high_s = (x or 0 for x in (choice.makespan_s, choice.makespan_low_s, choice.makespan_high_s))
        for column in ("tokens_per_s", "occupancy", "running", "waiting"):
            times, low, high = band(curve, column)
            x, y = closed(curve, column)
            assert (x[-1], y[-1]) == (pytest.approx(end), 0)
            assert times[-1] == pytest.approx(high_s)
            assert (low <= high).all()
            own = np.interp(curve.seconds, times, low), np.interp(curve.seconds, times, high)
            slack = 0.1 * getattr(curve, column).max()  # between two moments that are drawn
            assert (own[0] - slack <= getattr(curve, column)).all()
            assert (getattr(curve, column) <= own[1] + slack).all()
            assert (low[times > low_s * 1.001] == 0).all()  # by then the fastest pace is through
        assert band(curve, "running")[2][-2] > 0
        certain = curve._replace(paces=(1.0, 1.0))
        assert (band(certain, "running")[1] == band(certain, "running")[2]).all()


def test_the_front_is_what_nothing_beats(prediction: Prediction) -> None:
    found = points(prediction.plan)
    assert [x.precision for x in found] == list(PRESETS)
    assert [x.chosen for x in found].index(True) == prediction.plan.chosen
    for x in found:
        beaten = any(y.kl[0] <= x.kl[0] and y.speed[0] >= x.speed[0] for y in found if y is not x)
        assert x.on_front is not beaten
        assert x.speed[1] < x.speed[0] < x.speed[2]
        assert x.kl[1] < x.kl[0] < x.kl[2]
    best = front(found)
    assert best[0].precision == "bf16"  # nothing is safer
    assert [x.speed[0] for x in best] == sorted(x.speed[0] for x in best)


def test_every_layout_is_a_point_and_one_of_each_precision_is_drawn_over_time() -> None:
    plan = predict(PlanRequest("Qwen/Qwen3-0.6B", "h200", SMALL, gpus=4)).plan
    found = points(plan)
    assert len(found) == 3 * len(PRESETS)
    assert sorted({x.layout for x in found}) == ["1x4", "2x2", "4x1"]
    assert sorted(x.precision for x in found if x.main) == sorted(PRESETS)
    assert sum(x.chosen for x in found) == 1
    for point in found:
        assert point.layout in label(point, True)


def test_the_page_of_a_plan_has_tables_reasons_settings_and_both_pictures(
    prediction: Prediction, tmp_path: Path
) -> None:
    plan = replace(prediction.plan, reasons=(*prediction.plan.reasons, "<script>alert(1)</script>"))
    draw(replace(prediction, plan=plan), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<script>alert(1)" not in page
    text = html.unescape(page)
    for reason in plan.reasons:
        assert reason in text
    for table in (plan_text(plan).speed, plan_text(plan).step, plan_text(plan).mismatch):
        for column in table:
            assert all(f">{cell}<" in text for cell in column.cells)
    assert "speed-up (90%)</th>" in text
    assert "preemptions</th>" in text
    for target in ("vllm", "verl"):
        assert plan.emit(target) in text
    assert "trl: cannot have this plan" in text or plan.emit("trl", python=True) in text
    assert text.count("class=bold") == 2
    for drawn in ("seconds since the rollout began", "output tokens/s (higher is faster)", "KL limit of low risk"):
        assert f">{drawn}<" in text  # the picture's text is text


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_a_folder_with_a_formula_or_a_tag_in_its_name_is_drawn(
    prediction: Prediction, tmp_path: Path, suffix: str
) -> None:
    name = r"/models/$\no{formula$/<script>alert(1)</script>"
    path = tmp_path / f"picture.{suffix}"
    draw(replace(prediction, plan=replace(prediction.plan, model=name)), path)
    assert b"<script" not in path.read_bytes()


@pytest.mark.parametrize("kv_scales", KV_SCALES)
def test_the_page_shows_the_settings_for_the_scales_it_is_told(
    prediction: Prediction, tmp_path: Path, kv_scales: str
) -> None:
    number = next(i for i, choice in enumerate(prediction.plan.choices) if choice.precision == "fp8_kv")
    plan = replace(prediction.plan, chosen=number, budget=RiskBudget(accept="high"))
    draw(replace(prediction, plan=plan), tmp_path / "plan.html", kv_scales)
    text = html.unescape((tmp_path / "plan.html").read_text())
    for told in KV_SCALES:
        assert (plan.emit("vllm", kv_scales=told) in text) == (told == kv_scales)
    assert plan.emit("verl") in text  # inside of verl fp8plan measures them whatever the page is told
    with pytest.raises(ConfigError, match="kv_scales is 'none'; allowed: calibrated, unit"):
        draw(prediction, tmp_path / "plan.html", "none")


def test_the_figure_holds_the_plans_numbers(prediction: Prediction) -> None:
    lines, every = curves(prediction), points(prediction.plan)
    *over_time, tradeoff = plots.picture(prediction).get_axes()
    assert len(over_time) == len(panels(lines)) == 4
    for axis, (column, _) in zip(over_time, panels(lines), strict=True):
        assert len(axis.collections) == len(lines)  # the bands
        for drawn, line in zip(axis.get_lines(), lines, strict=True):
            assert drawn.get_label() == line.name
            assert drawn.get_ydata()[1:-2] == pytest.approx(getattr(line, column))
    for mark, point in zip(tradeoff.containers, every, strict=True):
        values, _, bars = mark
        assert (values.get_xdata(), values.get_ydata()) == ([point.kl[0]], [point.speed[0]])
        (across,), (along,) = (bar.get_segments() for bar in bars)
        assert across[:, 0] == pytest.approx(point.kl[1:])
        assert along[:, 1] == pytest.approx(point.speed[1:])
    limits = [drawn.get_xdata()[0] for drawn in tradeoff.get_lines() if drawn.get_linestyle() == ":"]
    assert limits == [0.01, 0.03]


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


@pytest.mark.parametrize("name", [*PRESETS, *STORED_PRESETS])
def test_every_precision_has_a_colour(name: str) -> None:
    """An FP8 checkpoint without blocks takes those of FP8 in blocks, with the same cache."""
    assert colour_of(name) == COLOURS[name.replace("fp8_tensor", "fp8_block").replace("fp8_channel", "fp8_block")]
