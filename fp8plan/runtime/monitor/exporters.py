"""Sinks of a Monitor that need a package: TensorBoard and Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError
from fp8plan.runtime.monitor.sinks import Record


class TensorBoard:
    """Every metric as a scalar, by torch.utils.tensorboard, in event files under `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard files in {self.folder}"

    def open(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"the TensorBoard sink needs {error.name}; type: pip install tensorboard") from None
        try:
            self._writer = SummaryWriter(str(self.folder))
        except OSError as error:
            raise ConfigError(f"cannot write to {self.folder}: {error}; give a folder that can be written") from None

    def write(self, record: Record) -> None:
        if self._writer is None:
            self.open()
        wall = datetime.fromisoformat(record["date"]).timestamp()
        try:
            for name, value in _numbers(record):
                self._writer.add_scalar(name, value, record["step"], walltime=wall)
            self._writer.flush()  # so that a failure shows in its own step
        except Exception:
            self.close()  # its thread has ended with the failure: the next record gets another, and another file
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):
                writer.close()


class Prometheus:
    """The last record's numbers as gauges at http://address:port/metrics, for as long as the process lives.

    port:    0: any that is free; `port` says which once it is open
    address: the default is reached from this machine alone; the endpoint asks nobody who they are

    A metric `rollout_corr/kl` is called `rollout_corr_kl` there; `fp8plan_decision{decision="..."}` and
    `fp8plan_guard_action{action="..."}` are 1 for the present one.
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
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(f"the Prometheus sink needs {error.name}; type: pip install prometheus_client") from None
        registry = CollectorRegistry()  # its own: the default one has vLLM's metrics
        registry.register(self)
        try:
            self._served = start_http_server(self.port, self.address, registry)
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
        """Yield the gauges that prometheus_client asks for at every scrape."""
        from prometheus_client.core import GaugeMetricFamily

        record = self._record
        if record is None:
            return
        gauges = {re.sub(r"[^a-zA-Z0-9_:]", "_", name): (name, value) for name, value in _numbers(record)}
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


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """The metrics that have a value."""
    return ((name, float(value)) for name, value in record["metrics"].items() if value is not None)
