"""A user's views of a run: the terminal view, the page, and the commands that make them."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from simulated_run import STEP_S, simulated

from fp8plan import cli, schemas
from fp8plan.errors import ConfigError
from fp8plan.jsonl import append, line
from fp8plan.runtime.watch.controller.alarms import MEANINGS, Alarm
from fp8plan.runtime.watch.monitor.steps import DECODER, RunReader, Steps
from fp8plan.views import axes
from fp8plan.views import run_columns as runs
from fp8plan.views import run_page as pages
from fp8plan.views.run import RunView, lines, look
from fp8plan.views.run_page import page, summary, write_report
from fp8plan.views.run_plots import PANELS, by_position, figure
from fp8plan.views.text import BARS, Scale, duration, percent, sparkline

RUN = simulated(200)


def steps_of(rows: list[dict[str, Any]]) -> Steps:
    """Records in columns, as a RunReader has them."""
    steps = Steps()
    for row in rows:
        steps.add(DECODER.decode(line(row)))
    return steps


def written(path: Path, rows: list[dict[str, Any]]) -> RunReader:
    path.write_bytes(b"".join(map(line, rows)))
    reader = RunReader(path)
    reader.read()
    return reader


def summary_line(text: str) -> str:
    """The page's line on its span: from where to where, and how fast."""
    return text.partition('<p class="dim">')[2].partition("</p>")[0]


