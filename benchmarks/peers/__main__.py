"""Run peers' own tests of rollout correction against fp8plan's.

    .venv-test/bin/python -m benchmarks.peers --verl CHECKOUT --skyrl CHECKOUT --prime-rl CHECKOUT

prints the verdict on each test and writes benchmarks/results/peers.jsonl, from which `make tables` fills
docs/evidence/speed.md. Nothing is fetched: clone the peers yourself. A folder without git is given as
FOLDER@COMMIT. An option may be given several times, for tests of several commits.

pass:            the test passes with fp8plan's numbers in the place of the peer's
fail:            it does not. Each peer's module has the known reasons; the exit status is 1 if one is not known
cannot be said:  it asks nothing of fp8plan, or something that fp8plan does not have
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.table import RESULTS, summary, unexplained

PEERS = ("verl", "skyrl", "prime-rl")
# Nothing is compiled: prime-rl decorates functions with torch.compile.
ENV = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_DISABLE_IMPORT_WARNING": "1"}


def checked(text: str) -> tuple[Path, str]:
    """The folder of a checkout, and its commit: the one behind "@", or else git's."""
    name, _, commit = text.partition("@")
    folder = Path(name)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{name} is no folder; allowed: a checkout, or FOLDER@COMMIT")
    if not commit:
        asked = subprocess.run(["git", "-C", name, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip()
    if not commit:
        raise argparse.ArgumentTypeError(f"{name} is no git checkout; type {name}@COMMIT")
    return folder, commit


def verdicts(peer: str, folder: Path, commit: str) -> Iterator[dict[str, Any]]:
    """A row for each test of a checkout, from a process of its own: an adapter stands in for the peer's modules."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "verdicts.jsonl"
        command = [sys.executable, "-m", "benchmarks.peers.tests", peer, str(folder), str(output)]
        ran = subprocess.run(command, env=os.environ | ENV, capture_output=True, text=True, check=False)
        if not output.exists():
            raise SystemExit(f"the tests of {peer} in {folder} did not run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        for line in output.read_text(encoding="utf-8").splitlines():
            yield {"peer": peer, "commit": commit, **json.loads(line)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for peer in PEERS:
        parser.add_argument(f"--{peer}", type=checked, action="append", default=[], metavar="CHECKOUT")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = vars(parser.parse_args(words))
    date = datetime.now(UTC).date().isoformat()
    rows = []
    for peer in PEERS:
        for folder, commit in given[peer.replace("-", "_")]:
            for row in verdicts(peer, folder, commit):
                print(f"{row['verdict']:14} {peer}  {row['test']}")
                if row["reason"]:
                    print(f"{'':14} {row['reason']}")
                rows.append(row | {"date": date})
    if not rows:
        parser.error(f"no checkout; type one of {', '.join(f'--{peer} CHECKOUT' for peer in PEERS)}")
    given["output"].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(summary(rows))
    for row in (odd := unexplained(rows)):
        print(f"without a known reason: {row['peer']} {row['test']}: {row['reason']}", file=sys.stderr)
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
