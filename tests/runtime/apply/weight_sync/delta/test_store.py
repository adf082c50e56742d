"""A trainer and engines that meet in a store: whatever an engine missed, it has the bits of a sync of everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CALIBRATION, started, weights

from fp8plan.errors import ConfigError, SyncError
from fp8plan.runtime.apply.engine.engine import RolloutEngine
from fp8plan.runtime.apply.weight_sync.calls import Rpc
from fp8plan.runtime.apply.weight_sync.delta.follower import Follower
from fp8plan.runtime.apply.weight_sync.delta.store import Publisher

pytestmark = pytest.mark.vllm

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["fp8_block", pytest.param("fp8_kv", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Iterator[RolloutEngine]:
    """On a CPU vLLM must reload most BF16 layers."""
    with started("dense", "a", request.param, weights_in="fp8_block") as engine:
        yield engine


@pytest.fixture
def ends(engine: RolloutEngine, tmp_path: Path) -> tuple[Publisher, Follower]:
    """Both ends of a chain with a whole version in three, compressed for one of the engines."""
    codec = "zstd" if engine.launch.precision == "fp8_block" else None
    engine.state.stamp = None
    follower = Follower(str(tmp_path / "chain"))
    assert follower.pull(engine) is None  # nothing is there yet, but the trainer now knows the formats
    return Publisher(str(tmp_path / "chain"), every=3, codec=codec), follower


def versions(count: int) -> list[Tensors]:
    """The weights of successive steps, each with some values changed."""
    steps = [weights("dense", "b")]
    for step in range(count - 1):
        generator = torch.Generator().manual_seed(step)
        new = {
            name: torch.where(torch.rand(x.shape, generator=generator) < 0.02, x * 1.1, x).to(x.dtype)
            for name, x in steps[-1].items()
        }
        steps.append(new)
    return steps


def digests(engine: RolloutEngine) -> Any:
    return engine.answer(Rpc("fp8plan_digests"))


def of_all(engine: RolloutEngine, tensors: Tensors) -> Any:
    """The digests after a sync of all tensors, quantised here."""
    from fp8plan.runtime.apply.weight_sync.delta.base import in_format

    parts = in_format(tensors, engine.state.quantised).values()
    engine.sync_weights({name: tensor for part in parts for name, tensor in part.items()})
    return digests(engine)


def test_an_engine_that_follows_has_the_bits_of_each_version(
    engine: RolloutEngine, ends: tuple[Publisher, Follower]
) -> None:
    publisher, follower = ends
    steps, live = versions(6), []
    for number, tensors in enumerate(steps):
        made = publisher.publish(tensors)
        assert (made.whole_bytes > 0) == (number % 3 == 0)
        report = follower.pull(engine, kv_prompts=CALIBRATION)
        assert report is not None
        assert report.patched == (number > 0)
        if number:
            assert 0 < made.nbytes < publisher._base.manifest[0].nbytes * 10
        assert follower.pull(engine) is None
        assert engine.engine_facts().delta_bytes is None  # a chain may lead over several versions
        live.append(digests(engine))
    assert live == [of_all(engine, tensors) for tensors in steps]


def test_an_engine_that_was_away_replays_the_chain_or_takes_a_whole_version(
    engine: RolloutEngine, ends: tuple[Publisher, Follower]
) -> None:
    publisher, follower = ends
    steps = versions(9)
    publisher.publish(steps[0])
    follower.pull(engine)
    publisher.publish(steps[1])
    publisher.publish(steps[2])
    report = follower.pull(engine)
    assert report is not None
    assert report.patched
    assert digests(engine) == of_all(engine, steps[2])  # its stamp is no link of the chain now
    for tensors in steps[3:]:
        publisher.publish(tensors)
    report = follower.pull(engine)
    assert report is not None
    assert not report.patched
    live = digests(engine)
    assert live == of_all(engine, steps[-1])


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_file_heals_by_the_next_whole_version(
    engine: RolloutEngine, ends: tuple[Publisher, Follower], damage: str
) -> None:
    publisher, follower = ends
    steps = versions(4)
    publisher.publish(steps[0])
    follower.pull(engine)
    publisher.publish(steps[1])
    (path,) = Path(publisher._store.path("")).glob("00000002-*.patches")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data if damage == "flipped" else data[:-20])
    if damage == "gone":
        path.unlink()
    before = digests(engine)
    with pytest.raises(SyncError, match=r"00000002-\w{8}.patches.*Nothing was written; the old weights serve"):
        follower.pull(engine)
    assert engine.serving
    assert digests(engine) == before
    publisher.publish(steps[2])
    publisher.publish(steps[3])
    report = follower.pull(engine)
    assert report is not None
    live = digests(engine)
    assert engine.serving
    assert live == of_all(engine, steps[3])


def test_a_trainer_that_starts_again_begins_with_a_whole_version(
    engine: RolloutEngine, ends: tuple[Publisher, Follower]
) -> None:
    publisher, follower = ends
    first, second = versions(2)
    publisher.publish(first)
    follower.pull(engine)
    made = Publisher(publisher._store.url, every=3).publish(second)
    assert (made.version, made.nbytes, made.whole_bytes > 0) == (2, 0, True)
    report = follower.pull(engine)
    assert report is not None
    assert not report.patched
    assert digests(engine) == of_all(engine, second)


def test_a_store_keeps_the_last_two_whole_versions_and_what_follows(ends: tuple[Publisher, Follower]) -> None:
    publisher, _ = ends
    for tensors in versions(8):
        publisher.publish(tensors)
    names = sorted(path.name for path in Path(publisher._store.path("")).iterdir())
    numbers = [f"{number:08d}.patches" for number in range(4, 9)]
    plain = [re.sub("-[0-9a-f]{8}", "", name) for name in names]
    assert sorted(plain) == sorted([*numbers, "00000004.whole", "00000007.whole", "engine.json", "latest.json"])


def test_bad_input_is_refused_with_what_to_type(tmp_path: Path) -> None:
    url = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no engine has followed .* Follower\(url\).pull\(engine\)"):
        Publisher(url)
    with pytest.raises(ConfigError, match="codec is 'gzip'; allowed: None, 'zstd'"):
        Publisher(url, fp8=[], codec="gzip")
    with pytest.raises(ConfigError, match="every is 0; allowed: a whole number of at least 1"):
        Publisher(url, fp8=[], every=0)
    with pytest.raises(ConfigError, match="allowed: a folder, or a URL of an fsspec file system"):
        Follower("nothing://x")
    publisher = Publisher(url, fp8=[])
    publisher.publish({"a": torch.ones(3), "b": torch.ones(4)})
    with pytest.raises(ConfigError, match="announced and not sent: b"):
        publisher.publish({"a": torch.zeros(3)})
    assert publisher.publish({"a": torch.zeros(3), "b": torch.ones(4)}).version == 2


def test_a_version_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path), fp8=[])
    tensors = {"a": torch.ones(4, 4), "b": torch.ones(4)}
    publisher.publish(tensors)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match="announced and not sent: b"):
        publisher.publish({"a": torch.ones(4, 4) * 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert publisher.publish(tensors | {"a": torch.ones(4, 4) * 2}).nbytes
