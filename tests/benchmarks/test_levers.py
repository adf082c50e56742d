"""Predictions that were frozen before a measurement, and what judges them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import frozen, levers, limits
from benchmarks.gpu.levers import accepted, head_config, small, stopped_after
from fp8plan import jsonl
from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.configs import find_config
from fp8plan.model.tune.levers import MORE


def test_a_prediction_is_that_of_the_hosts_between_which_it_lies() -> None:
    rows = [{frozen.HOST: us, "seconds": 0.0 if us is None else 10.0 * us} for us in frozen.HOST_LOOPS_US]
    assert frozen.on_host(rows, ["seconds"], None) == {"seconds": 0.0}
    assert frozen.on_host(rows, ["seconds"], 300e-6) == {"seconds": pytest.approx(3000)}
    assert frozen.on_host(rows, ["seconds"], 1.0) == {"seconds": 10.0 * max(filter(None, frozen.HOST_LOOPS_US))}


def test_what_was_measured_is_not_predicted_again(tmp_path: Path) -> None:
    predictions, measured = tmp_path / "new" / "predictions.jsonl", tmp_path / "runs.jsonl"
    frozen.freeze(predictions, measured, [{"seconds": 1.0}])
    measured.write_text("{}\n")
    with pytest.raises(ConfigError, match="is measured already"):
        frozen.freeze(predictions, measured, [{"seconds": 2.0}])
    assert jsonl.rows(predictions) == [{"seconds": 1.0}]


def test_every_cell_and_every_lever_is_predicted_for_every_host() -> None:
    predicted = jsonl.rows(limits.PREDICTIONS)
    assert len(predicted) == len(list(limits.cells())) * len(frozen.HOST_LOOPS_US) == 132
    of_levers = {
        (row["case"], row["lever"], row["acceptance"], row[frozen.HOST]) for row in jsonl.rows(levers.PREDICTIONS)
    }
    expected = set()
    for case in levers.CASES:
        pairs: list[tuple[str, float | None]] = [(name, None) for name in case.levers]
        pairs += [(method, x) for method in case.engines[1:] for x in levers.ACCEPTANCES]
        expected |= {(case.name, *pair, loop) for pair in pairs for loop in frozen.HOST_LOOPS_US}
    assert of_levers == expected


def limits_row(seqs: int, seconds: float, gain: float, loop_us: int | None, named: int) -> dict[str, Any]:
    setting = dict(zip(limits.SETTING, (seqs, 512, 8192, 0.9), strict=True))
    numbers = dict(zip(limits.SECONDS, (seconds, 0.9 * seconds, 1.1 * seconds), strict=True))
    gains = dict(zip(limits.GAINS, (gain, 0.9 * gain, 1.1 * gain), strict=True))
    cell = dict(zip(limits.CELL, ("m", "bf16", "w"), strict=True))
    return cell | setting | {frozen.HOST: loop_us, "named": setting | {"max_num_seqs": named}} | numbers | gains


def test_limits_are_judged_by_the_setting_that_tune_names() -> None:
    predicted = [
        limits_row(seqs, scale * seconds, gain, loop, named=64)
        for loop, scale in ((None, 1.0), (260, 2.0), (540, 2.0))
        for seqs, seconds, gain in ((64, 10.0, 1.0), (128, 15.0, 1.5), (256, 30.0, 3.0))
    ]
    none = limits.judged(predicted, [])
    assert "| cells measured | 0 of 3 |" in limits.verdicts(none)
    assert limits.table(none).count("not yet") == 3
    records = [row | {"seconds": x, "host_loop_s": 4e-4} for row, x in zip(predicted, (20.0, 29.0, 19.0), strict=False)]
    those = limits.judged(predicted, records)
    assert [cell.own["predicted_s"] for cell in those] == [20.0, 30.0, 60.0]
    assert [cell.is_named for cell in those] == [True, False, False]
    answers = limits.verdicts(those)
    for line in (
        "| cells measured | 3 of 3 |",
        "hold what was measured | 2 of 3 |",  # 19 s instead of 60
        "worst error, points | 205.0 |",  # 0.95x instead of 3x
        "of these gains that hold | 1 of 2 |",
        "behind the best measured, worst | 5.3% |",
    ):
        assert line in answers
    assert "named" in limits.table(those)


def test_levers_are_judged_at_their_host_and_acceptance() -> None:
    def row(lever: str, acceptance: float | None, loop: int | None, gain: float) -> dict[str, Any]:
        numbers = dict(zip(levers.NUMBERS, (8.0, 8.0 / gain, gain, gain - 0.1, gain + 0.1), strict=True))
        return {"case": "c", "lever": lever, "acceptance": acceptance, frozen.HOST: loop} | numbers

    loops = (None, 260, 540)
    predicted = [row("stop", None, loop, 1.2) for loop in loops]
    predicted += [row("ngram", x, loop, 1 + x) for x in (0.0, 0.5, 1.0) for loop in loops]
    runs: list[dict[str, Any]] = [
        {"case": "c", "arm": arm, "seconds": seconds, "host_loop_s": 4e-4, "acceptance": 0.75}
        for arm, seconds in ((levers.PLAIN, 9.0), (levers.PLAIN, 11.0), ("ngram", 5.0))
    ]
    stop, ngram = levers.judged(predicted, runs)
    assert (stop.gain, stop.acceptance) == (None, None)
    assert (ngram.gain, ngram.acceptance) == (2.0, 0.75)
    assert ngram.predicted["gain"] == pytest.approx(1.75)
    last, _, sentence = levers.table([ngram]).splitlines()[-3:]
    assert last.endswith("| 2.00x | 1.75x (1.65-1.85) | -25.0 |")
    assert sentence.endswith("measured gain: 0 of 1.")
    assert len(levers.judged(predicted, [])) == 1 + 3


def test_arms_are_the_levers_of_tune() -> None:
    tail, prompts, samples = levers.CASES[:3]
    plain, *stopped = levers.arms(tail, tail.workload.batch(), levers.PLAIN)
    assert plain.enough is None
    for arm, share in zip(stopped, MORE, strict=True):
        assert (arm.enough, len(arm.batch.prompts)) == (256, 256 + round(256 * share))
    last, first = levers.arms(prompts, prompts.workload.batch(), levers.PLAIN)
    assert last.batch.prompts.tolist() == sorted(first.batch.prompts)
    assert first.batch.prompts.tolist() == sorted(first.batch.prompts, reverse=True)
    together, apart = levers.arms(samples, samples.workload.batch(), levers.PLAIN)
    assert together.batch.prompt_ids[:4].tolist() == [0, 0, 0, 0]
    assert apart.batch.prompt_ids[:4].tolist() == [0, 1, 2, 3]
    assert len(small(samples.workload.batch()).prompts) == 32
    assert [arm.name for arm in levers.arms(levers.CASES[-1], samples.workload.batch(), "eagle3")] == ["eagle3"]
    assert all(case.workload.batch().longest <= (levers.LIMITS.max_model_len or 0) for case in levers.CASES)


class Engine:
    """vLLM's LLMEngine as far as an abort needs it: a request ends in each step."""

    def __init__(self, requests: int) -> None:
        self.output_processor = SimpleNamespace(request_states={str(i): None for i in range(requests)})

    def step(self) -> list[Any]:
        self.output_processor.request_states.popitem()
        return [SimpleNamespace(finished=True), SimpleNamespace(finished=False)]

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert internal
        for name in names:
            del self.output_processor.request_states[name]


