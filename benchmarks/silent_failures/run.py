"""Inject the failures, and write what fp8plan said of each.

    python -m benchmarks.silent_failures.run [--setting own|trl|serve] [--only NAME ...]

The rows that ran take the place of their old ones in results/silent_failures.jsonl; `make tables` then writes
docs/evidence/silent_failures.md. It takes minutes on a CPU, and needs what `make test` installs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import cpu_environment

Labs = Iterator[tuple[Callable[[], Any], Sequence[Any]]]  # a lab, as a context manager, and what is injected there


def rows(setting: str, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of one setting. only: names of failures; empty: all"""

    def wanted(failures: Any) -> list[Any]:
        return [one for one in failures if not only or one.name in only]

    for lab, failures in LABS[setting]():
        if chosen := wanted(failures):
            with lab() as made:
                yield from ({"setting": setting, **made.run(failure)} for failure in chosen)
    if setting == "trl":
        from . import trl_loop

        for failure in wanted(trl_loop.CONFIGURED):
            yield {"setting": setting, **trl_loop.configured(failure, **trl_loop.CONFIGURED[failure])}


def own() -> Labs:
    from . import in_data, in_engine, own_loop

    yield own_loop.lab, (*in_data.FAILURES, *in_engine.DENSE)
    yield partial(own_loop.lab, "moe"), in_engine.MOE


def trl() -> Labs:
    from . import trl_loop

    yield trl_loop.lab, trl_loop.FAILURES


def serve() -> Labs:
    from . import server_loop

    yield server_loop.lab, server_loop.FAILURES


LABS: dict[str, Callable[[], Labs]] = {"own": own, "trl": trl, "serve": serve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("own", "trl", "serve"))
    parser.add_argument("--only", nargs="*", default=())
    options = parser.parse_args()
    cpu_environment.prepare()
    from fp8plan import jsonl

    from . import table

    known = table.reports()
    for setting in [options.setting] if options.setting else table.SETTINGS:
        for row in rows(setting, options.only):
            key = row["failure"], row["setting"]
            kept = [old for old in table.results() if (old["failure"], old["setting"]) != key]
            table.RESULTS.write_bytes(b"".join(map(jsonl.line, [*kept, row])))
            found = table.outcome(row["signs"], known[row["failure"]]["names"])
            said = ", ".join(f"{sign['from']} {sign['name']}" for sign in row["signs"])
            print(f"{setting} {row['failure']}: {found}: k3 {row['k3']}: {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
