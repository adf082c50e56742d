"""README.md and docs/ say what the code and the committed measurements say."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import pytest
from mismatch_batches import gaussian, mismatch_of
from trainer_files import GRPO_CONFIG, VERL_CONFIG

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

import fp8plan  # noqa: E402
from benchmarks import prose  # noqa: E402
from benchmarks.commands import BLOCK, run_as_pasted  # noqa: E402
from fp8plan import cli  # noqa: E402
from fp8plan.cli import program  # noqa: E402
from fp8plan.model.validate.records import read_records  # noqa: E402
from fp8plan.model.validate.validate import validate  # noqa: E402
from fp8plan.runtime.watch.controller.laws import LevelThresholds  # noqa: E402
from fp8plan.runtime.watch.controller.state import Decision  # noqa: E402

PAGES = readme.pages()
# Read as files, not as pages of the site: `make docs` checks the links of the site.
LINKED = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "profiles").rglob("*.md"),
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """Name of a generated block -> its text, in each page that shows it."""
    found: dict[str, set[str]] = {}
    for page in readme.written():
        for _, name, text, _ in readme.BLOCK.findall(page.read_text()):
            found.setdefault(name, set()).add(text)
    return found


def stale(made: dict[str, str], shown: dict[str, set[str]]) -> list[str]:
    return [name for name, text in made.items() if shown.get(name) != {text + "\n"}]


def test_tables_that_take_seconds_are_the_ones_that_make_tables_writes(shown: dict[str, set[str]]) -> None:
    assert not stale(readme.others(), shown), "out of date; type: make tables"


@pytest.mark.slow
def test_all_tables_are_the_ones_that_make_tables_writes(shown: dict[str, set[str]]) -> None:
    made = readme.blocks()
    assert made.keys() == shown.keys()
    assert not stale(made, shown), "out of date; type: make tables"


@pytest.mark.slow
def test_figures_in_sentences_are_today_s() -> None:
    for page, said in prose.sentences().items():
        text = " ".join((ROOT / page).read_text().split())
        assert [sentence for sentence in said if sentence not in text] == []


def test_every_command_and_public_name_is_in_the_reference() -> None:
    tree = program().commands
    below = {f"{name} {inner}" for name, group in tree.items() for inner in getattr(group, "commands", {})}
    assert {*tree, *below} == set(readme.COMMANDS)
    reference = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert all(f".{getattr(fp8plan, name).__qualname__}\n" in reference for name in fp8plan.__all__)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual hosts make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    for path, _, anchor in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    folders = "fp8plan|profiles|benchmarks|examples|tests|docs"
    within = "importers|integrations|model|runtime|views|cli"  # of the package, as the architecture's page names them
    inside = within if page.name == "architecture.md" else folders
    named = re.findall(rf"`((?:{folders}|{inside})/[\w./-]+)`", page.read_text())
    made = "profiles/GPU/"  # an example of a path to be made
    missing = [path for path in named if not ((ROOT / path).exists() or (ROOT / "fp8plan" / path).exists())]
    assert [path for path in missing if not path.startswith(made)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text())
    texts = {file: [path.read_text() for path in (ROOT / "tests").rglob(file)] for file, _ in named}
    wrong = [
        f"{file}::{test}"
        for file, test in named
        if not any(re.search(rf"^def {test}\(", text, re.M) for text in texts[file])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("page", "heading"),
    [("evidence/trainers.md", "## What works, and what is refused"), ("guides/trl.md", "## What runs")],
)
def test_what_works_and_what_is_refused_in_a_trainer_has_a_test(page: str, heading: str) -> None:
    table = (ROOT / "docs" / page).read_text().partition(heading)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert {state for *_, state, _ in rows[2:]} == {"works", "refused", "not run"}
    assert [row for row in rows[2:] if bool(re.search("::", row[-1])) == (row[-2] == "not run")] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_every_make_target_that_is_named_is_one(page: Path) -> None:
    text = page.read_text()
    code = [*re.findall(r"`([^`\n]+)`", text), *"".join(body for _, body in BLOCK.findall(text)).splitlines()]
    targets = {word for line in code for word in re.findall(r"^make ([\w-]+)", line)}
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets <= known


def snippets() -> Iterator[str]:
    for page in PAGES:
        yield from (body for language, body in BLOCK.findall(page.read_text()) if language == "python")


@pytest.mark.parametrize("code", list(snippets()), ids=lambda code: code.splitlines()[0])
def test_the_snippets_of_python_name_what_there_is(code: str) -> None:
    tree, missing = ast.parse(textwrap.dedent(code)), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fp8plan":
            missing += [node.attr] * (not hasattr(fp8plan, node.attr))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp8plan"):
            module = importlib.import_module(node.module or "")
            names = [alias.name for alias in node.names]
            missing += [x for x in names if not (hasattr(module, x) or find_spec(f"{node.module}.{x}"))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.keywords:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "fp8plan":
                found = getattr(fp8plan, node.func.attr)
                shown = set(inspect.signature(found).parameters)
                missing += [f"{node.func.attr}({x.arg}=)" for x in node.keywords if x.arg not in shown]
    methods = {"engine": fp8plan.RolloutEngine, "fleet": fp8plan.RolloutFleet}
    methods |= {"monitor": fp8plan.Monitor, "plan": fp8plan.Plan}
    for owner, attribute in re.findall(r"\b(engine|fleet|monitor|plan)\.(\w+)\(", code):
        if not re.search(rf"fp8plan\.{owner}\.{attribute}", code):
            missing += [f"{owner}.{attribute}"] * (not hasattr(methods[owner], attribute))
    assert missing == []


@pytest.mark.parametrize("law", [LevelThresholds(), LevelThresholds(tis=None, band=(0.5, 5.0))])
def test_the_thresholds_at_each_kl_are_those_that_the_page_shows(law: LevelThresholds) -> None:
    """As the KL grows: 20 batches at each of its values."""
    state, cells = law.initial(), []
    for kl in (0.0001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        batch = mismatch_of(gaussian((2 * kl) ** 0.5, 256 * 256).reshape(256, 256))
        for _ in range(20):
            now, state, decided = law.update(state, batch)
        shown = f"{now.tis:.3g}" if now.band is None else f"[{now.band[0]:.2g}, {now.band[1]:.2g}]"
        cells.append(f"{shown}, `at_bound`" if decided.decision == Decision.AT_BOUND else shown)
    assert cells[0] == cells[1]
    page = (ROOT / "docs" / "evidence" / "thresholds.md").read_text()
    assert f" | {' | '.join(cells[1:])} |\n" in page


def test_the_snippets_that_plan_run() -> None:
    whole = [code for code in snippets() if code.startswith("import fp8plan")]
    assert len(whole) >= 2
    for code in whole:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("fp8_block+fp8_kv\n")


def test_the_commands_run_as_they_are_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, as nothing in them has a meaning to a shell but blanks and quotes."""
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    (tmp_path / "train.py").write_text(GRPO_CONFIG)
    (tmp_path / "run.yaml").write_text(VERL_CONFIG)
    monkeypatch.chdir(tmp_path)
    run_here = run_as_pasted(PAGES)
    assert len(run_here) >= 12
    for command in run_here:
        assert not set("|&;<>()$`*?~{}[]!#") & set(command), command
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, f"{command}: {capfd.readouterr().err}"
    assert {"plan.json", "verl.args", "plan.html"} <= {path.name for path in tmp_path.iterdir()}


