"""Time a weight sync of a real model over links of several speeds, shaped between two network namespaces. Needs root.

    python -m benchmarks.slow_links.link FOLDER OUT.jsonl [--gigabits 0.1 1 2.5 5 10 25] [--steps 3]

FOLDER is as in benchmarks.slow_links.steps, whose task trains the model for a few steps; the last one is synced. A
server of HTTP has the bytes of each mode. A client in the namespace at the other end of a veth pair reads them by
fsspec. `tc` shapes the pair (token bucket). The modes:

    bf16       the trainer's tensors; the receiver quantises
    fp8        all tensors, quantised by the trainer
    delta      Publisher's patches; delta+zstd: compressed
    verl       int32 places and BF16 values of what differs (docs/advance/delta_weight_sync.md of verl 0.9); the
               receiver applies them to a BF16 copy and quantises everything

A line has the rate, the mode, its bytes, and seconds: to encode, to cross the link, and to apply.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.slow_links.steps import Tensors, fp8_names, learn, trainer_of, weights_of
from fp8plan.jsonl import append, line
from fp8plan.runtime.measure.machine import machine_facts
from fp8plan.runtime.weight_sync.delta.archive import Archive
from fp8plan.runtime.weight_sync.delta.base import in_format
from fp8plan.runtime.weight_sync.delta.listing import Latest, Link, Store
from fp8plan.runtime.weight_sync.delta.patch import apply, unpacked
from fp8plan.runtime.weight_sync.delta.store import Publisher
from fp8plan.runtime.weight_sync.delta.tiles import bits
from fp8plan.runtime.weight_sync.manifest import entry_of

SPACE, HERE, THERE = "fp8plan-link", "10.99.0.1", "10.99.0.2"
PORT: Final = 8765
WARM: Final = 20_000_000  # bytes before each measurement, more than any burst
READ: Final = """
import sys, time, fsspec
url = sys.argv[1]
with fsspec.open(url.rpartition("/")[0] + "/warm", "rb", block_size=0) as file:  # it empties the bucket of tokens
    file.read()
began, size = time.perf_counter(), 0
with fsspec.open(url, "rb", block_size=0) as file:
    while part := file.read(1 << 22):
        size += len(part)
print(size, time.perf_counter() - began)
"""


def shell(words: str) -> None:
    subprocess.run(words.split(), check=True)


@contextmanager
def shaped(gigabits: float) -> Iterator[None]:
    """A veth pair into another namespace with this rate in bits/s."""
    burst = max(16_000, int(gigabits * 1e9 / 8 / 250))  # bytes between two ticks of the kernel's clock
    shell(f"ip netns add {SPACE}")
    try:
        shell(f"ip link add fp8plan0 type veth peer name fp8plan1 netns {SPACE}")
        shell(f"ip addr add {HERE}/24 dev fp8plan0")
        shell("ip link set fp8plan0 up")
        shell(f"ip -n {SPACE} addr add {THERE}/24 dev fp8plan1")
        shell(f"ip -n {SPACE} link set fp8plan1 up")
        shell(f"tc qdisc add dev fp8plan0 root tbf rate {int(gigabits * 1e9)}bit burst {burst}b latency 50ms")
        yield
    finally:
        subprocess.run(["ip", "link", "del", "fp8plan0"], check=False)
        shell(f"ip netns del {SPACE}")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("0.0.0.0", PORT), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def crossed(name: str) -> tuple[int, float]:
    """Bytes and seconds of a file's way to the other namespace."""
    words = ["ip", "netns", "exec", SPACE, sys.executable, "-c", READ, f"http://{HERE}:{PORT}/{name}"]
    size, seconds = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    return int(size), float(seconds)


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return action(), time.perf_counter() - began


def quantised(tensors: Tensors, fp8: frozenset[str]) -> Tensors:
    return {name: x for parts in in_format(tensors, fp8).values() for name, x in parts.items()}


def write(path: Path, tensors: Any) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(bits(tensor.contiguous()).numpy().tobytes())


