"""Checks of an installed wheel: python check_wheel.py, with the Python that it is installed for.

`make wheel` runs it where nothing but the wheel and its dependencies is installed. tests/test_packaging.py runs it
beside all that tests need. The network is not used.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.remove(str(Path(__file__).parent))
sys.path.append(str(REPOSITORY))

from benchmarks.commands import NEEDS, run_as_pasted  # noqa: E402

IMPORT_S = 0.030  # of processor time: a busy machine is slow, not wrong
# Every process of a user's vLLM does this, if there is a vLLM. It must not break a vLLM that is not supported.
PLUGIN = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="fp8plan")
point.load()
print(sorted({"torch", "vllm"} & set(sys.modules)))
"""
IMPORT = "import time; begun = time.process_time(); import fp8plan; print(time.process_time() - begun)"
OFFLINE = """
import json, socket, sys
def refuse(*arguments, **more):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from fp8plan.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{words} ends with {end.code}")
"""
NOT_IN_THE_WHEEL = (" profiles/", "--plot", "--grpo-config", "--verl-config")  # measurements, and what extras need


def python(folder: str, code: str, *words: str) -> str:
    """Run the code outside of the repository. Returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "FP8PLAN_"))}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    package = find_spec("fp8plan")
    assert package is not None
    assert package.origin is not None
    assert not Path(package.origin).is_relative_to(REPOSITORY / "fp8plan"), "the wheel is tested, not the checkout"
    groups = {point.group for point in distribution("fp8plan").entry_points}
    assert groups == {"console_scripts", "verl.plugins", "vllm.general_plugins", "vllm.endpoint_plugins"}, groups
    with tempfile.TemporaryDirectory() as folder:
        seconds = min(float(python(folder, IMPORT)) for _ in range(7))
        assert seconds < IMPORT_S, f"import fp8plan takes {1e3 * seconds:.0f} ms"
        assert python(folder, PLUGIN) == "[]\n", "the plugin imports what it only names"
        plan = ["fp8plan", "plan", "Qwen/Qwen3-8B", "--gpu", "h200", "--json"]
        found = json.loads(python(folder, OFFLINE, json.dumps([plan])))
        assert found["model"] == "Qwen/Qwen3-8B"
        assert len(found["choices"]) == 4
        pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
        shown = run_as_pasted(pages, (*NEEDS, *NOT_IN_THE_WHEEL))
        assert len(shown) >= 12
        python(folder, OFFLINE, json.dumps([shlex.split(command) for command in shown]))
    print(f"the wheel at {Path(package.origin).parent} is sound; import fp8plan: {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
