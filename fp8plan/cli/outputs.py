"""Output of a command's results: at most one to stdout, the others to files, all of them or none."""

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
    """Raise ConfigError for outputs, (option, file or STDOUT) each, that cannot all be written.

    Call it before the work, so that a slip costs no time; `write` may still fail, on a full disk.
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
    for real, times in Counter(os.path.realpath(file) for file in files).items():
        if times > 1:
            raise ConfigError(f"{real} is asked for {times} times; give each output a file of its own")
    for path in files:
        _check_file(path)


def _check_file(path: Path) -> None:
    target = _target(path)
    if not target.parent.is_dir():
        folder = target.parent if path.is_symlink() else path.parent
        raise ConfigError(f"cannot write {path}: there is no folder {folder}")
    if os.path.isdir(target):
        raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    try:
        target.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a file that can be written") from None
    touched = [target] if os.path.exists(target) else []
    if not _is_stream(target):
        touched.append(target.parent)  # a draft is written there
    if denied := [place for place in touched if not os.access(place, os.W_OK)]:
        what = "permission denied" if denied[0] == target else f"permission denied in {denied[0]}"
        raise ConfigError(f"cannot write {path}: {what}; give a file that can be written")


def write(writers: Mapping[str, Callable[[Path], None]]) -> None:
    """Write each file by its writer, which is given a path. No file is there, or changed, until all are written.

    Raises ConfigError for a file that cannot be written, and what the writers raise.
    """
    targets = {name: _target(Path(name)) for name in writers}
    streams = [name for name, target in targets.items() if _is_stream(target)]
    files = [name for name in targets if name not in streams]
    drafts = {name: _draft(targets[name], number) for number, name in enumerate(files)}
    done: list[str] = []
    try:
        for name, draft in drafts.items():
            writers[name](draft)
        for name in streams:
            writers[name](targets[name])
            done.append(name)
        for name, draft in drafts.items():
            if targets[name].exists():
                draft.chmod(targets[name].stat().st_mode)
            draft.replace(targets[name])
            done.append(name)
    except OSError as error:
        fate = f"already written: {', '.join(done)}" if done else "nothing was written"
        raise ConfigError(f"cannot write {name}: {error.strerror or error}; {fate}") from None
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The path to write to. A link stays a link: the file behind it is written; a stream keeps its own name."""
    return path if _is_stream(path) else Path(os.path.realpath(path))


def _is_stream(path: Path) -> bool:
    """Return True for a pipe or a device, which is written to and not replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _draft(target: Path, number: int) -> Path:
    """Path of a draft beside the target, so that a rename is one step.

    It keeps the suffix, which says what to write. The name is short however long the target's is.
    """
    return target.with_name(f".fp8plan.{os.getpid()}.{number}{target.suffix[:8]}")


def read(file: str) -> str:
    """The text of a file, or of stdin for "-". Raises ConfigError for what cannot be read."""
    if file == STDOUT and sys.stdin is None:
        raise ConfigError("cannot read -: stdin is closed; give a file that can be read")
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


def print_written(files: Iterable[str]) -> None:
    """Say on stderr which files were written."""
    for file in files:
        print(f"written: {file}", file=sys.stderr)
