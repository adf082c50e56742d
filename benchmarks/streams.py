"""CPU seconds and memory of what reads large files: the page of a long run, and the import of a large dump.

`python benchmarks/streams.py` makes the files in a temporary folder, runs each command in a process of its own, and
writes benchmarks/results/streams.jsonl; `--table` prints the committed rows as Markdown. The numbers of records and
bytes are options, so that growth can be measured, too.

The runs are those of tests/runtime/simulated_run.py. The dumps hold random words, laid out as verl and TRL write them.
`words` stands for the run's tokenizer: it counts words, and leaves the time to reading. `WordLevel` is a real one, of
the package tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from tables import markdown

from fp8plan import jsonl

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "streams.jsonl"
WORDS: Final = 1000  # of the vocabulary
RESPONSE: Final = 600  # words of a response, on average
GROUP: Final = 8  # responses to a prompt
ROLLOUT: Final = 512  # responses of a rollout, where the dump has many

# Runs the command line with `words` for the tokenizer, if its name is asked for, and says how large it grew: what the
# operating system says of a child that has ended counts the parent's size, too.
CHILD: Final = """
import os, sys
from fp8plan import cli
from fp8plan.importers import records

class Words:
    def __call__(self, texts, **_):
        return {"input_ids": [range(text.count(" ") + 1) for text in texts]}

if "words" in sys.argv:
    records.load_tokenizer = lambda name: Words()
try:
    cli.main()
finally:
    with open("/proc/self/status") as status, open(os.environ["STATUS"], "w") as copy:
        copy.write(status.read())
"""


def run_file(path: Path, count: int) -> Path:
    """Write the records of a simulated run, of which each thousand is like the one before."""
    sys.path.append(str(ROOT / "tests" / "runtime"))
    from simulated_run import BEGIN, STEP_S, simulated

    rows = simulated(min(count, 1000))
    with path.open("wb") as file:
        for step in range(1, count + 1):
            date = (BEGIN + timedelta(seconds=STEP_S * step)).isoformat(timespec="milliseconds")
            row = rows[step % len(rows)] | {"step": step, "date": date}
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return path


def requests() -> Iterator[tuple[str, str]]:
    """Endless (prompt, response), GROUP responses to a prompt."""
    chance = np.random.default_rng(0)
    text = " ".join(f"w{word}" for word in chance.integers(WORDS, size=200_000))
    while True:
        start = int(chance.integers(100_000))
        prompt = text[start : start + 800]
        for length in np.clip(chance.lognormal(np.log(RESPONSE * 4.9) - 0.32, 0.8, GROUP), 10, 90_000).astype(int):
            start = int(chance.integers(len(text) - length))
            yield prompt, text[start : start + length]


def verl_dump(folder: Path, size: int, responses: int) -> Path:
    """Write a dump of `size` bytes as verl's trainer does, `responses` of them to a file."""
    folder.mkdir()
    rows, written, step = requests(), 0, 0
    while written < size:
        step += 1
        with (folder / f"{step}.jsonl").open("w") as file:
            for prompt, response in islice(rows, responses):
                row = {"input": prompt, "output": response, "gts": "7", "score": 1.0, "step": step, "acc": True}
                written += file.write(json.dumps(row, ensure_ascii=False) + "\n")
                if written >= size:
                    break
    return folder


def trl_dump(folder: Path, size: int, responses: int) -> Path:
    """Write as many bytes of text as TRL's GRPOTrainer does, uncompressed as parquet counts them."""
    import pandas as pd

    folder.mkdir()
    rows, written, step = requests(), 0, 0
    while written < size:
        step += 1
        some = list(islice(rows, responses))
        written += sum(len(prompt) + len(response) for prompt, response in some)
        prompts, completions = zip(*some, strict=True)
        table = {"step": step, "prompt": prompts, "completion": completions, "advantage": 0.0}
        pd.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet", compression=None)
    return folder