RANKS = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


class Ended(NamedTuple):
    """An example that has ended. seconds: the time of each line of stdout"""

    returncode: int
    stdout: str
    stderr: str
    seconds: list[float]


def started(example: str, *words: str) -> Ended:
    """Run an example. It does not inherit the rank and the port of a trainer that ran in this process."""
    env = {name: value for name, value in os.environ.items() if name not in RANKS}
    command = [sys.executable, f"examples/{example}", *words]
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
        limit = threading.Timer(600, process.kill)
        limit.start()
        with process:
            lines = [(line, time.monotonic()) for line in process.stdout or ()]
        limit.cancel()
        errors.seek(0)
        return Ended(process.returncode, "".join(line for line, _ in lines), errors.read(), [at for _, at in lines])


def forked(folder: Path, example: str, *words: str) -> Ended:
    """The same, forked from a process that has imported vLLM."""
    import warm_processes

    env = {name: value for name, value in os.environ.items() if name not in RANKS}
    pipe, errors = folder / "pipe", folder / "errors"
    os.mkfifo(pipe)
    path = str(ROOT / "examples" / example)
    process = warm_processes.program(warm_processes.script, path, *words, log=pipe, errors=errors, env=env)
    limit = threading.Timer(600, process.kill)
    limit.start()
    with pipe.open() as printed:
        lines = [(line, time.monotonic()) for line in printed]
    process.join()
    limit.cancel()
    code = process.exitcode or 0
    return Ended(code, "".join(line for line, _ in lines), errors.read_text(), [at for _, at in lines])


