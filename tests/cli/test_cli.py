"""The command line as a whole: usage errors, help, completion, what it lists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Done, refused
from typed import MODEL, PLAN

import fp8plan as package
from fp8plan import cli
from fp8plan.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan"], ("fp8plan plan --help",)),
        (["plan", MODEL], ("--gpu", "fp8plan plan --help")),
        ([*PLAN, "--wrong"], ("--wrong", "fp8plan plan --help")),
        ([*PLAN, "--prompts", "1.5"], ("--prompts", "integer", "fp8plan plan --help")),
        (["guess"], ("guess", "fp8plan --help")),
        (["validate"], ("fp8plan validate --help",)),
    ],
)
def test_a_usage_error_is_one_clear_line(
    fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]
) -> None:
    refused(fp8plan(*words), *parts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ("plan", "validate", "profiles", "models")),
        (["--help"], ("plan", "validate", "profiles", "models")),
        (["plan", "--help"], ("--gpu", "--precision", "--emit")),
    ],
)
def test_help_goes_to_stdout(fp8plan: Callable[..., Done], words: list[str], parts: tuple[str, ...]) -> None:
    done = fp8plan(*words)
    assert (done.code, done.err) == (0, "")
    assert all(part in done.out for part in parts)


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["--help"], "numpy"),
        (["emit", "--help"], "numpy"),
        (["models"], "fp8plan.model.plan"),
        (["plan", "--help"], "fp8plan.model.plan.planner"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_a_command_loads_only_what_it_needs(words: list[str], unused: str) -> None:
    code = f"import atexit, sys; sys.argv = {['fp8plan', *words]!r}; from fp8plan.cli import main"
    code += "; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = done.stderr.splitlines()[-1].split()
    assert "fp8plan.cli" in loaded
    assert unused not in loaded


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), commands(cli.program()), ids=lambda x: str(x))
def test_help_at_80_columns_breaks_no_option_name_and_no_default(
    fp8plan: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    done = fp8plan(*path, "-h")
    assert (done.code, done.err) == (0, "")
    assert done.out == fp8plan(*path, "--help").out
    assert done.out.isascii()
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    words = done.out.split()
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert name in [word.strip(",") for word in words], name
        default, shown = parameter.default, parameter.show_default
        if isinstance(shown, str):
            assert shown in " ".join(words), parameter.name
        elif isinstance(default, (str, int, float)) and not isinstance(default, bool):
            text = getattr(default, "value", default)
            assert {f"{text}]", f"{text};"} & set(words), parameter.name
    assert not any("..." in line for line in lines if path == () and not line.startswith("Usage"))


def with_one_value() -> Iterator[tuple[str, Any, Any]]:
    """Every option of a command that has one value: the command's name, the command and the option."""
    for path, command in commands(cli.program()):
        for parameter in command.params:
            flag = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
            if parameter.param_type_name == "option" and not (parameter.multiple or flag):
                yield " ".join(path), command, parameter


@pytest.mark.parametrize(("name", "command", "parameter"), with_one_value(), ids=lambda x: getattr(x, "name", x))
def test_an_option_with_one_value_is_given_once(name: str, command: Any, parameter: Any) -> None:
    """Both are named, in each spelling of the option, and before anything else of the command is looked at."""
    full = max(parameter.opts, key=len)
    if parameter.is_flag:
        named = [full, *parameter.secondary_opts]
        spellings = [named]
    else:
        named = [f"{full} 1.json", f"{full} 2.json"]
        spellings = [[option, "1.json", f"{full}=2.json"] for option in parameter.opts]
    for words in spellings:
        with pytest.raises(ConfigError) as caught:
            command.make_context(name, words)
        assert str(caught.value).startswith(f"{named[0]} and {named[1]} are given; allowed: one of them")


def test_options_that_repeat_and_flags_may_be_given_again(fp8plan: Callable[..., Done]) -> None:
    assert len(list(with_one_value())) > 100
    again = ["--precision", "bf16", "--precision", "fp8_kv", "--enforce-eager", "--enforce-eager"]
    done = fp8plan(*PLAN, "--json", *again)
    assert [choice["precision"] for choice in json.loads(done.out)["choices"]] == ["bf16", "fp8_kv"]


def test_every_way_to_install_an_extra_is_whole(fp8plan: Callable[..., Done]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "fp8plan").rglob("*.py")]:
        text = path.read_text()
        for found in re.finditer(r"fp8plan\[(\w+)\]", text):
            assert found[1] in extras, path
            before, after = text[: found.start()], text[found.end() :]
            assert before.endswith("pip install '"), path
            assert after.startswith("'"), path


def test_the_version_is_that_of_the_package(fp8plan: Callable[..., Done]) -> None:
    assert fp8plan("--version") == Done(0, f"fp8plan {package.__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "fp8plan", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"fp8plan {package.__version__}\n")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == package.__version__


def test_bash_completes_commands_and_options() -> None:
    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_FP8PLAN_COMPLETE": "complete_bash"}
        command = [sys.executable, "-m", "fp8plan"]
        done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, timeout=60)
        return done.stdout.split()

    assert complete("fp8plan pl") == ["plan"]
    assert complete("fp8plan plan --max-num-s") == ["--max-num-seqs"]


def test_the_installed_command_behaves_the_same() -> None:
    command = [sys.executable, "-m", "fp8plan"]
    good, bad = (
        subprocess.run([*command, *PLAN, "--json", "--precision", name], capture_output=True, text=True, timeout=60)
        for name in ("bf16", "int4")
    )
    assert good.returncode == 0
    assert [c["precision"] for c in json.loads(good.stdout)["choices"]] == ["bf16"]
    refused(Done(bad.returncode, bad.stdout, bad.stderr), "'int4'")


def test_profiles_and_models_are_listed(fp8plan: Callable[..., Done]) -> None:
    (sheet,) = json.loads(fp8plan("profiles", "--json").out)
    assert (sheet["kind"], Path(sheet["path"]).name) == ("datasheet", "datasheet.json")
    models = {m["name"]: m for m in json.loads(fp8plan("models", "--json").out)}
    assert models["Qwen/Qwen3-8B"]["num_parameters"] == 8_190_735_360  # model card of Qwen3-8B: 8.2B
    assert "any GPU" in fp8plan("profiles").out
    out = fp8plan("models").out
    assert all(max(out.count(name.rpartition("/")[2]), out.count("-" + name.rpartition("-")[2])) for name in models)
    rows = [line.split() for line in out.splitlines() if "/" in line.split(" ")[0]]
    sizes = [tuple(row[1:]) for row in rows]
    assert len(set(sizes)) == len(sizes) < len(models)  # hub ids of one shape share a row
    assert ["-Base,", "-FP8"] in [line.split() for line in out.splitlines()]
