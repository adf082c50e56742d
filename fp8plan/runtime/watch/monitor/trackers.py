"""Sinks that log to an experiment tracker: W&B and Trackio, which share the words `init`, `log` and `finish`."""

from __future__ import annotations

from typing import Any, ClassVar

from fp8plan.errors import ConfigError, text_of
from fp8plan.packages import package
from fp8plan.runtime.watch.monitor.sinks import Record, Sink, numbers


class Tracker(Sink):
    """Every metric of each step, in a run of its own.

    project:  the tracker's name for several runs
    settings: other arguments of the tracker's `init`, such as name="run 1"
    """

    package: ClassVar[str]
    hint: ClassVar[str]  # for a run that does not start
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, project: str, **settings: Any) -> None:
        self.project, self.settings = project, settings
        self._run: Any = None

    def __repr__(self) -> str:
        return f"{self.package} project {self.project}"

    def open(self) -> None:
        library = package(self.package, f"the {self.package} sink", f"pip install 'fp8plan[{self.package}]'")
        try:
            self._run = library.init(project=self.project, **{**self.defaults, **self.settings})
        except Exception as error:  # each tracker has types of its own
            raise ConfigError(f"{self!r} starts no run: {text_of(error)}; {self.hint}") from None

    def write(self, record: Record) -> None:
        if self._run is None:
            self.open()
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class Wandb(Tracker):
    """Every metric of each step in a run of W&B. A run of yours in the same process stays as it is.

    project:  of W&B
    settings: other arguments of `wandb.init`, such as name="run 1" or mode="offline"
    """

    package = "wandb"
    hint = "type: wandb login, or give mode='offline'"
    defaults: ClassVar[dict[str, Any]] = {"reinit": "create_new"}


class Trackio(Tracker):
    """Every metric of each step in a run of Trackio, on this machine unless `settings` name a space.

    project:  of Trackio
    settings: other arguments of `trackio.init`, such as name="run 1"
    """

    package = "trackio"
    hint = "give other arguments of trackio.init"
