"""The table of issue 39's examples is that of the examples that there are, and the tests that it names exist."""

from __future__ import annotations

import ast
from pathlib import Path

import odd_measurements
import pytest

from fp8plan import jsonl

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.trl  # its template is in the tokenizer's files
def test_each_example_has_an_answer_of_both_versions_and_no_other_has() -> None:
    asked = [(example.point, example.title) for example in odd_measurements.examples()]
    assert len(set(asked)) == len(asked)
    rows = jsonl.rows(odd_measurements.RESULTS)
    for label in ("before", "after"):
        assert [(row["point"], row["input"]) for row in rows if row["label"] == label] == asked


def test_no_answer_of_now_is_a_traceback() -> None:
    rows = [row for row in jsonl.rows(odd_measurements.RESULTS) if row["label"] == "after"]
    assert rows
    assert [row for row in rows if "Traceback" in row["answer"]] == []


@pytest.mark.parametrize("example", odd_measurements.LIVE, ids=lambda x: x.example)
def test_the_tests_that_are_named_exist(example: odd_measurements.Live) -> None:
    for file, names in example.tests.items():
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert set(names) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, file
