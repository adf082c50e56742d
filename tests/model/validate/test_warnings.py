"""Warnings about committed records: of an older version, too, only what is true of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gate import files
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import routing_warnings

SIBLING = "no profile of h100_sxm for vllm {version}: using h200_sxm's vllm {version} (same architecture)"
DRAWN = profiles_path() / "h200_sxm" / "vllm-0.33.0" / "validation" / "simulated_routing.jsonl"


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(profiles_path()).as_posix())
def test_a_committed_record_warns_of_its_profile_alone(path: Path) -> None:
    records = read_records(path)
    versions = {(record.fields["gpu"], record.fields["engine_version"]) for record in records}
    assert not [warning for record in records for warning in routing_warnings(record)]
    for gpu, version in versions:
        warnings = load_profile(gpu, version)[1]
        if gpu == "h100_sxm":
            (warning,) = warnings
            assert warning.startswith(SIBLING.format(version=version))
        elif gpu == "cpu":
            (warning,) = warnings
            assert warning.startswith("CPUs differ")
        else:
            assert warnings == []


def test_experts_that_vllm_drew_are_named() -> None:
    for record in read_records(DRAWN):
        (warning,) = routing_warnings(record)
        assert record.fields["model"] in warning
