"""Sinks for the records of a Monitor: a run file, a function of yours, TensorBoard, Prometheus.

A sink that fails (full disk, closed endpoint, a bug of the function) never stops training. `Sinks` warns of the first
failure of each, and counts the others; every record tries again, so a sink recovers when it can. A mistake that shows
at the start (a missing folder or package, a busy port) is an error when the Monitor is made.
"""

from __future__ import annotations

import errno
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError, warn
from fp8plan.jsonl import Ended, append, line, to_disk, torn_path
from fp8plan.packages import package

Record = Mapping[str, Any]  # one step, a line of the run file
PASSING: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN)  # errors that may pass
KEPT: Final = 256  # records to keep in memory while a run file cannot be written


class Sink(Protocol):
    """A destination of a Monitor's records.

    The constructor only takes settings: a Monitor opens its sinks on rank 0 alone.
    """

    def open(self) -> None:
        """Get ready to write. Raises ConfigError for settings that can never work."""

    def write(self, record: Record) -> None:
        """Write the record of one step. It may raise anything; the next record is still tried."""

    def close(self) -> None:
        """Release files and connections."""


class NotOnDiskError(OSError):
    """A failed wait for the disk: the records are in the file, but may be lost with the machine."""


class JsonLines(Sink):
    """The run file that `fp8plan monitor`, `report` and `validate` read (fp8plan.runtime.watch.monitor.record).

    sync_s: seconds between two waits for the disk itself, against the loss of the machine, not of the process. 0: with
            every record; None: never, as the operating system writes within half a minute

    While the file cannot be written, memory keeps the last 256 records, to write them later. A warning gives the number
    of dropped ones once the file can be written again, or is closed.

    A file belongs to one run: a warning reports records of an earlier run, and another process that writes there.
    """

    def __init__(self, path: str | Path, sync_s: float | None = 10.0) -> None:
        if not isinstance(path, (str, Path)):
            raise ConfigError(f"the run file is {path!r}; allowed: its path, such as 'run.jsonl'")
        if sync_s is not None and not (is_number(sync_s) and sync_s >= 0):
            raise ConfigError(f"sync_s is {sync_s!r}; allowed: seconds, at least 0, or None")
        self.path, self.sync_s = Path(path), sync_s
        self._waiting = deque[tuple[Any, bytes]]()  # steps and their lines
        self._dropped = list[Any]()  # steps that were dropped from memory since the last warning
        self._size: int | None = None  # bytes of the file after this run's last record
        self._shared = False  # a warning has named the other process that writes there
        self._synced = -float("inf")

    def __repr__(self) -> str:
        return f"run file {self.path}"

    def open(self) -> None:
        try:
            self._took(append(self.path, b""))
        except OSError as error:
            if error.errno in PASSING:
                return  # the first record tries again
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; give a file that can be written") from None
        if self._size:
            warn(
                f"{self.path} has records already ({self._size:,} bytes). A run that goes on from a checkpoint belongs "
                "there. The steps of any other would hide them: give it a file of its own"
            )

    def write(self, record: Record) -> None:
        self._waiting.append((record.get("step"), line(record)))
        try:
            self._write()
        except OSError:
            if len(self._waiting) > KEPT:
                self._dropped.append(self._waiting.popleft()[0])
            raise
        if self.sync_s is not None and time.monotonic() - self._synced >= self.sync_s:
            self._sync()
            self._synced = time.monotonic()

    def close(self) -> None:
        """Write the remaining records and wait for the disk. Warns of the records that will never be in the file."""
        try:
            self._write()
        except OSError:
            self._dropped += [step for step, _ in self._waiting]
            self._waiting.clear()
            raise
        finally:
            self._report_dropped()
        if self.sync_s is not None:
            self._sync()

    def _write(self) -> None:
        while self._waiting:
            self._took(append(self.path, self._waiting[0][1]))
            self._waiting.popleft()
        self._report_dropped()

    def _report_dropped(self) -> None:
        if self._dropped:
            steps = f"dropped records: {len(self._dropped):,}, of steps {self._dropped[0]} to {self._dropped[-1]}"
            warn(f"{self.path} lacks what could not be written; {steps}")
            self._dropped.clear()

    def _sync(self) -> None:
        try:
            to_disk(self.path)
        except OSError as error:
            raise NotOnDiskError(*error.args) from error

    def _took(self, ended: Ended) -> None:
        """Note the file's end, and warn of lines that this run has not written."""
        if ended.cut:
            warn(f"{self.path} ended in a torn line of {ended.cut} bytes: cut off, kept in {torn_path(self.path)}")
        if self._size is not None and ended.before > self._size and not self._shared:
            self._shared = True
            more = f"{ended.before - self._size:,} bytes of it are not this run's"
            warn(
                f"another process writes to {self.path}, too: {more}. Views show the last record of each step, so each "
                "hides the other's; give every run a file of its own"
            )
        self._size = ended.size