def word_level(folder: Path) -> Path:
    """A tokenizer of the package tokenizers, in which every word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def measure(what: str, words: list[Any], bytes_read: int, **facts: Any) -> dict[str, Any]:
    """CPU seconds, wall seconds and the largest memory of one command line in a process of its own."""
    begun = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", CHILD, *map(str, words)]
    with tempfile.NamedTemporaryFile("r") as status:
        environment["STATUS"] = status.name
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            _, ended, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(ended)
        if process.returncode:
            raise RuntimeError(f"fp8plan {' '.join(map(str, words))} ended with {process.returncode}")
        (largest,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))  # KiB
    row = {"what": what, "cpu_s": round(used.ru_utime + used.ru_stime, 2), "bytes": bytes_read}
    row |= {"wall_s": round(time.perf_counter() - begun, 2), "max_rss_mb": round(largest * 1024 / 1e6)} | facts
    print(json.dumps(row), file=sys.stderr)
    return row


def of_runs(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """The views of a run of `count` records."""
    run = run_file(folder / "run.jsonl", count)
    size = run.stat().st_size
    yield measure(f"monitor --once, {count:,} records", ["monitor", run, "--once"], size)
    page = folder / "run.html"
    row = measure(f"report, {count:,} records", ["report", run, "-o", page], size)
    yield row | {"page_bytes": page.stat().st_size}
    run.unlink()


def of_imports(folder: Path, size: int) -> Iterator[dict[str, Any]]:
    """Imports of dumps of `size` bytes."""
    tokenizer = word_level(folder / "tokenizer")
    dumps: tuple[tuple[str, Callable[[Path, int, int], Path], int, tuple[str, ...]], ...] = (
        ("verl", verl_dump, ROLLOUT, ("", "--last 1", "--last 10 WordLevel")),
        ("verl", verl_dump, 1 << 62, ("",)),
        ("trl", trl_dump, ROLLOUT, ("", "--last 1")),
    )
    for number, (trainer, make, responses, ways) in enumerate(dumps):
        dump = make(folder / f"{trainer}{number}", size, responses)
        files = [path.stat().st_size for path in dump.iterdir()]
        for way in ways:
            more = way.removesuffix(" WordLevel")
            counter = "words" if more == way else tokenizer
            many = f"{len(files):,} file{'s' * (len(files) > 1)} of {trainer}"
            command = ["import", trainer, dump, "--tokenizer", counter, *more.split(), "-o", folder / "records.jsonl"]
            yield measure(", ".join(filter(None, ["import", many, way])), command, sum(files))
        for path in dump.iterdir():
            path.unlink()


def table(path: Path = RESULTS) -> str:
    """The committed rows in Markdown."""
    rows = jsonl.rows(path)
    lines = []
    for row in rows:
        page = f"a page of {row['page_bytes'] / 1e6:.1f} MB" if "page_bytes" in row else ""
        lines.append(
            (row["what"], f"{row['bytes'] / 1e6:,.0f} MB", f"{row['cpu_s']:.1f} s", f"{row['max_rss_mb']:,} MB", page)
        )
    made = f"One run each on {rows[0]['date']}; {rows[0]['cpu_model']}, Python {rows[0]['python']}."
    return f"{markdown.table(('command', 'files', 'CPU time', 'largest memory', 'writes'), lines)}\n\n{made}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the committed rows, measure nothing")
    parser.add_argument("--records", type=int, default=100_000, help="of the run; 0: none")
    parser.add_argument("--bytes", type=float, default=1e9, help="of a dump; 0: none")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not given.table:
        from fp8plan.runtime.measure.machine import machine_facts

        facts = {name: machine_facts()[name] for name in ("cpu_count", "cpu_model")}
        facts |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        with tempfile.TemporaryDirectory() as folder:
            rows = [*of_runs(Path(folder), given.records)] if given.records else []
            rows += [*of_imports(Path(folder), int(given.bytes))] if given.bytes else []
        given.output.write_text("".join(json.dumps(row | facts) + "\n" for row in rows))
    print(table(given.output))


if __name__ == "__main__":
    main()
