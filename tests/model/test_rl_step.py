"""The RL step around a rollout: trainer figures and what new weights cost, as laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from uniform_models import resized

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, Experts, Layer
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import PRESETS
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rl_step import PATCH_BYTE_SECONDS, Mode, StepTimes, SyncCost, WeightSync, full_prefill, sync_costs
from fp8plan.model.weight_changes import TopK

H200 = find_gpu("h200")
PROFILE, _ = load_profile(H200)
FREE = {"train_s": 0.0, "logprob_s": 0.0}


def sync(gb_per_s: float = 50) -> WeightSync:
    return WeightSync(f"{gb_per_s:g}GB/s")


def weight_sync_seconds(model: StepModel, sync: WeightSync, recalibrate_kv: bool = True) -> dict[str, float]:
    """The parts of a dense sync."""
    (dense,) = sync_costs(model, sync, recalibrate_kv)
    return dense.parts


def model(precision: str = "bf16", name: str = "Qwen/Qwen3-8B", **limits: int) -> StepModel:
    return StepModel(ModelShape.from_hf(name), H200, PRESETS[precision], EngineLimits(**limits), PROFILE)  # type: ignore[arg-type]


def test_seconds_are_added_up() -> None:
    assert StepTimes(train_s=0, logprob_s=0).seconds(10**6) == 0
    assert StepTimes(train_s=3, logprob_s=0).seconds(10**6) == 3
    assert StepTimes(train_s=3, logprob_s=4).seconds(1) == 7


def test_tokens_per_second_scale_with_the_batch() -> None:
    trainer = StepTimes(train_tokens_per_s=100, logprob_tokens_per_s=400)
    assert trainer.seconds(400) == pytest.approx(5)
    assert trainer.seconds(800) == pytest.approx(2 * trainer.seconds(400))
    assert StepTimes(train_s=2, logprob_tokens_per_s=400).seconds(400) == pytest.approx(3)


@pytest.mark.parametrize(
    ("given", "missing", "there"),
    [
        ({}, ("training", "log-probs", "train_s or train_tokens_per_s", "--train-s", "--logprob-s"), ()),
        ({"train_s": 5}, ("log-probs", "logprob_s or logprob_tokens_per_s", "--logprob-s"), ("train_s",)),
        ({"train_tokens_per_s": 5}, ("log-probs", "--logprob-s"), ("train_s",)),
        ({"logprob_s": 0}, ("training", "--train-s"), ("logprob_s",)),
        ({"logprob_tokens_per_s": 9}, ("training", "--train-s"), ("logprob_s",)),
    ],
)
def test_a_part_of_the_step_that_is_left_out_is_no_zero(
    given: dict[str, float], missing: tuple[str, ...], there: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="the RL step lacks") as caught:
        StepTimes(**given)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in missing)
    assert not any(word in str(caught.value) for word in there)


@pytest.mark.parametrize("part", ["train", "logprob"])
def test_seconds_and_tokens_per_second_at_once_are_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=f"{part}_s and {part}_tokens_per_s.*give one"):
        StepTimes(**FREE | {f"{part}_s": 1.0, f"{part}_tokens_per_s": 5.0})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["train_s", "logprob_s", "train_tokens_per_s", "logprob_tokens_per_s"])
def test_senseless_figures_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        StepTimes(**FREE | {name: value})


@pytest.mark.parametrize("name", ["train_tokens_per_s", "logprob_tokens_per_s"])
def test_a_rate_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0.*above 0"):
        StepTimes(**FREE | {name: 0.0})


def test_bf16_pays_for_the_transfer_alone() -> None:
    parts = weight_sync_seconds(model("bf16"), sync())
    assert set(parts) == {"transfer", "quantise", "patch", "kv_scales"}
    assert parts["transfer"] > 0
    assert parts["quantise"] == parts["patch"] == parts["kv_scales"] == 0


@pytest.mark.parametrize("precision", PRESETS)
def test_quantisation_costs_fp8_weights_and_recalibration_costs_fp8_kv(precision: str) -> None:
    parts = weight_sync_seconds(model(precision), sync())
    assert (parts["quantise"] > 0) == ("fp8_block" in precision)
    assert (parts["kv_scales"] > 0) == ("fp8_kv" in precision)
    # The trainer sends BF16 whatever the engine stores.
    assert parts["transfer"] == weight_sync_seconds(model("bf16"), sync())["transfer"]


def test_the_transfer_takes_the_published_parameters_over_the_bandwidth() -> None:
    seconds = weight_sync_seconds(model("bf16"), sync(1))["transfer"]
    assert seconds == pytest.approx(16.4, rel=0.01)  # Qwen3-8B: 8.2e9 parameters (model card) of two bytes


def test_the_transfer_scales_with_bandwidth_model_and_ranks() -> None:
    def transfer(bandwidth: float = 50, **options: object) -> float:
        return weight_sync_seconds(model(**options), sync(bandwidth))["transfer"]  # type: ignore[arg-type]

    assert transfer(100) == pytest.approx(transfer(50) / 2)
    assert transfer(tensor_parallel_size=4) == pytest.approx(transfer() / 4)
    assert transfer(name="Qwen/Qwen3-32B") > 3 * transfer()


def test_bandwidth_moves_nothing_but_the_transfer() -> None:
    slow, fast = (weight_sync_seconds(model("fp8_block+fp8_kv"), sync(b)) for b in (1, 1000))
    assert slow["transfer"] > fast["transfer"]
    assert (slow["quantise"], slow["kv_scales"]) == (fast["quantise"], fast["kv_scales"])


def test_quantising_reads_the_bf16_weights_at_least_once() -> None:
    quantise = weight_sync_seconds(model("fp8_block"), sync())["quantise"]
    # Qwen3-8B without embedding and lm_head: 6.95e9 parameters (model card), nearly all of them in linear layers.
    assert quantise > 2 * 6.94e9 / H200.memory_bandwidth
    assert quantise < 16.4e9 / sync().bandwidth  # HBM is faster than any network


@pytest.mark.parametrize(
    ("name", "measured", "error"), [("Qwen/Qwen3-8B", 0.014, 0.4), ("Qwen/Qwen3-30B-A3B", 0.206, 0.1)]
)
def test_quantising_takes_about_as_long_as_it_took(name: str, measured: float, error: float) -> None:
    """In place, on an H200: docs/evidence/weight_sync.md."""
    quantise = weight_sync_seconds(model("fp8_block", name), sync())["quantise"]
    assert quantise == pytest.approx(measured, rel=error)


def test_only_quantised_matrices_are_quantised() -> None:
    """A larger vocabulary is more to send, and no more to quantise; experts are."""
    narrow = model("fp8_block")
    wide = replace(narrow, shape=replace(narrow.shape, vocab_size=2 * narrow.shape.vocab_size))
    before, after = (weight_sync_seconds(m, sync()) for m in (narrow, wide))
    assert after["transfer"] > 1.1 * before["transfer"]
    assert after["quantise"] == before["quantise"]
    sparse = model("fp8_block", "Qwen/Qwen3-30B-A3B")
    ((experts, _),) = sparse.shape.parts_of(Experts)
    fewer = resized(sparse.shape, experts=replace(experts, num_experts=64))
    half = weight_sync_seconds(replace(sparse, shape=fewer), sync())["quantise"]
    assert 0.5 < half / weight_sync_seconds(sparse, sync())["quantise"] < 0.55


def test_scales_are_observed_in_requests_that_the_engine_takes() -> None:
    """Attention within many short requests costs less than within one that is longer than max_model_len."""
    costs = [
        weight_sync_seconds(model("fp8_kv", max_num_batched_tokens=32768, max_model_len=length), sync())["kv_scales"]
        for length in (1024, 3000, 32768, 40960)
    ]
    assert costs[0] < costs[1] < costs[2] == costs[3]
    few = weight_sync_seconds(model("fp8_kv", max_num_seqs=2, max_model_len=1024), sync())["kv_scales"]
    assert few < costs[0] / 4  # two requests of 1,024 tokens do not fill the budget


def test_kv_scales_that_are_left_at_one_cost_nothing() -> None:
    parts = weight_sync_seconds(model("fp8_block+fp8_kv"), sync(), recalibrate_kv=False)
    assert parts["kv_scales"] == 0
    assert parts["quantise"] > 0


@pytest.mark.parametrize(
    ("link", "bandwidth"),
    [("25Gb/s", 3.125e9), ("3GB/s", 3e9), ("200 Gb/s", 25e9), ("1.5Tb/s", 187.5e9), ("9MB/s", 9e6)],
)
def test_a_link_is_in_bits_or_bytes(link: str, bandwidth: float) -> None:
    assert WeightSync(link).bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize("space", ["", " ", "  "])
@pytest.mark.parametrize("second", ["/s", "/sec", "ps"])
@pytest.mark.parametrize(("unit", "of"), [("b", 8), ("bit", 8), ("bits", 8), ("B", 1), ("Byte", 1), ("Bytes", 1)])
@pytest.mark.parametrize(("prefix", "size"), [("M", 1e6), ("G", 1e9), ("T", 1e12)])
def test_a_link_in_the_spellings_of_its_unit(
    prefix: str, size: float, unit: str, of: int, second: str, space: str
) -> None:
    assert WeightSync(f"25{space}{prefix}{unit}{second}").bandwidth == pytest.approx(25 * size / of)


@pytest.mark.parametrize(
    "link",
    [
        "25",
        "25G",
        "25gbps",
        "25gBps",
        "25kb/s",
        "25Gp/s",
        "25Gbb/s",
        "25Gb/h",
        "25gb/s",
        "0Gb/s",
        "-3Gb/s",
        "nanGb/s",
        "",
        25e9,
        None,
    ],
)
def test_any_other_link_is_refused_with_what_to_type(link: object) -> None:
    with pytest.raises(ConfigError, match=r"link is .*Gb/s.*bits.*GB/s.*bytes.*type: 25Gb/s"):
        WeightSync(link)  # type: ignore[arg-type]


def test_a_senseless_learning_rate_and_an_unknown_optimiser_are_refused() -> None:
    for rate in (-1e-6, float("nan"), "1e-6"):
        with pytest.raises(ConfigError, match=r"learning_rate is .*at least 0"):
            WeightSync(learning_rate=rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer is 'lion'; allowed: adamw, muon"):
        WeightSync(optimizer="lion")


def costs(precision: str, link: str, rate: float, name: str = "Qwen/Qwen3-8B") -> dict[str, SyncCost]:
    return {cost.mode: cost for cost in sync_costs(model(precision, name), WeightSync(link, rate))}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_the_best_sync_is_the_first_and_never_slower_over_a_faster_link(precision: str, name: str) -> None:
    best = []
    for link in ("1Gb/s", "10Gb/s", "25Gb/s", "100Gb/s", "400Gb/s", "3.2Tb/s", "99Tb/s"):
        every = list(costs(precision, link, 1e-6, name).values())
        assert every[0].seconds == min(cost.seconds for cost in every)
        best.append(every[0])
    assert all(slow.seconds >= fast.seconds for slow, fast in pairwise(best))
    assert (best[0].mode, best[-1].mode == Mode.DELTA) == (Mode.DELTA, False)


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_a_delta_pays_below_its_break_even_and_not_above(precision: str) -> None:
    modes = costs(precision, "25Gb/s", 1e-6)
    dense = next(cost for cost in modes.values() if cost.mode.dense)
    even = modes[Mode.DELTA].pays_below(dense)
    for factor, faster in ((0.99, True), (1.01, False)):
        there = costs(precision, f"{even * factor / 1e6:.6f}MB/s", 1e-6)
        assert (there[Mode.DELTA].seconds < there[dense.mode].seconds) == faster


def test_modes_send_less_in_fp8_and_a_delta_grows_with_the_learning_rate_up_to_all() -> None:
    bf16, fp8 = costs("bf16", "25Gb/s", 1e-6), costs("fp8_block", "25Gb/s", 1e-6)
    assert list(bf16) == ["delta", "dense BF16"]
    assert list(fp8) == ["delta", "dense FP8", "dense BF16"]
    # Qwen3-8B: 6.95e9 of its 8.19e9 parameters (model card) are in FP8, one byte each, and the scales.
    assert fp8["dense BF16"].bytes - fp8["dense FP8"].bytes == pytest.approx(6.95e9, rel=0.01)
    assert fp8["delta"].bytes < bf16["delta"].bytes / 2
    sizes = [costs("fp8_block", "25Gb/s", rate)["delta"].bytes for rate in (0.0, 1e-7, 1e-6, 1e-5, 1e-3, 1.0)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] == pytest.approx(fp8["dense FP8"].bytes, rel=0.01)


def test_rates_at_which_all_changes_make_a_delta_useless() -> None:
    modes = costs("bf16", "25Gb/s", 1.0)
    assert modes[Mode.DELTA].pays_below(modes["dense BF16"]) < 1e8
    assert next(iter(modes)) == "dense BF16"


def top_k(precision: str, setting: str, rate: float = 1e-6, **limits: int) -> dict[str, SyncCost]:
    made = sync_costs(model(precision, **limits), WeightSync("25Gb/s", rate, top_k=TopK.parse(setting)))
    return {cost.mode: cost for cost in made}


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_top_k_is_a_mode_where_it_is_asked_for_and_takes_its_own_seconds(precision: str) -> None:
    assert Mode.TOP_K not in costs(precision, "25Gb/s", 1e-6)
    modes = top_k(precision, "1e-4")
    assert [mode for mode in modes if not mode.lossless] == [Mode.TOP_K]
    assert modes[Mode.TOP_K].bytes < modes[Mode.DELTA].bytes
    own = {mode: modes[mode].parts["patch"] - PATCH_BYTE_SECONDS * modes[mode].bytes for mode in modes}
    assert own[Mode.TOP_K] > own[Mode.DELTA] > 0
    others = [
        [each.parts[part] for part in ("quantise", "kv_scales")] for each in modes.values() if not each.mode.dense
    ]
    assert others[0] == others[1]
    assert {mode: cost for mode, cost in modes.items() if mode.lossless} == costs(precision, "25Gb/s", 1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("settings", [("1e-6", "1e-4", "1e-2", "1"), ("4MB", "9MB", "90MB", "90GB")])
def test_top_k_sends_more_where_it_may_up_to_a_delta(precision: str, settings: tuple[str, ...]) -> None:
    modes = [top_k(precision, setting) for setting in settings]
    sizes = [each[Mode.TOP_K].bytes for each in modes]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[-1]
    assert sizes[-1] == pytest.approx(modes[-1][Mode.DELTA].bytes)
    assert modes[-1][Mode.DELTA].pays_below(modes[-1][Mode.TOP_K]) == 0


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_a_looser_residual_sends_less_and_a_tight_one_a_delta(precision: str) -> None:
    sizes = [top_k(precision, f"residual={left}")[Mode.TOP_K].bytes for left in (1e-9, 1e-4, 1e-3, 1e-2, 1)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(costs(precision, "25Gb/s", 1e-6)[Mode.DELTA].bytes)
    assert sizes[-1] < sizes[0] / 20  # new scales and their blocks remain


@pytest.mark.parametrize("nbytes", [5e6, 2e7, 1e8])
def test_the_bytes_of_top_k_are_those_of_the_whole_model(nbytes: float) -> None:
    """A BF16 model has no scales. One of two ranks receives half."""
    size, half = (top_k("bf16", f"{nbytes / 1e6}MB", tensor_parallel_size=tp)[Mode.TOP_K].bytes for tp in (1, 2))
    assert 0.8 * nbytes < size <= nbytes
    assert half == pytest.approx(size / 2, rel=0.1)


def test_bytes_that_hold_no_patch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nbytes is 1000; allowed for this model: more than [0-9]+$"):
        top_k("fp8_block", "1KB")


WINDOWED = (Attention(32, 8, 128, window=1024), Attention(32, 8, 128, chunk=3000), Attention(32, 8, 128))


def test_a_step_of_prefill_says_what_windows_leave_of_its_reads() -> None:
    base = ModelShape.from_hf("Qwen/Qwen3-8B")
    shape = replace(base, layers=tuple(replace(base.layers[0], mixer=mixer) for mixer in WINDOWED))
    batch = full_prefill(shape, EngineLimits(max_num_batched_tokens=10_000, max_num_seqs=8), 4000)
    assert [(x.kind, x.window) for x in batch.windows] == [("sliding", 1024), ("chunked", 3000)]
    lengths, seen = (4000, 4000, 2000), {"sliding": 1024, "chunked": 3000}
    assert (batch.prefill_requests, batch.prefill_tokens) == (3, 10_000)
    assert batch.prefill_pairs == sum(position + 1 for n in lengths for position in range(n))
    for work in batch.windows:
        size = seen[work.kind]
        rule = (lambda i: min(i + 1, size)) if work.kind == "sliding" else (lambda i: i % size + 1)  # noqa: B023
        assert work.prefill_pairs == sum(rule(position) for n in lengths for position in range(n))
        assert work.prefill_kv_tokens == 10_000
        assert work.decode_kv_tokens == 0


def test_experts_of_two_sizes_are_quantised_as_they_are() -> None:
    base = ModelShape.from_hf("Qwen/Qwen3-30B-A3B")
    first = base.layers[0]
    [(experts, _)] = base.parts_of(Experts)
    small = replace(first, mlp=replace(experts, num_experts=16, intermediate_size=256))

    def quantised(*layers: Layer) -> float:
        step = StepModel.__new__(StepModel)  # only what the sync reads of it: two kinds of experts have no step yet
        for name, value in {
            "shape": replace(base, layers=layers),
            "gpu": H200,
            "precision": PRESETS["fp8_block"],
        }.items():
            object.__setattr__(step, name, value)
        object.__setattr__(step, "limits", EngineLimits())
        return weight_sync_seconds(step, sync())["quantise"]

    assert quantised(first, first, small) == pytest.approx(2 * quantised(first) + quantised(small))
    assert quantised(small) < quantised(first) / 4
