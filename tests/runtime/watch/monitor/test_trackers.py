"""Records in W&B and in Trackio, offline, each in a process of its own.

`make test` installs both into a folder beside the other packages (tests/trackers.txt says why).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_run import simulated

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.monitor.trackers import Tracker, Trackio, Wandb

INSTALLED = Path(sys.prefix) / "trackers"
RECORDS = simulated(3)
WANDB = """
import struct, wandb
from wandb.proto.wandb_internal_pb2 import Record
from fp8plan import Wandb
own = wandb.init(project="own", name="own", mode="offline")
sink = Wandb("rl", name="run 1", mode="offline")
logged(sink)
assert wandb.run is own and own.id != sink_run.id
own.log({"loss": 1.0})
own.finish()
(file,) = Path("wandb").glob(f"offline-run-*-{sink_run.id}/*.wandb")
data, at = file.read_bytes(), 7  # after the header: one block of records, each after its checksum, length and kind
assert len(data) < 1 << 15
found = {}
while at + 7 <= len(data):
    length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
    record = Record.FromString(data[at + 7 : at + 7 + length])
    if record.WhichOneof("record_type") == "history":
        values = {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in record.history.item}
        found[values.pop("_step")] = {name: value for name, value in values.items() if not name.startswith("_")}
    at += 7 + length
"""
TRACKIO = """
import sqlite3
from fp8plan import Trackio
logged(Trackio("rl", name="run 1", embed=False))
with sqlite3.connect("rl.db") as database:
    rows = database.execute("select run_name, step, metrics from metrics")
    found = {step: json.loads(metrics) for name, step, metrics in rows if name == "run 1"}
"""
# argv: the records. It writes what the tracker has of them.
AROUND = """
import json, sys
from pathlib import Path
from fp8plan.runtime.watch.monitor.sinks import Sinks
def logged(sink):
    global sink_run
    some = Sinks([sink])
    some.open()
    sink_run = sink._run
    for record in json.loads(sys.argv[1]):
        some.write(record)
    some.close()
    assert some.failures == [0], some.failures
{code}
Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("code", [WANDB, TRACKIO], ids=["wandb", "trackio"])
def test_a_tracker_has_every_metric_of_every_step(code: str, tmp_path: Path) -> None:
    if not INSTALLED.is_dir():
        assert os.environ.get("FP8PLAN_REQUIRE_INTEGRATIONS") != "1", "`make test` installs the trackers"
        pytest.skip("`make test` installs the trackers")
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(INSTALLED)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRACKIO_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AROUND.replace("{code}", code), json.dumps(RECORDS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    expected = {
        str(record["step"]): {name: value for name, value in record["metrics"].items() if value is not None}
        for record in RECORDS
    }
    assert {step: pytest.approx(values) for step, values in expected.items()} == found


@pytest.mark.parametrize(("sink", "package"), [(Wandb("rl"), "wandb"), (Trackio("rl"), "trackio")])
def test_a_tracker_that_is_not_installed_is_named(sink: Tracker, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}; type: pip install 'fp8plan\[{package}\]'$"):
        sink.open()


def test_a_run_that_does_not_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def init(**settings: object) -> None:
            raise ValueError(f"no key for {settings['project']}")

    monkeypatch.setitem(sys.modules, "wandb", Library)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="wandb project rl starts no run: ValueError: no key for rl; type: wandb login"
    ):
        Wandb("rl").open()
