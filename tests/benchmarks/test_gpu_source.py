"""Rows of measurements can be tied to the source that made them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.gpu.source import PACKAGE, source_hash


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "__init__.py").write_text("")
    (tmp_path / "a" / "inner" / "one.py").write_text("x = 1\n")
    return tmp_path / "a"


def test_the_same_source_elsewhere_has_the_same_hash(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "b")
    (tmp_path / "b" / "inner" / "compiled.pyc").write_bytes(b"\0")
    (tmp_path / "b" / "weights.json").write_text("{}")
    assert source_hash(package) == source_hash(tmp_path / "b")
    assert len(source_hash(package)) == 12


def test_any_other_source_has_another(package: Path) -> None:
    found = {source_hash(package)}
    file = package / "inner" / "one.py"
    file.write_text("x = 2\n")
    found.add(source_hash(package))
    file.rename(package / "one.py")
    found.add(source_hash(package))
    (package / "two.py").write_text("")
    found.add(source_hash(package))
    assert len(found) == 4


def test_this_package_is_meant() -> None:
    assert (PACKAGE / "runtime" / "measure" / "machine.py").exists()
    assert source_hash() == source_hash(PACKAGE)
