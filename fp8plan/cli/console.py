"""Output of the commands. One prints at most one result to stdout; other results go to files, all of them or none.

stdout and stderr may be full, closed, ASCII only, or a pipe whose reader left.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console, RenderableType

from fp8plan.errors import ConfigError

T = TypeVar("T")

STDOUT: Final = "-"
READER_GONE: Final = 141  # exit code: 128 + SIGPIPE, as any program has whose reader left
# ASCII for the other characters that fp8plan writes, for a stream that cannot take them. A bar stays one character.
PLAIN: Final = dict(zip("▁▂▃▄▅▆▇█×–—−µ", "._-=+*%#x---u", strict=True)) | {
    "≤": "<=", "≥": ">=", "±": "+-", "…": "...", "→": "->",
}  # fmt: skip


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def starting_engines() -> Iterator[None]:
    """Keep vLLM's log out of the result, and name its file after Ctrl-C."""
    # vLLM logs to stdout by default, and reads this variable on import. Its log is held back while an engine runs, but
    # errors at the end of the process are not.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        yield
    except KeyboardInterrupt as end:
        print_notes(getattr(end, "__notes__", []))  # the path of the log of an engine that did not start
        raise


def progress(what: str) -> Callable[[Iterable[T]], Iterable[T]]:
    """A progress bar on a terminal, shown only for work that lasts."""

    def bar(items: Iterable[T]) -> Iterable[T]:
        if not sys.stderr.isatty():
            return items
        from tqdm import tqdm

        shown: Iterable[T] = tqdm(items, desc=what, leave=False, delay=0.5, file=sys.stderr)
        return shown

    return bar


def show(report: RenderableType, on_stderr: bool = False) -> None:
    """Print a report. A line that is meant to be copied may be longer than the terminal is wide."""
    console = Console(stderr=on_stderr)
    if not console.is_terminal:  # a pipe or a file has no width: keep every row on one line
        console = Console(stderr=on_stderr, width=200)
    console.print(report, crop=False)


def check(outputs: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if the outputs, each (option, file or STDOUT), cannot all be written.

    Call it before the work, so that a slip costs no time. `write` may still fail, on a full disk.
    """
    printed = [name for name, file in outputs if file == STDOUT]
    if len(printed) > 1:
        raise ConfigError(
            f"{' and '.join(printed)} would both be printed; give all but one a file: --json FILE.json, "
            "--emit TARGET=FILE"
        )
    if unnamed := [name for name, file in outputs if not file]:
        raise ConfigError(f"{unnamed[0]} names no file; give one, or leave = out")
    files = [Path(file) for _, file in outputs if file != STDOUT]
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
    except OSError as error:  # the name is too long
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a file that can be written") from None
    touched = [target] if os.path.exists(target) else []
    touched += [] if _is_stream(target) else [target.parent]  # the draft's folder
    if denied := [place for place in touched if not os.access(place, os.W_OK)]:
        reason = "permission denied" if denied[0] == target else f"permission denied in {denied[0]}"
        raise ConfigError(f"cannot write {path}: {reason}; give a file that can be written")


def write(writers: Mapping[str, Callable[[Path], None]]) -> None:
    """Write each file by its writer, which takes a path. No file appears or changes until all are written.

    Raises ConfigError for a file that cannot be written, and the errors of the writers.
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
    """True for a pipe or a device, which is written to and not replaced."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _draft(target: Path, number: int) -> Path:
    """The path of a draft beside the target, which one rename puts in place.

    It keeps the target's suffix, by which writers choose a format. The rest of the name is short.
    """
    return target.with_name(f".fp8plan.{os.getpid()}.{number}{target.suffix[:8]}")


def read(file: str) -> str:
    """The text of a file, or of stdin for "-". Raises ConfigError if it cannot be read."""
    if file == STDOUT and sys.stdin is None:
        raise ConfigError("cannot read -: stdin is closed; give a file that can be read")
    try:
        return sys.stdin.read() if file == STDOUT else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {file}: {reason}; give a file that can be read, or - for stdin") from None


def text(content: str) -> Callable[[Path], None]:
    """A writer of text that ends with a line feed."""

    def writer(path: Path) -> None:
        path.write_text(content.rstrip("\n") + "\n", encoding="utf-8")

    return writer


def print_written(files: Iterable[str]) -> None:
    """Say on stderr which files were written."""
    for file in files:
        print(f"written: {file}", file=sys.stderr)


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: PLAIN, and an escape for any other character, so that none is lost."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lost), error.end


codecs.register_error("fp8plan.plain", plain)


class Results(io.TextIOWrapper):
    """stdout. A result that cannot be written is an error, unless the reader left."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> BaseException:
        """The exception to raise. The rest of the buffer is thrown away, or it would fail once more at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return SystemExit(READER_GONE)
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        return ConfigError(f"stdout cannot be written: {why}; the result is lost or incomplete: send it somewhere else")


class Notes(io.TextIOWrapper):
    """stderr. A note that cannot be written must not cost the result; the exit code says the rest."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def standard_streams() -> Iterator[None]:
    """sys.stdout as Results and sys.stderr as Notes, in their own encoding. A program's replacements of them stay."""
    before = sys.stdout, sys.stderr
    if before[0] is sys.__stdout__:
        sys.stdout = _stream(Results, sys.__stdout__)
    if before[1] is sys.__stderr__:
        sys.stderr = _stream(Notes, sys.__stderr__)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ConfigError, SystemExit):
                stream.flush()
        sys.stdout, sys.stderr = before


def _stream(kind: type[io.TextIOWrapper], stream: Any) -> io.TextIOWrapper:
    if stream is None:  # closed: writes must fail, and no file opened later may get its number
        file, encoding = os.open(os.devnull, os.O_RDONLY), "utf-8"
    else:
        stream.flush()
        file, encoding = stream.fileno(), stream.encoding
    raw: Any = io.FileIO(file, "wb", closefd=False)
    lines = kind is Notes or os.isatty(file)
    return kind(io.BufferedWriter(raw), encoding, "fp8plan.plain", line_buffering=lines)
