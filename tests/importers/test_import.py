"""`fp8plan import`: what verl, TRL and SkyRL write becomes records that `plan` and `validate` read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_logs import VERL_WRITERS, skyrl_batch, skyrl_dump, verl_dump
from trl_runs import model as words_model
from trl_runs import share_of_even, trainer_of

from fp8plan.errors import ConfigError
from fp8plan.importers.figures import figures
from fp8plan.importers.records import import_rollouts

VERL = pytest.mark.verl


# --- verl


@VERL
@pytest.mark.parametrize("module", VERL_WRITERS)
def test_verls_dumps(tmp_path: Path, module: str) -> None:
    found = import_rollouts("verl", verl_dump(tmp_path, module=module), tokenizer=words_model())
    assert [record["step"] for record in found.records] == [1, 2]
    record = found.records[0]
    assert record["prompt_ids"] == [0, 0, 1, 1]
    assert record["prompt_lengths"] == [3, 3, 2, 2]
    assert record["response_lengths"] == [2, 4, 1, 1]  # an empty text has its end
    assert "seconds" not in record
    (note,) = found.notes
    assert "not known: model, gpu, engine_version, precision, seconds" in note
    assert "--log, where verl logs timing_s/gen" in note


@VERL
@pytest.mark.parametrize("backend", ["file", "console", "tensorboard"])
def test_seconds_come_from_verls_own_loggers(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "figures.jsonl"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    tracking = Tracking("project", "run", [backend])
    for step in (1, 2):
        mean = {"response_length/mean": 2.0, "training/rollout_probs_diff_mean": np.float64(0.25)}
        tracking.log({"timing_s/gen": np.float64(10.5 + step), **mean}, step)
    tracking.finish()
    (tmp_path / "run.log").write_text(f"(TaskRunner pid=7) {capsys.readouterr().out}")
    log = {"file": "figures.jsonl", "console": "run.log", "tensorboard": "board"}[backend]
    folder = verl_dump(tmp_path / "dumps")
    found = import_rollouts("verl", folder, tokenizer=words_model(), log=tmp_path / log, last=1)
    (record,) = found.records
    assert (record["step"], record["seconds"]) == (2, 12.5)
    assert figures(tmp_path / log)[1]["training/rollout_probs_diff_mean"] == 0.25
    assert not [note for note in found.notes if "a response has" in note]


@VERL
def test_another_tokenizers_count_is_told(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "data": {"response_length/mean": 4.0, "timing_s/gen": 1.0}}\n')
    found = import_rollouts("verl", verl_dump(tmp_path), tokenizer=words_model(), log=tmp_path / "log.jsonl")
    assert "step 1: a response has 2.0 tokens as counted, 4.0 in the log (-50.0%)" in found.notes[0]
    assert "timing_s/gen of 1 of 2 rollouts" in found.notes[1]


# --- TRL: a real run, which trains on each generation batch twice


@dataclass
class Trained:
    folder: Path
    lengths: list[list[int]]  # of each rollout's completions, without special tokens


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    import torch
    from trl import GRPOTrainer

    torch.set_num_threads(1)

    folder, seen = tmp_path_factory.mktemp("trl"), []

    def reward(completion_ids: list[list[int]], **more: Any) -> list[float]:
        seen.append([sum(token < 1022 for token in ids) for ids in completion_ids])
        return share_of_even(completion_ids, **more)

    settings = {"use_vllm": False, "log_completions": True, "steps_per_generation": 2, "max_steps": 4}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    settings |= {"save_strategy": "steps", "save_steps": 4, "report_to": ["tensorboard"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl_runs.share_of_even", reward)
        trainer_of(GRPOTrainer, folder, **settings).train()
    return Trained(folder, seen)


@pytest.mark.trl
def test_trls_completions(trained: Trained) -> None:
    assert len(list(trained.folder.glob("completions/*.parquet"))) == 4
    found = import_rollouts("trl", trained.folder, tokenizer=words_model())
    assert [record["step"] for record in found.records] == [1, 3]  # 2 and 4 trained on the same completions
    assert len(trained.lengths) == 2
    for record, lengths in zip(found.records, trained.lengths, strict=True):
        assert sorted(record["response_lengths"]) == sorted(max(1, x) for x in lengths)
        assert record["prompt_lengths"] == [8] * 16
        assert record["prompt_ids"] == [prompt for prompt in range(4) for _ in range(4)]
    assert "trl logs no seconds of generation" in found.notes[-1]


@pytest.mark.trl
def test_trls_figures_agree_with_the_completions(trained: Trained) -> None:
    state = trained.folder / "checkpoint-4" / "trainer_state.json"
    mean = sum(trained.lengths[0]) / len(trained.lengths[0])
    assert figures(state)[1]["completions/mean_length"] == pytest.approx(mean, rel=0.02)
    (board,) = {path.parent for path in trained.folder.rglob("*tfevents*")}
    assert figures(board)[1]["train/completions/mean_length"] == pytest.approx(mean, rel=0.02)
    found = import_rollouts("trl", trained.folder, tokenizer=words_model(), log=state)
    assert not [note for note in found.notes if "a response has" in note]


def conversation(folder: Path, step: int, content: Any = "w1 w2") -> None:
    """A file as TRL's `log` writes it, of messages."""
    prompt, completion = [{"role": "user", "content": content}], [{"role": "assistant", "content": "w3 w4 w5"}]
    table = {"step": [step] * 2, "prompt": [prompt] * 2, "completion": [completion] * 2, "advantage": [0.0] * 2}
    pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def test_conversations_are_rendered_as_the_run_did(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    conversation(tmp_path, 5)
    tokenizer = AutoTokenizer.from_pretrained(words_model())
    tokenizer.chat_template = (
        "{% for m in messages %}w7 w7 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w7 w7 {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (record,) = import_rollouts("trl", tmp_path, tokenizer=str(tmp_path / "tokenizer")).records
    assert record["prompt_lengths"] == [6, 6]
    assert record["response_lengths"] == [3, 3]
    with pytest.raises(ConfigError, match=r"cannot render .*chat_template.*give the one that the run used"):
        import_rollouts("trl", tmp_path, tokenizer=words_model())


def test_what_an_evaluation_wrote_over_is_left_out_by_name(tmp_path: Path) -> None:
    for step in (5, 6):
        pd.DataFrame({"step": [step], "prompt": ["w1"], "completion": ["w2 " * step]}).to_parquet(
            tmp_path / f"completions_{step:05d}.parquet"
        )
    history = [{"step": 6, "completions/mean_length": 6.0}, {"step": 6, "eval_completions/mean_length": 3.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    found = import_rollouts("trl", tmp_path, tokenizer=words_model(), log=tmp_path / "trainer_state.json")
    assert [record["step"] for record in found.records] == [5]
    assert found.notes[0] == "left out, as an evaluation wrote over them: steps 6"


@pytest.mark.parametrize("parts", [[{"type": "image"}, {"type": "text", "text": "w1"}], ["w1", "w2"]])
def test_parts_of_other_kinds_than_text_are_refused(tmp_path: Path, parts: list[Any]) -> None:
    conversation(tmp_path, 5, parts)
    with pytest.raises(ConfigError, match="rollouts with images cannot be imported"):
        import_rollouts("trl", tmp_path, tokenizer=words_model())


# --- SkyRL

REQUESTS = [([5, 6, 7], [1, 2]), ([8, 0], [1, 2, 3, 4]), ([5, 6, 7], [9]), ([8, 0], [0, 0, 0])]


def test_skyrls_batches_need_no_tokenizer_and_no_skyrl(tmp_path: Path) -> None:
    folder = tmp_path / "dumped_data"
    folder.mkdir()
    for step in (2, 10):
        skyrl_dump(folder / f"global_step_{step}_training_input.pkl", *skyrl_batch(REQUESTS, padding=2))
    (tmp_path / "log.jsonl").write_text('{"_step": 10, "timing/generate": 33.0}\n')
    found = import_rollouts("skyrl", tmp_path, log=tmp_path / "log.jsonl")
    assert [record["step"] for record in found.records] == [2, 10]
    record = found.records[1]
    assert record["prompt_ids"] == [0, 0, 1, 1]
    assert record["prompt_lengths"] == [3, 3, 2, 2]
    assert record["response_lengths"] == [2, 1, 4, 3]
    assert record["seconds"] == 33.0
    assert "timing/generate of 1 of 2" in found.notes[0]


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    import pickle

    class Attack:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    file = tmp_path / "global_step_1_training_input.pkl"
    file.write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ConfigError, match=r"global_step_1_training_input.pkl as a SkyRL training batch"):
        import_rollouts("skyrl", tmp_path)
    assert not (tmp_path / "ran").exists()


# --- what cannot be used


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        ("verl", "trainer.rollout_data_dir=FOLDER"),
        ("trl", "log_completions=True"),
        ("skyrl", "trainer.dump_data_batch=true"),
        ("slime", "unknown trainer 'slime'; allowed: verl, trl, skyrl"),
    ],
)
def test_an_empty_folder_says_what_to_set(tmp_path: Path, trainer: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        import_rollouts(trainer, tmp_path)


def line(folder: Path, text: str = '{"input": "w1", "output": "w2"}') -> Path:
    (folder / "3.jsonl").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (None, {}, "the log holds text, not tokens; give --tokenizer"),
        (None, {"tokenizer": "./nowhere"}, "there is no tokenizer './nowhere'"),
        (None, {"log": "none.jsonl"}, "there is no log none.jsonl"),
        (None, {"engine": {"gpu": "h300"}}, "h300"),
        (None, {"engine": {"precision": "fp9"}}, "unknown precision 'fp9'"),
        (None, {"engine": {"model": "Qwen3-9B"}}, "Qwen3-9B"),
        ("", {}, "3.jsonl holds no whole response; delete it"),
        ('{"input": "w1"}', {}, "line 1 of .*3.jsonl: field .output. is missing"),
        ("{", {}, "line 1 of .*3.jsonl is not JSON"),
    ],
)
def test_what_cannot_be_imported(tmp_path: Path, text: str | None, options: Any, told: str) -> None:
    folder = line(tmp_path) if text is None else line(tmp_path, text)
    with pytest.raises(ConfigError, match=told):
        import_rollouts("verl", folder, **options)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("log.txt", "step 1 of 5\n", "holds no figures of steps"),
        ("trainer_state.json", "[]", "not a trainer's state"),
        ("log.jsonl", '{"loss": 1}\n', "holds no figures of steps"),
    ],
)
def test_a_log_without_figures(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        figures(tmp_path / name)


# --- odd and torn input: what nobody reads is not judged

JUNK = ["NaN", "-Infinity", "1e999", '[{"deep": NaN}]', '{"a": Infinity}', "null", '"x"']


@given(st.sampled_from(JUNK), st.sampled_from(["score", "step", "of mine"]))
def test_a_field_that_nobody_reads_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory, value: str, field: str
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    line(folder, f'{{"input": "w1 w2", "{field}": {value}, "output": "w3 w4 w5"}}')
    (folder / "log.jsonl").write_text(f'{{"step": 3, "data": {{"timing_s/gen": 2.0, "{field}": {value}}}}}\n')
    for last in (None, 1):
        (record,) = import_rollouts(
            "verl", folder, tokenizer=words_model(), log=folder / "log.jsonl", last=last
        ).records
        assert (record["prompt_lengths"], record["response_lengths"], record["seconds"]) == ([2], [3], 2.0)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"soon"', "null", "1e999", "[1]"])
def test_seconds_that_are_no_number_are_not_known(tmp_path: Path, value: str) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"step": 3, "data": {{"timing_s/gen": {value}, "loss": 1}}}}\n')
    found = import_rollouts("verl", line(tmp_path), tokenizer=words_model(), log=tmp_path / "log.jsonl")
    assert "seconds" not in found.records[0]
    assert "timing_s/gen of 0 of 1 rollouts" in found.notes[-1]