def ended(engine: Engine) -> Iterator[Any]:
    while engine.output_processor.request_states:
        yield from (output for output in engine.step() if output.finished)


@pytest.mark.parametrize(("enough", "expected"), [(None, 10), (10, 10), (7, 7), (1, 1)])
def test_the_rest_is_aborted_when_enough_have_ended(enough: int | None, expected: int) -> None:
    engine = Engine(10)
    with stopped_after(engine, enough):
        assert len(list(ended(engine))) == expected
    assert "step" not in vars(engine)


def test_accepted_drafts_are_those_of_vllms_counters() -> None:
    metrics = [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=10),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[6, 3, 1]),
        SimpleNamespace(name="vllm:num_preemptions", value=5),
    ]
    assert accepted(SimpleNamespace(get_metrics=lambda: metrics)) == {"drafts": 10, "accepted": 10, "accepted first": 6}


def test_a_head_is_a_layer_of_its_model() -> None:
    head = head_config(find_config(levers.MODEL)[0])
    model = ModelShape.from_hf(levers.MODEL)
    assert (head["num_hidden_layers"], head["vocab_size"]) == (1, model.vocab_size)
    assert head["hidden_size"] == model.hidden_size
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["eagle_aux_hidden_state_layer_ids"] == [6, 18, 30]


def test_a_record_finds_its_prediction() -> None:
    """The cells were run on an H100 before, by the same command."""
    records = jsonl.rows(limits.RESULTS / "limits_h100" / "rollouts.jsonl")
    those = limits.judged(jsonl.rows(limits.PREDICTIONS), records)
    assert sum(cell.measured is not None for cell in those) == len(records) == 12
    assert "| cells measured | 12 of 22 |" in limits.verdicts(those)