def encoded(before: Tensors, after: Tensors, folder: Path) -> dict[str, tuple[float, float]]:
    """Write what each mode sends. Returns seconds to encode and to apply, by mode, without the disk's."""
    fp8 = fp8_names(before)
    held, made = quantised(before, fp8), {}
    new, quantise_s = timed(lambda: quantised(after, fp8))
    write(folder / "bf16", after.values())
    write(folder / "fp8", new.values())

    def copy() -> None:
        for name, x in new.items():
            held[name].copy_(x)

    _, copy_s = timed(copy)
    made["bf16"], made["fp8"] = (0.0, quantise_s + copy_s), (quantise_s, copy_s)
    for mode, codec in (("delta", None), ("delta+zstd", "zstd")):
        store = folder / f"{mode}.chain"
        publisher = Publisher(str(store), fp8=fp8, codec=codec)
        publisher.publish(before)
        _, encode_s = timed(lambda publisher=publisher: publisher.publish(after))
        latest = Store(str(store)).latest()
        path, link = store / latest.newest.file("patches"), latest.newest
        (folder / mode).write_bytes(path.read_bytes())
        live = quantised(before, fp8)

        def patch(path: Path = path, link: Link = link, latest: Latest = latest, live: Tensors = live) -> None:
            with Archive(str(path), path.name, link.stamp, link.patches, latest.manifest, whole=False) as archive:
                names, patches = zip(*archive.patches(), strict=True)
            tensors = [live[name] for name in names]
            entries = [entry_of(*pair) for pair in zip(names, tensors, strict=True)]
            apply(tensors, unpacked(patches, entries, torch.device("cpu")))

        _, apply_s = timed(patch)
        assert all(torch.equal(bits(live[name]), bits(x)) for name, x in new.items())
        made[mode] = (encode_s, apply_s)

    def differing() -> list[torch.Tensor]:
        parts = []
        for name, x in after.items():
            places = (bits(x) != bits(before[name])).flatten().nonzero().flatten()
            parts += [places.int(), x.flatten()[places]]
        return parts

    parts, encode_s = timed(differing)
    write(folder / "verl", parts)
    copies = {name: x.clone() for name, x in before.items()}

    def patch_bf16() -> None:
        for x, places, values in zip(copies.values(), parts[::2], parts[1::2], strict=True):
            x.view(-1)[places.long()] = values

    _, patch_s = timed(patch_bf16)
    made["verl"] = (encode_s, patch_s + quantise_s + copy_s)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_links.link")
    parser.add_argument("folder")
    parser.add_argument("output", type=Path)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.1, 1, 2.5, 5, 10, 25])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    options = parser.parse_args()
    trainer, before = trainer_of(options.folder, options.learning_rate), {}
    for _ in range(options.steps):
        before = weights_of(trainer.policy)
        learn(*trainer)
    after = weights_of(trainer.policy)
    del trainer
    setting = {"model": options.folder.rstrip("/").rpartition("/")[2], "learning_rate": options.learning_rate}
    with tempfile.TemporaryDirectory() as name, served(Path(name)):
        folder = Path(name)
        (folder / "warm").write_bytes(bytes(WARM))
        made = encoded(before, after, folder)
        for gigabits in options.gigabits:
            with shaped(gigabits):
                for mode, (encode_s, apply_s) in made.items():
                    size, link_s = crossed(mode)
                    if size * 8 / link_s > 1.1e9 * gigabits:
                        raise RuntimeError(f"{mode} crossed {gigabits} Gb/s in {link_s} s: the link is not shaped")
                    row = {"gigabits": gigabits, "mode": mode, "bytes": size}
                    row |= {"encode_s": encode_s, "link_s": link_s, "apply_s": apply_s}
                    append(options.output, line(setting | row | machine_facts()))
                    print(gigabits, mode, size, f"{encode_s:.2f} + {link_s:.2f} + {apply_s:.2f} s", flush=True)


if __name__ == "__main__":
    main()
