"""Where a command's results go: at most one to stdout, the others to files, all of them or none."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from fp8plan.errors import ConfigError

STDOUT: Final = "-"


def check(asked: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError for outputs that cannot all be written: (option, file or STDOUT) for each.

    To be called before the work, so that a slip costs no time; `write` may still fail, on a full disk.
    """
    asked = list(asked)
    printed = [option for option, file in asked if file == STDOUT]
    if len(printed) > 1:
        raise ConfigError(
            f"{' and '.join(printed)} would both be printed; give all but one a file: --json FILE.json, "
            "--emit TARGET=FILE"
        )
    if unnamed := [option for option, file in asked if not file]:
        raise ConfigError(f"{unnamed[0]} names no file; give one, or leave = out")
    files = [Path(file) for _, file in asked if file != STDOUT]
    for path, times in Counter(os.path.realpath(file) for file in files).items():
        if times > 1:
            raise ConfigError(f"{path} is asked for {times} times; give each output a file of its own")
    for path in files:
        _check_file(path)


def _check_file(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: permission denied; give a file that can be written")


def write(writers: Mapping[str, Callable[[Path], None]]) -> None:
    """Write each file by its writer, which is given a path. No file is there, or changed, until all are written.

    Raises ConfigError for a file that cannot be written, and what the writers raise.
    """
    targets = {name: Path(os.path.realpath(name)) for name in writers}  # a link stays one
    streams = [name for name, target in targets.items() if target.exists() and not target.is_file()]
    drafts = {name: _draft(target) for name, target in targets.items() if name not in streams}
    try:
        for name in (*drafts, *streams):  # a pipe or a device is written to, not replaced
            writers[name](drafts.get(name, targets[name]))
        for name, draft in drafts.items():
            if targets[name].exists():
                draft.chmod(targets[name].stat().st_mode)
            draft.replace(targets[name])
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}; nothing was written") from None
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _draft(target: Path) -> Path:
    """Beside the target, so that a rename is one step, and with its suffix, which says what to write."""
    return target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")


def read(file: str) -> str:
    """The text of a file, or of stdin for "-". Raises ConfigError for what cannot be read."""
    try:
        return sys.stdin.read() if file == STDOUT else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {file}: {reason}; give a file that can be read, or - for stdin") from None


def text(content: str) -> Callable[[Path], None]:
    """A writer of text, which ends with a line feed."""

    def writer(path: Path) -> None:
        path.write_text(content.rstrip("\n") + "\n", encoding="utf-8")

    return writer