LINES = [b'{"input": "w1", "output": "w2"}\n', '{"input": "w1 w2", "output": "w3 w4 é €"}\n'.encode()]


@given(st.integers(1, len(LINES[1]) - 2))
def test_a_last_line_that_is_torn_anywhere_is_left_out_with_a_note(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    (folder / "2.jsonl").write_bytes(LINES[0])
    (folder / "3.jsonl").write_bytes(LINES[0] + LINES[1][:cut])
    (folder / "log.jsonl").write_bytes(
        b'{"step": 2, "data": {"timing_s/gen": 1.5}}\n{"step": 3, "data": {"timing_s/gen": 9.5}}\n{"step": 4'
    )
    for last in (None, 1):
        found = import_rollouts("verl", folder, tokenizer=words_model(), log=folder / "log.jsonl", last=last)
        assert found.records[-1]["response_lengths"] == [1]
        # The seconds are of all responses, and one is lost.
        assert [record.get("seconds") for record in found.records] == [1.5, None][-len(found.records) :]
        log, dump = found.notes[:2]
        assert log == f"line 3 of {folder / 'log.jsonl'}, the last one, is left out: it breaks off"
        assert dump.startswith(f"line 2 of {folder / '3.jsonl'}, the last one, is left out: it breaks off; step 3")


@pytest.mark.parametrize(
    "junk", [b'{"input": "w1", "out', b"\xff\xfe", b"[" * 100_000, b'{"input": "\xff", "output": 1}']
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "3.jsonl").write_bytes(LINES[0] + junk + b"\n" + LINES[1])
    with pytest.raises(ConfigError, match=r"line 2 of .*3\.jsonl(: output is 1; allowed: text| is not JSON)"):
        import_rollouts("verl", tmp_path, tokenizer=words_model(), last=1)


@pytest.mark.parametrize(
    ("newest", "alone"),
    [
        (b"", "4.jsonl holds no whole response; delete it"),
        (b"\n", "4.jsonl holds no whole response; delete it"),
        (b'{"input": "w1', "4.jsonl is not JSON: "),
        (b"[[[[", "4.jsonl is not JSON: "),
    ],
)
def test_a_newest_file_without_a_whole_response_is_left_out_with_a_note(
    tmp_path: Path, newest: bytes, alone: str
) -> None:
    (tmp_path / "3.jsonl").write_bytes(LINES[0])
    (tmp_path / "4.jsonl").write_bytes(newest)
    found = import_rollouts("verl", tmp_path, tokenizer=words_model(), last=1)
    assert [record["step"] for record in found.records] == [3]
    assert found.notes[0].startswith("step 4, the last one, is left out: ")
    (tmp_path / "3.jsonl").unlink()
    with pytest.raises(ConfigError, match=re.escape(alone)):
        import_rollouts("verl", tmp_path, tokenizer=words_model())


@pytest.mark.parametrize("trainer", ["trl", "skyrl"])
@pytest.mark.parametrize("kept", [0, 4, 0.5, 0.99])
def test_a_newest_binary_file_that_breaks_off_is_left_out_and_an_older_one_is_named(
    tmp_path: Path, trainer: str, kept: float
) -> None:
    for step in (1, 2, 3):
        if trainer == "trl":
            row = {"prompt": ["w1"], "completion": [" ".join(["w2"] * step)]}
            pd.DataFrame(row).to_parquet(tmp_path / f"completions_{step}.parquet")
        else:
            skyrl_dump(tmp_path / f"global_step_{step}_training_input.pkl", *skyrl_batch(REQUESTS))
    *_, middle, newest = sorted(tmp_path.iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    for last, steps in ((None, [1, 2]), (1, [2])):
        found = import_rollouts(trainer, tmp_path, tokenizer=words_model(), last=last)
        assert [record["step"] for record in found.records] == steps
        assert f"step 3, the last one, is left out: cannot read {newest}" in found.notes[0]
    newest.write_bytes(whole)
    middle.write_bytes(b"junk")
    assert [x["step"] for x in import_rollouts(trainer, tmp_path, tokenizer=words_model(), last=1).records] == [3]
    with pytest.raises(ConfigError, match=middle.name):
        import_rollouts(trainer, tmp_path, tokenizer=words_model(), last=2)


# --- the console's output: colours, thousands, the end of a log

COLOURS = [
    "{}",
    "\x1b[36m{}\x1b[0m",
    "\x1b[1;38;5;208m{}\x1b[0m",
    "^[[32m{}^[[0m",
    "[32m{}[0m",
    "\x1b]0;title\x07{}\x1b[K",
]
FORMS = ["{:.3f}", "{:,.3f}", "{:_.3f}", "np.float64({:.3f})", "np.float64({:,.3f})"]


@given(
    st.floats(0.001, 1e9),
    st.sampled_from(FORMS),
    st.lists(st.sampled_from(COLOURS), min_size=4, max_size=4),
    st.sampled_from(["", " [repeated 2x across cluster]", "\x1b[32m [repeated 2x across cluster]\x1b[0m"]),
    st.integers(0, 99_999),
    st.sampled_from([",", "'", "’", " ", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"]),
)
def test_seconds_are_found_whatever_a_terminal_was_told(
    tmp_path_factory: pytest.TempPathFactory,
    value: float,
    form: str,
    colours: list[str],
    end: str,
    step: int,
    separator: str,
) -> None:
    log = tmp_path_factory.mktemp("log") / "run.log"
    prefix, at, name, number = (
        colour.format(text)
        for colour, text in zip(
            colours, ("(TaskRunner pid=7)", f"step:{step}", "timing_s/gen", form.format(value)), strict=True
        )
    )
    text = f"{prefix} {at} - other:1 - {name}:{number.replace(',', separator)}{end}\n"
    log.write_text(text, encoding="utf-8")
    assert figures(log) == {step: {"other": 1.0, "timing_s/gen": float(f"{value:.3f}")}}


@pytest.mark.parametrize("text", ["12,5", "1,2345", "1.234,5", "1,234'567", "12.3.4", "fast", "1 23", "12 s"])
def test_a_figure_that_is_no_number_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.log").write_text(f"step:1 - timing_s/gen:{text} - other:1\n")
    assert figures(tmp_path / "run.log") == {1: {"other": 1.0}}


def test_the_last_figure_of_a_line_without_an_end_may_be_half_of_one(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("step:1 - other:1.5 - timing_s/gen:123.4\nstep:2 - other:2.5 - timing_s/gen:12")
    notes: list[str] = []
    found = figures(tmp_path / "run.log", notes.append)
    assert found == {1: {"other": 1.5, "timing_s/gen": 123.4}, 2: {"other": 2.5}}
    assert notes == [f"the last figure in line 2 of {tmp_path / 'run.log'} is left out: the line breaks off"]


def test_a_figure_that_was_logged_and_is_none_is_nan_unless_the_step_has_a_number(tmp_path: Path) -> None:
    rows = ['{"step": 1, "k3": 0.5}', '{"step": 1, "k3": null}', '{"step": 2, "k3": NaN}', '{"step": 2, "k1": 1e999}']
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    found = figures(tmp_path / "log.jsonl")
    assert found[1]["k3"] == 0.5
    assert math.isnan(found[2]["k3"])
    assert found[2]["k1"] == math.inf


def test_rows_of_a_log_that_are_none_are_passed_over(tmp_path: Path) -> None:
    rows = ['{"step": 1, "data": null}', '{"step": NaN, "x": 1}', '{"step": "2", "x": "1,234.5"}', "[1]", "7"]
    (tmp_path / "log.jsonl").write_text("\ufeff" + "\n".join(rows) + "\n", encoding="utf-8")
    assert figures(tmp_path / "log.jsonl") == {2: {"step": 2.0, "x": 1234.5}}
