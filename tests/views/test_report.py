"""The report of a plan: readable at any width, each fact once, no cell cut."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, ShortConv
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.limits import EngineLimits
from fp8plan.model.plan.choice import seconds
from fp8plan.model.plan.plan import Plan
from fp8plan.model.plan.planner import plan
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import list_profiles, profiles_path
from fp8plan.model.rl_step import StepTimes
from fp8plan.model.workload import Workload
from fp8plan.views.known import models_report, profiles_report
from fp8plan.views.report import plan_report
from fp8plan.views.text import Column, fitting

WORK = Workload(32, 16, Fixed(1024), LogNormal(1500, 0.9, 8192))
STEP = StepTimes(train_s=120, logprob_s=40)
CASES: dict[str, dict[str, Any]] = {
    "one layout": {},
    "one layout, whole step": {"trainer": STEP},
    "several layouts": {"gpus": 8},
    "several layouts, whole step": {"gpus": 8, "trainer": STEP},
}


@pytest.fixture(scope="module")
def made() -> dict[str, Plan]:
    return {name: plan("Qwen/Qwen3-32B", "h200", WORK, **options) for name, options in CASES.items()}


def shown(answer: Plan, width: int, every: bool = False) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as caught:
        console.print(plan_report(answer, every))
    return caught.get()


def table_rows(text: str) -> list[str]:
    """Lines of both tables: those that start with a precision, marked or not."""
    return [line for line in text.splitlines() if line[2:].split(" ")[0] in PRESETS and line[:2] in ("  ", "> ")]


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("case", CASES)
def test_no_line_is_too_wide_and_no_cell_is_cut(made: dict[str, Plan], case: str, width: int) -> None:
    answer, text = made[case], shown(made[case], width, every=True)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    rows, count = table_rows(text.split("\n- ")[0]), len(answer.choices)
    speed, step, mismatch = rows[:count], rows[count : -len(PRESETS)], rows[-len(PRESETS) :]
    assert len(step) == (count if "step" in case else 0)
    assert [line[2:].split()[0] for line in speed] == [c.precision for c in answer.choices]
    assert [line[2:].split()[0] for line in mismatch] == list(PRESETS)  # once each, whatever the layouts
    for line, choice in zip(speed, answer.choices, strict=True):
        assert choice.gain is not None
        assert choice.best_gain.cell in line
        assert ("(" in choice.gain.cell) == (choice.precision != "bf16")
        assert ("TPxDP" in text) == (f"{choice.tensor_parallel}x{choice.data_parallel}" in line.split())
    for line, choice in zip(step, answer.choices[: len(step)], strict=True):
        assert choice.step_gain is not None
        assert choice.best_step_gain.cell in line
        assert ("(" in choice.step_gain.cell) == (choice.precision != "bf16")
    for line, choice in zip(mismatch, answer.choices[: len(PRESETS)], strict=True):
        assert f" {choice.risk} " in f"{line} "
        assert choice.remedy is None or width < 200 or choice.remedy.remedies.options in line
    assert all(" ".join(reason.split()) in " ".join(text.split()) for reason in answer.reasons)


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_row_is_marked_in_every_table(made: dict[str, Plan], case: str) -> None:
    answer = made[case]
    chosen = answer.choices[answer.chosen]
    marked = [line.split()[1:] for line in table_rows(shown(answer, 100)) if line.startswith("> ")]
    assert [row[0] for row in marked] == [chosen.precision] * (3 if "step" in case else 2)
    if "several" in case:
        assert marked[0][1] == marked[-2][1] == f"{chosen.tensor_parallel}x{chosen.data_parallel}"


@pytest.mark.parametrize("case", CASES)
def test_a_table_has_the_ten_best_rows_with_the_choice_and_the_baseline(made: dict[str, Plan], case: str) -> None:
    answer = made[case]
    slowest = max(range(len(answer.choices)), key=lambda index: answer.choices[index].seconds)
    for chosen in (answer.chosen, slowest):
        text = shown(replace(answer, chosen=chosen), 200)
        rows = table_rows(text.split("\n- ")[0])[: -len(PRESETS)]
        number = len(rows) // 2 if "step" in case else len(rows)
        assert number == min(len(answer.choices), 10)
        left_out = len(answer.choices) - number
        assert ("--all" in text) == (left_out > 0)
        assert text.count(f"{left_out} more row{'s' * (left_out > 1)}: --all") == (left_out > 0)
        kept = {answer.choices[chosen].makespan_s, answer.choices[answer.baseline or 0].makespan_s}
        others = sorted(c.makespan_s or 0.0 for c in answer.choices if c.makespan_s not in kept)
        for makespan in (*kept, *others[: number - len(kept)]):
            assert any(f" {seconds(makespan)} (" in row for row in rows), makespan


def test_the_second_table_has_no_figure_of_a_correction_that_is_not_used(made: dict[str, Plan]) -> None:
    for answer in made.values():
        assert set(answer.thresholds) == {"token_tis"}
        text = shown(answer, 200)
        assert "rejected" not in text
        assert [line for line in text.splitlines() if "MIS" in line and "is not used" not in line] == []


def test_everything_fits_where_there_is_room_and_the_rest_is_named_where_there_is_none(made: dict[str, Plan]) -> None:
    answer = made["several layouts, whole step"]
    wide, narrow = shown(answer, 200), shown(answer, 80)
    header = wide.split("─")[0]
    for word in ("tokens", "/s", "tail", "KV"):
        assert word in header
    assert "too narrow for" not in wide
    note = next(line for line in narrow.splitlines() if line.startswith("too narrow for: "))
    assert "tokens/s" in note
    assert "/s" not in narrow.split("─")[0]
    notes = [line for line in shown(made["one layout"], 80).splitlines() if line.startswith("too narrow for: ")]
    assert notes == ["too narrow for: allowed with (--json has them)"]


def test_replicas_are_said_where_a_figure_is_of_one_or_of_all(made: dict[str, Plan]) -> None:
    several, one = shown(made["several layouts"], 200), shown(made["one layout"], 200)
    assert "KV tok./" in several
    assert "preemptions: in all replicas" in several
    assert "replica" not in one.split("\n- ")[0]
    answer = plan("Qwen/Qwen3-8B", "h200", WORK, limits=EngineLimits(tensor_parallel_size=2, data_parallel_size=4))
    assert "8 x h200_sxm (4 replicas, TP 2)" in shown(answer, 100)
    assert "8 x h200_sxm (every TP x DP layout)" in several


def test_the_title_tells_the_longest_response_from_the_limit(made: dict[str, Plan]) -> None:
    answer = made["one layout"]
    work = {key: value for key, value in answer.workload.items() if key != "longest_response_tokens"}
    title = shown(replace(answer, workload={**work, "longest_response_tokens": 7001}), 200).split("precision")[0]
    for part in ("32 prompts x 16 samples", "prompts of 1,024 tokens", "longest 7,001 of at most 8,192"):
        assert part in title
    before = shown(replace(answer, workload=work), 200).split("precision")[0]  # a plan of an older version
    assert "longest" not in before
    assert "at most 8,192" in before
    varied = plan("Qwen/Qwen3-0.6B", "h200", replace(WORK, prompt_lengths=LogNormal(300, 1, 900)))
    assert "prompts of up to 900 tokens" in shown(varied, 200)


def test_one_prompt_is_no_prompts(made: dict[str, Plan]) -> None:
    answer = next(iter(made.values()))
    one = replace(answer, workload=answer.workload | {"prompts": 1, "samples": 1})
    assert "1 prompt x 1 sample;" in shown(one, 200)


def test_profiles_are_readable_at_80_columns_and_their_test_is_told_once() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(profiles_report(list_profiles(profiles_path())))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 45
    assert "a100_sxm, b200, h100_sxm, l40s: tested on h200_sxm: makespan of 116" in text
    assert text.count("mean error") == 1
    assert "any GPU" in text
    words = " ".join(text.split())
    assert "h100_sxm linear.fp8_block (60 us with the least traffic, 63 with 4 times)" in words
    assert "left out by the imports (--json: by GPU and kernel): sizes that no modelled engine runs (" in words


def test_an_import_that_did_not_count_its_rows_says_so() -> None:
    (entry,) = [entry for entry in list_profiles(profiles_path()) if entry.gpu == "l40s"]
    for counts, said in (
        (None, "not recorded"),
        ({"moe.bf16": {"kept": 3}}, "3 of 3"),
    ):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(profiles_report([entry._replace(table_rows=counts)]))
        assert said in console.export_text()


def test_legends_define_the_words_of_the_headers(made: dict[str, Plan]) -> None:
    text = shown(made["several layouts"], 200)
    for word in (
        "speed-up: over the best bf16 (",
        "same layout: over bf16 on it",
        "tail:",
        "clipped:",
        "90% band",
    ):
        assert word in text


def test_one_reason_is_told_once_for_all_precisions() -> None:
    text = shown(plan("Qwen/Qwen3-0.6B", "a100", WORK), 200)
    (line,) = [line for line in text.splitlines() if line.startswith("Not available")]
    assert line.startswith("Not available: fp8_block, fp8_block+fp8_kv: fp8plan does not model FP8 weights")
    assert "TP" not in line
    assert len(table_rows(text)) == 4  # bf16 and fp8_kv, in both tables


def test_capacity_is_told_once_for_all_layouts() -> None:
    answer = plan("meta-llama/Llama-3.1-70B", "l40s", WORK, gpus=8)
    absent = {(c.precision, c.tensor_parallel) for c in answer.choices if not c.available}
    assert len({tp for _, tp in absent}) > 1
    text = " ".join(shown(answer, 80).split())
    (told,) = re.findall(r"Not available: (.*?): for instance", text)
    groups = re.findall(r"([\w+, ]+) \(TP ([\d, ]+)\)", told)
    named = {(p.strip(), int(tp)) for names, sizes in groups for p in names.split(", ") for tp in sizes.split(", ")}
    assert named == absent
    assert text.count("does not fit") == 1
    assert f"tensor_parallel_size {max(tp for _, tp in absent)}: " in text  # the one nearest to fitting


def test_columns_give_way_by_rank_and_essential_ones_stay() -> None:
    columns = [Column("name", ["x" * 10]), Column("pre-\nempt", ["1"], rank=2), Column("two\nlines", ["2"], rank=1)]
    assert fitting(columns, 10 + 2 + 4 + 2 + 5) == (columns, [])
    assert fitting(columns, 10 + 2 + 4 + 2 + 5 - 1) == ([columns[0], columns[2]], ["preempt"])
    assert fitting(columns, 3) == ([columns[0]], ["preempt", "two lines"])


def test_the_table_of_models_shows_every_size_of_layers_that_differ() -> None:
    base = ModelShape.from_hf("Qwen/Qwen3-8B")
    first = base.layers[0]
    mixers = (Attention(16, 8, 128, window=512), Attention(32, 2, 256), ShortConv(4096, 3))
    mixed = replace(base, name="mixed", layers=tuple(replace(first, mixer=mixer) for mixer in mixers))
    latent = replace(base, name="latent", layers=(replace(first, mixer=LatentAttention(64, 0, 512, 128, 64, 128)),))
    console = Console(width=100, color_system=None)
    with console.capture() as caught:
        console.print(models_report([mixed, latent]))
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip())[2:] for line in caught.get().splitlines() if line}
    assert rows["mixed"] == ["3", "32, 16", "8, 2", "-", "6,144"]
    assert rows["latent"] == ["1", "64", "-", "-", "1,152"]