class Callback:
    """A function of yours, called with every record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"callback {getattr(self.function, '__qualname__', self.function)}"

    def open(self) -> None:
        """There is nothing to open."""

    def write(self, record: Record) -> None:
        self.function(record)

    def close(self) -> None:
        """There is nothing to close."""


class Sinks:
    """Several sinks, none of which can stop training.

    failures: number of failures of each sink, in order

    Raises ConfigError for anything but a list of sinks.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        listed = isinstance(sinks, Sequence) and not isinstance(sinks, str)
        if not listed or not all(hasattr(sink, "write") for sink in sinks):
            raise ConfigError(f"sinks are {sinks!r}; allowed: a list of sinks, such as [JsonLines('run.jsonl')]")
        self.sinks = tuple(sinks)
        self.failures = [0] * len(self.sinks)

    def open(self) -> None:
        """Open all. Raises ConfigError as they do; then none stays open."""
        for number, sink in enumerate(self.sinks):
            try:
                sink.open()
            except BaseException:
                for opened in self.sinks[:number]:
                    opened.close()
                raise

    def write(self, record: Record) -> None:
        """Give each sink its own copy of a record, to keep or change. Raises nothing.

        Copies (1,536 responses: 1.5 ms), because json.dumps and pickle refuse read-only views.
        """
        for number, sink in enumerate(self.sinks):
            try:
                sink.write(deepcopy(record))
            except NotOnDiskError as error:
                self._failed(number, f"step {record.get('step')} is in the file, but perhaps not on the disk: {error}")
            except Exception as error:
                self._failed(number, f"step {record.get('step')} did not get there: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Close all. Raises nothing."""
        for number, sink in enumerate(self.sinks):
            try:
                sink.close()
            except NotOnDiskError as error:
                self._failed(number, f"closed, but the last steps are perhaps not on the disk: {error}")
            except Exception as error:
                self._failed(number, f"not closed: {type(error).__name__}: {error}")

    def _failed(self, number: int, problem: str) -> None:
        self.failures[number] += 1
        if self.failures[number] == 1:
            warn(f"{self.sinks[number]!r}: {problem}. Training goes on; further failures are only counted")


class TensorBoard(Sink):
    """Every metric as a scalar, by torch.utils.tensorboard, in event files under `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard files in {self.folder}"

    def open(self) -> None:
        tensorboard = package("torch.utils.tensorboard", "the TensorBoard sink", "pip install tensorboard")
        try:
            self._writer = tensorboard.SummaryWriter(str(self.folder))
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error}; give a folder that can be written") from None

    def write(self, record: Record) -> None:
        if self._writer is None:
            self.open()
        wall = datetime.fromisoformat(record["date"]).timestamp()
        try:
            for name, value in numbers(record):
                self._writer.add_scalar(name, value, record["step"], walltime=wall)
            self._writer.flush()  # so that a failure shows in its own step
        except Exception:
            self.close()  # the failure ended its thread: the next record gets a new thread and a new file
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):
                writer.close()


class Prometheus(Sink):
    """The last record's numbers as gauges at http://address:port/metrics, for as long as the process lives.

    port:    0: any free one; `port` is its number once it is open
    address: the default is reachable from this machine alone; the endpoint has no authentication

    A metric `rollout_corr/kl` is called `rollout_corr_kl` there; `fp8plan_decision{decision="..."}` and
    `fp8plan_guard_action{action="..."}` are 1 for the present one.

    Raises ConfigError for a port that does not exist.
    """

    def __init__(self, port: int = 9477, address: str = "127.0.0.1") -> None:
        if not (type(port) is int and 0 <= port < 1 << 16):
            raise ConfigError(f"port is {port!r}; allowed: 1 to 65535, or 0 for any that is free")
        self.port, self.address = port, address
        self._record: Record | None = None
        self._served: Any = None

    def __repr__(self) -> str:
        return f"Prometheus endpoint {self.address}:{self.port}"

    def open(self) -> None:
        client = package("prometheus_client", "the Prometheus sink", "pip install prometheus_client")
        registry = client.CollectorRegistry()  # its own: the default one has vLLM's metrics
        registry.register(self)
        try:
            self._served = client.start_http_server(self.port, self.address, registry)
        except OSError as error:
            hint = "give another port, or 0 for any that is free"
            raise ConfigError(
                f"cannot serve metrics at {self.address}:{self.port}: {error.strerror or error}; {hint}"
            ) from None
        self.port = self._served[0].server_port

    def write(self, record: Record) -> None:
        self._record = record

    def close(self) -> None:
        if self._served is not None:
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join()
            self._served = None

    def collect(self) -> Iterator[Any]:
        """Yield the gauges at every scrape of prometheus_client."""
        from prometheus_client.core import GaugeMetricFamily

        record = self._record
        if record is None:
            return
        gauges = {re.sub(r"[^a-zA-Z0-9_:]", "_", name): (name, value) for name, value in numbers(record)}
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(name, meaning, value=value)
        yield GaugeMetricFamily("fp8plan_step", "training step of the last record", value=record["step"])
        date = datetime.fromisoformat(record["date"]).timestamp()
        yield GaugeMetricFamily("fp8plan_step_seconds", "unix time of the last record", value=date)
        verdict = (record.get("guard") or {}).get("verdict") or {}
        for name, word in (("decision", record.get("decision")), ("guard_action", verdict.get("action"))):
            if word is not None:
                label = name.removeprefix("guard_")
                family = GaugeMetricFamily(f"fp8plan_{name}", "1 for the present one", labels=[label])
                family.add_metric([str(word)], 1.0)
                yield family


def numbers(record: Record) -> Iterator[tuple[str, float]]:
    """Return the metrics that have a value."""
    return ((name, float(value)) for name, value in record["metrics"].items() if value is not None)