def tells_each_step(done: Ended) -> bool:
    """True if the lines of the steps came one by one, and not all at the end, as from the buffer of a pipe."""
    lines = zip(done.stdout.splitlines(), done.seconds, strict=True)
    steps = [seconds for line, seconds in lines if line.startswith("step ")]
    return len(steps) < 2 or bool(np.max(np.diff(steps)) > 0.02)


def said(done: Ended) -> str:
    """Its stdout. stderr is empty but for the pace of this CPU: what an engine writes while it starts is held back."""
    rest = re.sub(r".*RuntimeWarning: fp8plan: this machine makes .*\n  warn\(.*\n", "", done.stderr)
    assert (done.returncode, rest) == (0, "")
    assert tells_each_step(done)
    return done.stdout


def test_the_example_of_choosing_runs() -> None:
    assert "fp8_block+fp8_kv" in said(started("choose_precision.py"))


@pytest.mark.vllm
def test_the_example_of_applying_prints_what_readme_says_it_prints(tmp_path: Path) -> None:
    steps = said(forked(tmp_path, "apply_to_vllm.py")).splitlines()
    expected = (ROOT / "examples" / "apply_to_vllm.txt").read_text().splitlines()
    assert list(map(_alike_on_any_cpu, steps)) == list(map(_alike_on_any_cpu, expected))


def _alike_on_any_cpu(line: str) -> str:
    """The line without seconds, and with the number of sampled tokens instead of the tokens."""
    line = re.sub(r"in [\d.]+ s", "", line)
    return re.sub(r"\[(\d+(?:, \d+)*)\]", lambda tokens: f"[{tokens[1].count(',') + 1} tokens]", line)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_example_of_grpo_learns_and_its_run_can_be_read(tmp_path: Path) -> None:
    run_file = tmp_path / "run.jsonl"
    steps = said(forked(tmp_path, "grpo_loop.py", str(run_file))).splitlines()
    assert all(line.startswith("step ") for line in steps)
    rewards = [float(re.findall(r"reward ([\d.]+)", line)[0]) for line in steps]
    assert 0.45 < rewards[0] < 0.55
    assert rewards[-1] > 0.8
    rows = [json.loads(line) for line in run_file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(steps) + 1))
    assert all(0 < row["metrics"]["rollout_corr/k3_kl"] < 0.01 for row in rows)
    assert all(row["precision"] == "fp8_kv" and row["guard"]["verdict"] for row in rows)
    assert not any(row["guard"]["verdict"]["cold"] for row in rows[1:])
    assert "too slow" not in rows[0]["guard"]["verdict"]["reason"]
    assert len(validate(read_records(run_file)).records) == len(rows) - 1  # without the engine's first


@pytest.mark.vllm
@pytest.mark.trl
def test_the_example_of_trl_learns_and_its_run_can_be_read(tmp_path: Path) -> None:
    run_file = tmp_path / "run.jsonl"
    done = forked(tmp_path, "trl_grpo.py", str(run_file))
    assert done.returncode == 0, done.stderr  # where transformers warns of its own names
    chosen, *lines = done.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert re.match(r"fp8plan: plan=\"auto\", choice='fp8_kv': fp8_kv for .* on cpu", chosen)
    *table, replaced = lines[: lines.index(steps[0])]
    assert all(words in "\n".join(table) for words in ("rollout s", "KL k3 (90%)", "- Stay with bf16"))
    assert replaced.startswith("fp8plan: the plan's correction replaces TRL's")
    assert tells_each_step(done)
    rewards = [float(re.match(r"step \d+: reward ([\d.]+), KL ", line)[1]) for line in steps]  # type: ignore[index]
    assert 0.4 < rewards[0] < 0.6
    assert rewards[-1] > rewards[0] + 0.2
    rows = [json.loads(line) for line in run_file.read_text().splitlines()]
    assert [row["metrics"]["critic/rewards/mean"] for row in rows] == pytest.approx(rewards, abs=6e-4)
    shown = subprocess.run(
        [sys.executable, "-m", "fp8plan", "monitor", str(run_file), "--once"], capture_output=True, text=True, cwd=ROOT
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"^reward +0\.\d", shown.stdout, re.M)
    assert len(validate(read_records(run_file)).records) == len(rows) - 1  # without the engine's first