def shown(reader: RunReader, width: int = 80, steps: int | None = None, trouble: str = "") -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as caught:
        console.print(RunView(reader, steps, trouble))
    return caught.get()


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("count", [1, 2, 30, 200])
def test_every_figure_is_in_the_view_and_no_line_is_cut(tmp_path: Path, width: int, count: int) -> None:
    text = shown(written(tmp_path / "run.jsonl", RUN[:count]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    final = RUN[count - 1]["metrics"]
    assert f"{final['rollout_corr/k3_kl']:.2e}" in text
    assert f"limit {final['fp8plan/kl_limit']:.1e}" in text
    assert f"{final['fp8plan/threshold_tis']:.2f}" in text
    assert f"{final['fp8plan/tokens_per_s']:,.0f}" in text
    assert percent(final["fp8plan/ess_raw"]) in text
    assert f"step {count:,}, " in text
    for label in ("KL k3", "ESS", "raw ESS", "TIS C", "clipped", "clipped mass", "tokens/s", "decision", "guard"):
        assert re.search(rf"^{label} ", text, re.MULTILINE), label


def test_news_their_baseline_the_threshold_and_the_reason_are_shown(tmp_path: Path) -> None:
    """In the terminal as figures, in the report in panels of one picture, with the reasons where the pointer is."""
    more = {"fp8plan/kl_baseline": 2e-3, "fp8plan/kl_news": 2.5}
    rows = [row | {"metrics": row["metrics"] | more, "reason": f"KL <{row['step']}>"} for row in RUN[:40]]
    reader = written(tmp_path / "run.jsonl", rows)
    text = shown(reader, 100)
    assert re.search(r"^KL news +│? *2\.50x +│? *baseline 2\.0e-03", text, re.MULTILINE), text
    curves = {trace.name: trace for trace in figure(reader.steps, []).data}
    assert set(curves["KL over its baseline"].y) == {2.5}
    assert set(curves["baseline of the news"].y) == {2e-3}
    assert curves["C"].text[6] == f"{rows[6]['decision']}: KL &lt;7&gt;"
    assert list(curves["C"].x) == list(curves["KL over its baseline"].x)
    without = shown(written(tmp_path / "old.jsonl", RUN[:40]), 100)
    assert "KL news" not in without


def test_a_run_with_constant_thresholds_shows_its_news(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fp8plan.runtime.watch.controller.laws import ConstantThresholds
    from fp8plan.runtime.watch.monitor.monitor import Monitor
    from fp8plan.runtime.watch.monitor.sinks import JsonLines

    path, chance = tmp_path / "run.jsonl", torch.Generator().manual_seed(0)
    with Monitor(controller=ConstantThresholds(), sinks=[JsonLines(str(path))]) as monitor:
        for sigma in (0.2, 0.2, 0.5):
            train = -9 - torch.rand(64, 64, generator=chance)
            noise = sigma * torch.randn(64, 64, generator=chance) - sigma**2 / 2
            step = monitor.step(train, train - noise)
    reader = RunReader(path)
    assert reader.read() == 3
    baseline, news = step.metrics[schemas.BASELINE], step.metrics[schemas.NEWS]
    assert 0.019 < baseline < 0.021
    assert 2 < news < 3
    text = shown(reader, 160)
    assert re.search(rf"^KL news +│? *{news:.2f}x +│? *baseline {baseline:.1e}", text, re.MULTILINE), text
    said = f"hold: constant thresholds; KL {news * baseline:.2g} is {news:.1f} times its baseline of {baseline:.2g}"
    assert said in text
    curves = {trace.name: trace for trace in figure(reader.steps, []).data}
    assert curves["C"].text[2].replace("<br>", " ") == said
    assert curves["KL over its baseline"].y[2] == pytest.approx(news, rel=1e-3)


def test_the_view_tells_what_is_wrong(tmp_path: Path) -> None:
    slow = next(x for x in RUN if not x["guard"]["verdict"]["as_fast"])
    text = shown(written(tmp_path / "run.jsonl", RUN[: slow["step"]]), 160)
    assert "too slow" in text
    assert slow["guard"]["verdict"]["causes"][0]["sentence"] in text
    alarmed = next(x for x in RUN if x["alarms"])
    text = shown(written(tmp_path / "run.jsonl", RUN[: alarmed["step"]]), 160)
    assert f"kl: {MEANINGS[Alarm.KL].says}" in text
    off = RUN[0] | {"guard": {"verdict": None, "state": None, "off": "no profile"}, "alarms": ["new_word"]}
    text = shown(written(tmp_path / "run.jsonl", [off]))
    assert "off: no profile" in text
    assert re.search(r"alarm +new_word\n", text)


@pytest.mark.parametrize("differing", ["absent", None, 0.123])
def test_the_kl_by_cause_and_the_tokens_with_other_experts_are_shown(tmp_path: Path, differing: Any) -> None:
    """Records without the share, as older ones are, are read."""
    parts = [
        {"causes": ["routing"], "kl": 4e-3, "low": 4e-3, "high": 4e-3, "how": "measured"},
        {"causes": ["precision", "rest"], "kl": 2e-3, "low": 2e-3, "high": 2e-3, "how": "left over"},
    ]
    shares = {} if differing == "absent" else {schemas.ROUTING_DIFFERS: differing}
    reader = written(tmp_path / "run.jsonl", [RUN[0] | {"attribution": parts, "metrics": RUN[0]["metrics"] | shares}])
    experts = "; routers of trainer and engine disagree on 12.3% of the tokens" if differing == 0.123 else ""
    kl = f"KL 6e-3: 4e-3 routing, 2e-3 precision or rest{experts}"
    assert re.search(rf"causes +{re.escape(kl)}\n", shown(reader, 160))
    assert f"Last step: {kl}." in page(reader)


def test_what_would_help_a_rollout_that_is_as_fast_as_predicted_is_shown(tmp_path: Path) -> None:
    lever = "aborting the last 6 of 128 responses would save 36% <b>"
    verdict = {"action": "none", "reason": "nothing to do", "as_fast": True, "causes": [{"sentence": lever}]}
    record = RUN[0] | {"guard": {"verdict": verdict, "state": None, "off": None}}
    reader = written(tmp_path / "run.jsonl", [record])
    assert re.search(rf"advice +{re.escape(lever)}", shown(reader, 160))
    reader.read()
    assert f"Last rollout: {escape(lever)}." in page(reader)


def test_a_run_that_has_little_to_tell_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    bare = {"step": 1, "metrics": {"rollout_corr/k3_kl": 1e-3, "fp8plan/threshold_tis": None}}
    text = shown(written(tmp_path / "run.jsonl", [bare]))
    assert "1.00e-03" in text
    assert "TIS C" not in text
    assert "no step yet" in shown(written(tmp_path / "run.jsonl", []), 200)
    page(written(tmp_path / "run.jsonl", [bare]))


def test_a_run_that_has_stopped_looks_so(tmp_path: Path) -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")

    def heading(hours: float) -> str:
        begin = datetime.now(UTC) - timedelta(hours=hours, seconds=STEP_S * len(RUN))
        with console.capture() as caught:
            console.print(RunView(written(tmp_path / "run.jsonl", simulated(200, begin=begin))))
        return caught.get().splitlines()[0]

    assert "\x1b[33m" not in heading(0)
    assert "\x1b[33m" in heading(9)
    assert "9.0 h ago; one every 7 min" in heading(9)


def test_records_that_are_not_shown_and_lines_that_are_no_records_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    reader = written(path, RUN[:20])
    append(path, line(RUN[14]) + b"junk\n")
    reader.read()
    for text in (shown(reader, 160), page(reader)):
        assert "6 records are not shown: their step number, or a lower one, comes again later (the steps went" in text
        assert "went back once); the last record of a step is shown" in text
        assert "two runs" not in text
        assert "1 line is no record" in text
        assert "checkpoint" not in text
    reader = written(path, [*RUN[:20], RUN[19]])
    append(path, b"junk\nmore\n")
    reader.read()
    for text in (shown(reader, 160), page(reader)):
        assert "1 record is not shown: its step number" in text
        assert "2 lines are no records" in text
    reader = written(path, [row for pair in zip(RUN[:20], RUN[:20], strict=True) for row in pair])
    for text in (shown(reader, 240), page(reader)):
        assert "the steps went back 20 times" in text
        assert "More are hidden than shown: two runs may be in one file" in text


def test_a_clock_that_goes_back_makes_no_negative_time(tmp_path: Path) -> None:
    backwards = [row | {"date": RUN[29 - number]["date"]} for number, row in enumerate(RUN[:30])]
    once = [*RUN[:10], RUN[10] | {"date": RUN[0]["date"]}, *RUN[11:30]]
    for rows, pace in ((backwards, None), (once, "one every 7 min")):
        reader = written(tmp_path / "run.jsonl", rows)
        for text in (shown(reader).splitlines()[0], summary_line(page(reader))):
            assert re.search(r"-\d+(\.\d+)?(e\+\d+)? s", text) is None
            assert pace in text if pace else "one every" not in text


def test_dates_of_any_kind_stop_nothing(tmp_path: Path) -> None:
    dates = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-11-20", "yesterday")
    for date in dates:
        reader = written(tmp_path / "run.jsonl", [RUN[0], RUN[1] | {"date": date}])
        assert "step 2," in shown(reader)
        page(reader)


@given(
    st.lists(st.one_of(st.floats(1e-6, 1e6), st.just(float("nan"))), max_size=120),
    st.integers(1, 60),
    st.sampled_from([Scale(), Scale(low=0.0), Scale(low=0.0, high=1.0), Scale(span=10.0, log=True)]),
)
def test_a_sparkline_fits_has_only_bars_and_larger_is_never_lower(
    values: list[float], width: int, scale: Scale
) -> None:
    bars = sparkline(np.array(values), width, scale)
    assert len(bars) == min(len(values), width)
    assert set(bars) <= set(BARS + " ")
    if len(values) <= width:
        known = sorted((x, BARS.index(bar)) for x, bar in zip(values, bars, strict=True) if x == x)
        assert [bar for _, bar in known] == sorted(bar for _, bar in known)
        assert [bar == " " for bar in bars] == [x != x for x in values] or not known


def test_a_spike_survives_being_drawn_small_and_noise_is_flat() -> None:
    values = np.full(500, 0.001)
    values[250] = 0.1
    assert sparkline(values, 20, Scale(span=10.0, log=True)).count(BARS[-1]) == 1
    noise = np.random.default_rng(0).normal(9000, 90, 60)
    assert len(set(sparkline(noise, 60, Scale(low=0.0, high=9800.0)))) <= 2


def test_numbers_are_short_and_true() -> None:
    assert [percent(x) for x in (None, 0.0, 1e-7, 0.00012, 0.5, 0.99996, 1 - 1e-7, 1.0)] == [
        "-", "0.000%", "<0.001%", "0.012%", "50.0%", "99.996%", ">99.999%", "100.0%",
    ]  # fmt: skip
    assert [duration(x) for x in (0.312, 3, 12, 412, 9000, 400_000)] == [
        "0.31 s",
        "3 s",
        "12 s",
        "7 min",
        "2.5 h",
        "5 days",
    ]


def test_events_are_changes_not_states() -> None:
    found = runs.events(steps_of(RUN))
    assert [x.step for x in found] == sorted(x.step for x in found)
    changes = {x["step"] for x in RUN if x["decision"] in ("tighten", "relax")}
    assert {x.step for x in found if x.kind == "decision"} == changes
    begun = [
        b["step"] for a, b in zip([RUN[0], *RUN], RUN, strict=False) if "kl" in b["alarms"] and "kl" not in a["alarms"]
    ]
    assert [x.step for x in found if (x.kind, x.what) == ("alarm", "kl")] == begun  # with no other alarm
    assert len(begun) < sum("kl" in x["alarms"] for x in RUN)
    assert [(x.step, x.what) for x in found if x.kind == "guard"] == [(160, "kv_to_bf16")]


def test_the_figure_holds_the_records_numbers(tmp_path: Path) -> None:
    reader = written(tmp_path / "run.jsonl", RUN)
    made = figure(reader.steps, runs.events(reader.steps))
    curves = {trace.name: trace for trace in made.data if trace.name}
    for panel in PANELS:
        for trace in panel.traces:
            values = [row["metrics"].get(trace.metric) for row in RUN]
            if any(x is not None for x in values):
                assert list(curves[trace.name].x) == [row["step"] for row in RUN]
                assert list(curves[trace.name].y) == pytest.approx(values, rel=1e-4)
    assert "upper end" not in curves  # no MIS band in this run, so no panel for it
    marks = {shape.x0 for shape in made.layout.shapes}
    assert curves["tokens/s over the prediction, with its 90% band"].y[:3] == pytest.approx(
        [row["guard"]["verdict"]["ratio"] for row in RUN[:3]], rel=1e-4
    )
    assert marks == {x.step for x in runs.events(steps_of(RUN)) if x.kind != "decision"}
    early, late = by_position(reader.steps).data
    assert early.name == "first 20 steps"
    assert late.y[-1] == pytest.approx(np.mean([x["profile"][-1]["k3"] for x in RUN[-20:]]))


def test_values_that_stand_alone_are_drawn_as_points() -> None:
    """One step of a run, and speeds where only every fourth step has a rollout: a line would show nothing."""
    (speed,) = (x for x in figure(steps_of(RUN[:1]), []).data if x.name == "achieved")
    assert "markers" in speed.mode
    unknown = {x: None for x in RUN[0]["metrics"] if "tokens_per_s" in x}
    rows = [row if row["step"] % 4 == 0 else row | {"metrics": row["metrics"] | unknown} for row in RUN]
    modes = {trace.name: trace.mode for trace in figure(steps_of(rows), []).data}
    assert modes["achieved"] == modes["predicted"] == "lines+markers"
    band = [x for x in figure(steps_of(rows), []).data if x.name is None]
    assert [x.connectgaps for x in band] == [True, True]


def test_axes_tell_their_ticks_apart() -> None:
    made = figure(steps_of(RUN), [])
    axes = {axis.title.text: axis for axis in made.select_yaxes()}
    spread = np.ptp(np.log10([x["metrics"]["rollout_corr/k3_kl"] for x in RUN]))
    assert axes["KL k3 per token"].dtick == (1 if spread >= 2 else "D2")
    flat = figure(steps_of([row | {"metrics": {"rollout_corr/k3_kl": 10.0 ** -row["step"]}} for row in RUN[:9]]), [])
    assert flat.layout.yaxis.dtick == 1
    assert axes["effective sample size"].tickformat == ".0~%"  # it falls far below 100% in this run


def test_a_long_run_is_drawn_by_fewer_points_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With spans a tenth as long as they are, so that the run need not be."""
    for module in (axes, pages):
        monkeypatch.setattr(module, "SPANS", 50)
        monkeypatch.setattr(module, "MOST", 200)
    monkeypatch.setattr(pages, "MARKED", 2)
    spike = RUN[0] | {"metrics": RUN[0]["metrics"] | {"rollout_corr/k3_kl": 5.0, "fp8plan/clip_fraction": 1.0}}
    rows = (spike if step == 333 else RUN[step % len(RUN)] for step in range(500))
    reader = written(tmp_path / "run.jsonl", [row | {"step": step} for step, row in enumerate(rows)])
    made = figure(reader.steps, runs.events(reader.steps))
    curves = {trace.name: trace for trace in made.data}
    assert max(len(trace.x) for trace in made.data if trace.name) <= 200
    assert (333, 5.0) in list(zip(curves["k3"].x, curves["k3"].y, strict=True))
    assert 1.0 in curves["tokens with a ratio above C"].y
    text = page(reader)
    assert "Of 500 steps a curve shows the first, least, greatest and last value in each of 50 spans" in text
    assert "Dotted lines, the last 2 of" in text
    short = page(written(tmp_path / "run.jsonl", RUN[:20]))
    assert "Dotted lines: " in short
    assert "a curve shows" not in short


def test_numbers_far_below_one_are_not_shown_as_zero(tmp_path: Path) -> None:
    rows = [row | {"metrics": {"critic/rewards/mean": 0.0012 + row["step"] * 1e-4}} for row in RUN[:5]]
    assert re.search(r"^reward +0.0017 +0.0013 to 0.0017", shown(written(tmp_path / "run.jsonl", rows)), re.MULTILINE)


def test_a_first_rollout_that_was_cold_is_no_part_of_the_runs_speed() -> None:
    rows = json.loads(json.dumps(RUN[:2]))
    rows[0]["metrics"]["fp8plan/tokens_per_s"] = 30.0
    rows[0]["guard"]["verdict"] |= {"as_fast": False, "cold": True}
    ratio = rows[1]["metrics"]["fp8plan/tokens_per_s"] / 9200
    assert dict(summary(steps_of(rows)))["of the predicted speed, median"] == f"{ratio:.2f}x"
    assert "of the predicted speed, median" not in dict(summary(steps_of(rows[:1])))


def test_a_compressed_run_is_shown_and_reported(tmp_path: Path, fp8plan: Any) -> None:
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(map(line, RUN[:3]))))
    assert "step 3," in fp8plan("monitor", path, "--once")[1]
    assert fp8plan("report", path)[2] == f"written: {tmp_path / 'run.html'}\n"


def test_a_picture_of_one_position_is_none() -> None:
    assert by_position(steps_of([row | {"profile": row["profile"][:1]} for row in RUN])) is None
    assert by_position(steps_of([RUN[0] | {"profile": []}])) is None


def test_a_speed_that_the_guard_takes_for_noise_is_no_warning(tmp_path: Path) -> None:
    def style(row: dict[str, Any]) -> str:
        (speed,) = (x for x in lines(steps_of([row])) if x.label == "tokens/s")
        return f"{speed.style} {speed.against}"

    row = json.loads(json.dumps(RUN[0]))
    row["metrics"]["fp8plan/tokens_per_s"] = 8600.0
    for as_fast, told in ((True, "green predicted 9,200 (0.93x)"), (False, "yellow predicted 8,700-9,800")):
        row["guard"]["verdict"]["as_fast"] = as_fast
        assert style(row) == told
    assert style(row | {"guard": None}) == "yellow predicted 8,700-9,800"


def guard_line_without_warning(tmp_path: Path, verdict: dict[str, Any]) -> str:
    """The guard's line in the terminal for a third of the predicted speed, which is shown as no warning."""
    row = json.loads(json.dumps(RUN[0]))
    row["metrics"]["fp8plan/tokens_per_s"] = 3000.0
    row["guard"]["verdict"] |= verdict
    (speed,) = (x for x in lines(steps_of([row])) if x.label == "tokens/s")
    assert (speed.style, speed.against) == ("", "predicted 9,200 (0.33x)")
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as caught:
        console.print(RunView(written(tmp_path / "run.jsonl", [row])))
    (guard,) = (x for x in caught.get().splitlines() if "guard" in x)
    return guard


def test_a_slow_rollout_that_is_not_judged_is_no_warning(tmp_path: Path) -> None:
    guard = guard_line_without_warning(tmp_path, {"as_fast": None, "anchored": False})
    assert not re.search("\x1b\\[3[23]m", guard)  # neither green nor yellow


def test_between_two_rollouts_the_last_one_is_shown(tmp_path: Path) -> None:
    bare = {name: x for name, x in RUN[1]["metrics"].items() if "tokens_per_s" not in name}
    guard = RUN[1]["guard"] | {"verdict": None}
    text = shown(
        written(tmp_path / "run.jsonl", [RUN[0], *(RUN[n] | {"metrics": bare, "guard": guard} for n in (1, 2))])
    )
    achieved = RUN[0]["metrics"]["fp8plan/tokens_per_s"]
    (speed,) = (x for x in text.splitlines() if x.startswith("tokens/s"))
    assert re.match(rf"tokens/s +{achieved:,.0f}  predicted 9,200 .* .$", speed.rstrip())  # one bar, of step 1
    assert f"guard        {achieved:,.0f} tokens/s, predicted" in text
    assert "last 3 steps" in text
    never = shown(written(tmp_path / "run.jsonl", [RUN[2] | {"metrics": bare, "guard": None}]))
    assert "tokens/s" not in never
    assert "guard" not in never
    assert "last step " in never


def test_a_kl_far_below_its_limit_is_not_zero_times_it(tmp_path: Path) -> None:
    row = RUN[0] | {"metrics": {"rollout_corr/k3_kl": 1e-6, "fp8plan/kl_limit": 3e-2}}
    assert "limit 3.0e-02 (<0.01x)" in shown(written(tmp_path / "run.jsonl", [row]))


def test_the_page_stands_alone_and_escapes_what_it_was_given(tmp_path: Path) -> None:
    evil = RUN[5] | {"decision": "tighten", "reason": "<script>alert(1)</script>", "model": "<b>x"}
    path = tmp_path / "run.jsonl"
    written(path, [*RUN[:5], evil])
    write_report(path, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!doctype html>")
    assert re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", text) == []  # needs no network
    assert text.count("Plotly.newPlot(") == 2
    assert "<script>alert(1)" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>x" not in text


def test_the_summary_is_of_the_whole_run() -> None:
    tiles = dict(summary(steps_of(RUN)))
    k3 = [x["metrics"]["rollout_corr/k3_kl"] for x in RUN]
    over = np.mean([x["metrics"]["rollout_corr/k3_kl"] > x["metrics"]["fp8plan/kl_limit"] for x in RUN])
    assert tiles["steps"] == "200"
    assert tiles["KL k3, median"] == f"{np.median(k3):.2e}"
    assert tiles["steps over the KL limit"] == percent(float(over))
    rewards = [x["metrics"]["critic/rewards/mean"] for x in RUN]
    first, last = f"{np.mean(rewards[:20]):.3g}", f"{np.mean(rewards[-20:]):.3g}"
    assert tiles["mean reward, first and last tenth of the steps"] == f"{first} → {last}"
    assert tiles["raw ESS, least"] == percent(min(x["metrics"]["fp8plan/ess_raw"] for x in RUN))


def infinite(row: dict[str, Any], at: int = 0) -> dict[str, Any]:
    """The record of a step with a log-prob of minus infinity in the span `at`."""
    spans = [span | {"k3": None} if number == at else span for number, span in enumerate(row["profile"])]
    return row | {"metrics": row["metrics"] | {"rollout_corr/k3_kl": None}, "profile": spans}


def test_an_infinite_kl_is_shown_by_its_robust_one_and_is_over_the_limit(tmp_path: Path) -> None:
    quiet = [x for x in RUN if x["metrics"]["rollout_corr/k3_kl"] < x["metrics"]["fp8plan/kl_limit"]][:8]
    rows = [*quiet[:6], infinite(quiet[6]), infinite(quiet[7])]
    reader = written(tmp_path / "run.jsonl", rows)
    (kl,) = (x for x in shown(reader).splitlines() if x.startswith("KL"))
    robust = rows[-1]["metrics"]["fp8plan/k3_robust"]
    assert kl.split()[:4] == ["KL", "k3", "robust", f"{robust:.2e}"]
    assert "k3 infinite; limit 4.0e-03" in kl
    assert len(kl.split()[-1]) == 8  # a bar for every step
    tiles = dict(summary(reader.steps))
    assert tiles["steps over the KL limit"] == "25.0%"
    assert tiles["steps with infinite k3, counted as the robust one"] == "2"
    assert "infinite" not in " ".join(dict(summary(steps_of(quiet))))
    first, late = (trace.y for trace in by_position(reader.steps).data)
    assert len(first) == len(late) + 1  # the span without a number is left out, the others are there
    assert late == pytest.approx([x["k3"] for x in quiet[7]["profile"][1:]])
    page(reader)
    alone = written(tmp_path / "run.jsonl", [quiet[0] | {"profile": [{"first": 0, "tokens": 5, "k3": None}]}])
    assert by_position(alone.steps) is None


def test_a_kl_that_is_infinite_in_its_robust_form_too_is_shown_as_such(tmp_path: Path) -> None:
    metrics = {"rollout_corr/k3_kl": None, "fp8plan/k3_robust": None, "fp8plan/kl_limit": 1e-3}
    reader = written(tmp_path / "run.jsonl", [{"step": 1, "metrics": metrics}])
    (kl,) = (x for x in shown(reader).splitlines() if x.startswith("KL"))
    assert kl.split()[:5] == ["KL", "k3", "inf", "k3", "infinite;"]
    tiles = dict(summary(reader.steps))
    assert (tiles["steps over the KL limit"], tiles["KL k3, median"]) == ("100.0%", "inf")
    page(reader)


def test_a_kl_that_is_not_recorded_is_not_an_infinite_one(tmp_path: Path) -> None:
    metrics = {"fp8plan/k3_robust": 0.5, "fp8plan/kl_limit": 1e-3}
    reader = written(tmp_path / "run.jsonl", [{"step": 1, "metrics": metrics}])
    assert re.search(r"^KL k3 robust +5.00e-01 +limit", shown(reader), re.MULTILINE)
    assert "steps over the KL limit" not in dict(summary(reader.steps))


def test_files_that_cannot_be_used_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"model": "x"}\n')
    with pytest.raises(ConfigError, match=r"no record of a Monitor.*fp8plan plan"):
        write_report(tmp_path / "plan.json", tmp_path / "page.html")
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        write_report(tmp_path / "absent.jsonl", tmp_path / "page.html")
    written(tmp_path / "run.jsonl", RUN[:2])
    before = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"run\.jsonl; allowed: a name that ends in \.html"):
        write_report(tmp_path / "run.jsonl", tmp_path / "run.jsonl")
    assert (tmp_path / "run.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "run.jsonl", tmp_path / "absent" / "page.html")


# The commands


@pytest.fixture
def fp8plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fp8plan", *map(str, words)])
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def test_monitor_once_prints_the_view_and_report_writes_the_page(tmp_path: Path, fp8plan: Any) -> None:
    path = tmp_path / "run.jsonl"
    written(path, RUN)
    code, out, err = fp8plan("monitor", path, "--once")
    assert (code, err) == (0, "")
    assert "step 200" in out
    assert fp8plan("monitor", path)[1] == out  # a pipe is no terminal
    code, out, err = fp8plan("report", path, "-o", tmp_path / "page.html")
    assert (code, out, err) == (0, "", f"written: {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").stat().st_size > 1_000_000
    fp8plan("report", path)
    assert (tmp_path / "run.html").exists()


@pytest.mark.parametrize("command", ["monitor", "report"])
def test_a_command_without_its_file_is_one_line(tmp_path: Path, fp8plan: Any, command: str) -> None:
    code, out, err = fp8plan(command, tmp_path / "absent.jsonl")
    assert (code, out) == (2, "")
    (told,) = err.splitlines()
    assert "absent.jsonl" in told


def test_a_file_that_is_gone_is_told_below_its_last_state_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    reader = written(path, RUN[:3])
    assert look(reader) == ""
    path.rename(tmp_path / "away.jsonl")
    told = look(reader)
    text = shown(reader, trouble=told)
    assert "run.jsonl is gone" in text
    assert "step 3," in text
    path.mkdir()
    assert "Is a directory" in look(reader)
    path.rmdir()
    path.touch()
    assert look(reader) == ""
    path.unlink()
    assert "run.jsonl is gone" in shown(reader, trouble=look(reader))  # also where there is nothing else to show


class Viewer:
    """`fp8plan monitor` on a terminal of its own."""

    def __init__(self, path: Path, columns: int = 80, **env: str) -> None:
        self.leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        command = [sys.executable, "-m", "fp8plan", "monitor", str(path), "--every", "0.1"]
        self.process = subprocess.Popen(
            command,
            stdout=follower,
            stderr=follower,
            stdin=follower,
            env={**os.environ, "TERM": "xterm", **env},
            start_new_session=True,
            # What runs in a shell's background has SIGINT ignored, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(follower)

    def until(self, text: str) -> str:
        """Read what the terminal shows from now on, up to `text`."""
        seen, end = "", time.monotonic() + 60
        while text not in seen and time.monotonic() < end:
            if select.select([self.leader], [], [], 0.1)[0]:
                try:
                    seen += os.read(self.leader, 65536).decode(errors="replace")
                except OSError:
                    break
        assert text in seen, seen[-2000:]
        return seen

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=20)

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


def test_monitor_waits_for_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Viewer(path) as viewer:
        assert "waiting for" in viewer.until("ctrl-c ends this")
        written(path, RUN[:3])
        viewer.until("step 3,")
        assert viewer.interrupt() == 0
    with Viewer(tmp_path / "never.jsonl") as viewer:
        viewer.until("ctrl-c ends this")
        assert viewer.interrupt() == 0


def test_monitor_on_an_ascii_terminal_has_bars_of_ascii(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, RUN)
    with Viewer(path, PYTHONIOENCODING="ascii", LC_ALL="C") as viewer:
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", viewer.until("last events"))
        assert text.isascii()
        assert re.search(r"KL k3 .*limit [^|]*\|[._=+*%#-]{20,}", text)
        assert viewer.interrupt() == 0


@pytest.mark.parametrize("columns", [60, 45, 30])
def test_on_a_narrow_terminal_the_newest_steps_stay(tmp_path: Path, columns: int) -> None:
    rows = [row | {"metrics": row["metrics"] | {"rollout_corr/k3_kl": 10.0 ** (row["step"] - 40)}} for row in RUN[:30]]
    text = shown(written(tmp_path / "run.jsonl", rows), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    (kl,) = (x.rstrip() for x in text.splitlines() if x.startswith("KL k3 "))
    assert kl.endswith(BARS[-1])  # it has risen up to the last step
    assert ("limit 4.0e-03" in kl) is (columns == 60)
    (head,) = (x for x in text.splitlines() if "last " in x and "now" in x)
    assert int(head.split("last ")[1].split()[0]) == len(kl.split()[-1])


def test_what_is_no_run_file_is_one_error(tmp_path: Path, fp8plan: Any) -> None:
    for name, content in (("binary", bytes(range(256)) * 40), ("zeros", bytes(4096)), ("plan.json", b'{"model": 1}\n')):
        (tmp_path / name).write_bytes(content)
        code, out, err = fp8plan("monitor", tmp_path / name, "--once")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{name} has no record of a Monitor; give the run file" in err
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero"):
        code, out, err = fp8plan("monitor", name, "--once")
        assert (code, out) == (2, "")
        assert "no regular file" in err
    for content in (b"", b'{"step": 1, "metr'):  # of a run that has just begun
        (tmp_path / "begun.jsonl").write_bytes(content)
        assert "no step yet" in fp8plan("monitor", tmp_path / "begun.jsonl", "--once")[1]


def test_a_cold_start_is_no_warning(tmp_path: Path) -> None:
    guard = guard_line_without_warning(tmp_path, {"as_fast": False, "cold": True, "causes": []})
    assert "\x1b[33m" not in guard


def test_monitor_follows_a_file_that_grows_goes_and_comes_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, RUN[:3])
    with Viewer(path) as viewer:
        until = viewer.until
        until("step 3,")
        append(path, line(RUN[3]))
        until("step 4,")
        with open(path, "ab") as file:  # a torn line is not shown, and stops nothing
            file.write(line(RUN[4])[:50])
        append(path, line(RUN[5]))
        until("step 6,")
        path.rename(tmp_path / "away.jsonl")
        until("run.jsonl is gone")
        (tmp_path / "away.jsonl").rename(path)
        append(path, line(RUN[6]))
        until("step 7,")
        path.unlink()
        until("run.jsonl is gone")
        append(path, line(RUN[1]))  # another run
        until("step 2,")
        append(path, line(RUN[5]))
        until("step 6,")
        viewer.process.send_signal(signal.SIGINT)
        assert "Traceback" not in until("step 6,")  # the last picture stays on the screen
        assert viewer.process.wait(timeout=20) == 0


def test_plotly_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in sys.modules if x.partition(".")[0] == "plotly"] + ["plotly"]:
        monkeypatch.setitem(sys.modules, name, None)
    written(tmp_path / "run.jsonl", RUN[:2])
    with pytest.raises(ConfigError, match=re.escape("plotly; type: pip install 'fp8plan[report]'")):
        write_report(tmp_path / "run.jsonl", tmp_path / "page.html")


def test_reading_a_run_needs_no_torch(tmp_path: Path) -> None:
    written(tmp_path / "run.jsonl", RUN[:2])
    code = (
        "import sys; from fp8plan import cli; sys.argv = ['fp8plan', 'monitor', sys.argv[1]]\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "import json; print(json.dumps([x for x in ('torch', 'vllm', 'plotly') if x in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.jsonl")], capture_output=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