# What is said, by the table of the guide of the watch -> tests that show it, below tests/runtime.
CAUGHT = {
    "stale_weights": (
        "apply/doctor/test_engines.py::test_stale_weights",
        "apply/doctor/test_checks.py::test_stale_weights_on_one_rank",
    ),
    "SyncError": (
        "apply/weight_sync/test_sync_faults.py::test_what_the_manifest_shows_leaves_the_old_weights_serving",
    ),
    "corrupted_layer": (
        "apply/doctor/test_engines.py::test_one_corrupted_layer",
        "apply/doctor/test_checks.py::test_one_corrupted_layer",
    ),
    "kv_scales_unit": ("apply/doctor/test_engines.py::test_scales_of_1",),
    "kv_scales_clip": ("apply/doctor/test_engines.py::test_scales_that_clip",),
    "prefix_cache_stale": ("apply/doctor/test_engines.py::test_a_prefix_cache_that_was_not_emptied",),
    "trainer_temperature": ("apply/doctor/test_engines.py::test_a_trainer_that_forgets_the_temperature",),
    "engine_temperature": ("apply/doctor/test_checks.py::test_a_fault_is_named_alone",),
    "recipes_differ": ("apply/doctor/test_checks.py::test_trainer_and_engine_round_alike",),
    "routing": ("watch/mismatch/test_attribution.py::test_replayed_experts_make_routing_a_part_of_its_own",),
    "sampling": (
        "watch/monitor/test_sampled_steps.py::test_identical_weights_with_top_p_are_named_in_reason_record_and_warning",
        "watch/mismatch/test_sampling.py::test_each_parameter_that_changes_the_distribution_is_a_bias_in_each_mode",
    ),
    "placeholders": ("watch/monitor/test_untrue_input.py::test_log_probs_that_were_filled_in_are_named",),
    "invalid": (
        "watch/monitor/test_untrue_input.py::test_lost_tokens_count_the_invalid_ones_and_a_share_of_them_alarms",
    ),
    "no_data": ("watch/monitor/test_untrue_input.py::test_without_a_valid_token_nothing_is_perfect",),
    "ConfigError": (
        "watch/monitor/test_untrue_input.py::test_what_is_no_log_probability_is_refused",
        "watch/monitor/test_untrue_input.py::test_one_negated_row_is_refused",
        "watch/monitor/test_untrue_input.py::test_a_mask_of_other_numbers_is_refused",
    ),
    "units": ("watch/monitor/test_untrue_input.py::test_base_10_is_named_and_natural_logarithms_are_not",),
    "identical": ("watch/monitor/test_untrue_input.py::test_the_same_tensor_on_both_sides_is_named",),
    "lost": ("watch/monitor/test_untrue_input.py::test_sequence_weights_that_lose_the_batch_alarm",),
    "kl": ("watch/monitor/test_untrue_input.py::test_log_probs_of_other_tokens_are_noticed",),
}


def test_each_failure_that_the_guide_calls_caught_has_its_test() -> None:
    page = (ROOT / "docs" / "guides" / "watch.md").read_text()
    table = re.findall(r"^\| .+ \| (.+) \|$", page.partition("## What it catches")[2].partition("\n## ")[0], re.M)[1:]
    assert [re.search(r"`(\w+)`", said)[1] for said in table] == list(CAUGHT)  # type: ignore[index]
    for file, _, test in (name.partition("::") for names in CAUGHT.values() for name in names):
        tree = ast.parse((ROOT / "tests" / "runtime" / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_every_example_has_its_test() -> None:
    tested = {"choose_precision.py", "apply_to_vllm.py", "grpo_loop.py", "trl_grpo.py"}
    tested.add("verl_turns.py")  # tests/importers/test_agent_loop.py
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested


def test_the_limits_name_every_model_that_is_refused() -> None:
    from fp8plan.model.architecture.families import FAMILIES, REFUSED

    limits = (ROOT / "docs" / "limits.md").read_text()
    table = limits.partition("## Models that are refused")[2]
    assert all(f"`{model_type.removesuffix('_text')}`" in table for model_type in REFUSED)
    for page in ("README.md", "docs/limits.md", "docs/guides/extend.md"):
        assert f"{len(FAMILIES)} model types" in (ROOT / page).read_text()


def test_the_row_that_the_guide_adds_is_there() -> None:
    from fp8plan.model.architecture.families import FAMILIES
    from fp8plan.model.architecture.family import Family

    block = next(x for _, x in BLOCK.findall((ROOT / "docs" / "guides" / "extend.md").read_text()) if "Family(" in x)
    [(model_type, row)] = eval(block, {"Family": Family}).items()
    written = {field: getattr(row, field) for field in ("norm_vectors", "gated", "mlp_bias", "defaults")}
    assert written == {field: getattr(FAMILIES[model_type], field) for field in written}
