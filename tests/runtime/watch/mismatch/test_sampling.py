"""Sampling parameters of a rollout, what they say about its ratios, and log-probs on the kept set."""

import json
from dataclasses import asdict
from math import inf, log, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.mismatch.sampling import CONSTRAINTS, MODES, RAW, UNCUT, Sampling, kept_logprobs, sampled_at

NEUTRAL = Sampling()
CHANGED = {
    "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {7: 2.0}, "min_tokens": 4, "bad_words": ["no"],
    "allowed_token_ids": [1, 2], "temperature": 0,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_neutral_parameters_bias_nothing(mode: str) -> None:
    sampling = Sampling(logprobs_mode=mode)
    assert (sampling.truncates, sampling.reshapes, sampling.biased, sampling.remarks()) == (False, False, False, ())
    assert sampling.smallest_kept == 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHANGED)
def test_each_parameter_that_changes_the_distribution_is_a_bias_in_each_mode(name: str, mode: str) -> None:
    sampling = Sampling.of({name: CHANGED[name]}, mode)
    assert sampling is not None
    assert sampling.biased
    (remark,) = sampling.remarks()
    assert "; set " in remark
    assert sampling.reshapes == ("penalty" in name or name == "logit_bias")
    assert sampling.truncates != sampling.reshapes


def test_top_p_says_by_how_much_and_what_to_type() -> None:
    sampling = Sampling(top_p=0.8)
    assert sampling.smallest_kept == 0.8
    (remark,) = sampling.remarks()
    assert remark == (
        "top_p 0.8: vLLM renormalises over the kept tokens, so each ratio is the kept mass (0.8 to 1) times what it "
        "should be; set top_p=1.0, or score the trainer on the kept set (fp8plan.kept_logprobs)"
    )


@pytest.mark.parametrize("beside", [{"top_k": 50}, {"min_p": 0.1}, {"min_tokens": 1}, {"temperature": 0.0}])
def test_mass_of_a_nucleus_within_another_cut_is_unknown(beside: dict) -> None:
    sampling = Sampling.of({"top_p": 0.9} | beside)
    assert sampling is not None
    assert sampling.smallest_kept is None


def test_trainer_on_the_kept_set_repairs_a_cut_and_nothing_else() -> None:
    assert not Sampling(top_p=0.8, top_k=20, min_p=0.1, kept_set=True).biased
    assert Sampling(top_p=0.8, repetition_penalty=1.2, kept_set=True).biased
    with pytest.raises(ConfigError, match=r"kept_set=True with raw_logprobs.*allowed: processed_logprobs"):
        Sampling(top_p=0.8, kept_set=True, logprobs_mode=RAW)


def test_temperature_is_right_if_the_trainer_has_the_same() -> None:
    unknown, same = Sampling(temperature=0.7), Sampling(temperature=0.7, trainer_temperature=0.7)
    assert not unknown.biased
    assert "only if the trainer divides its logits by 0.7" in unknown.remarks()[0]
    assert same.remarks() == ()
    other = Sampling(temperature=0.7, trainer_temperature=1.0)
    assert other.biased
    assert "divides its logits by 1" in other.remarks()[0]
    assert Sampling(temperature=0.7, trainer_temperature=0.7, logprobs_mode=RAW).biased
    assert not Sampling(temperature=0.7, trainer_temperature=0.7, logprobs_mode=UNCUT).biased


@pytest.mark.parametrize("asked", [1e-6, 0.005, 0.0099])
def test_vllm_raises_low_temperatures_so_these_are_the_ones_that_sampled(asked: float) -> None:
    sampled = Sampling(temperature=asked)
    assert sampled == Sampling(temperature=0.01)
    assert not sampled.greedy
    assert "only if the trainer divides its logits by 0.01," in sampled.remarks()[0]
    (remark,) = Sampling(temperature=asked, trainer_temperature=asked).remarks()
    assert remark.startswith("temperature 0.01 (vLLM raises lower ones to it): the trainer divides its logits by ")
    assert remark.endswith("divide them by 0.01")
    assert Sampling(temperature=asked, trainer_temperature=0.01).remarks() == ()
    assert Sampling(temperature=asked, logprobs_mode=UNCUT).temperature == asked  # SGLang's


def test_vllm_sampling_params_are_read_and_defaults_are_neutral() -> None:
    vllm = pytest.importorskip("vllm")
    assert Sampling.of(vllm.SamplingParams(max_tokens=9, n=4, seed=1, ignore_eos=True, stop=["x"])) == NEUTRAL
    params = vllm.SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, logit_bias={3: -100.0}, min_tokens=2)
    assert Sampling.of(params, RAW) == Sampling(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, logit_bias=True, constrained=True, logprobs_mode=RAW
    )
    for temperature in (0.0, 1e-6, 0.005, 0.01, 0.7):
        assert vllm.SamplingParams(temperature=temperature).temperature == sampled_at(temperature)


def test_constraints_are_parameters_of_this_vllm_or_of_its_routes() -> None:
    vllm = pytest.importorskip("vllm")
    of_routes = {name for name in CONSTRAINTS if name.startswith(("guided_", "use_", "response_"))}
    of_routes.add("structured_outputs_regex")  # of TRL's client
    assert set(CONSTRAINTS) - of_routes <= set(vllm.SamplingParams.__struct_fields__)


def test_a_request_body_is_read_and_null_is_the_default() -> None:
    body = {"model": "m", "messages": [], "top_p": None, "top_k": -1, "temperature": 1, "logit_bias": {}, "n": 8}
    assert Sampling.of(body) == NEUTRAL
    assert Sampling.of(None) is None
    assert Sampling.of(Sampling(top_p=0.5), RAW, trainer_temperature=1) == Sampling(top_p=0.5, trainer_temperature=1.0)


def test_a_record_of_it_reads_back() -> None:
    sampling = Sampling(top_p=np.float32(0.5), top_k=np.int64(3), logit_bias=True, constrained=True, logprobs_mode=RAW)
    assert Sampling.of(json.loads(json.dumps(asdict(sampling)))) == sampling


def test_requests_that_differ_count_as_the_most_changed() -> None:
    every = [{"top_p": 0.9, "top_k": 50}, {"top_p": 0.95, "temperature": 0.5}, {"temperature": 1.2, "top_k": 20}]
    assert Sampling.of(every) == Sampling(top_p=0.9, top_k=20, temperature=0.5)
    assert Sampling.of([{"temperature": 0.0}, {}]) == Sampling(temperature=0.0)
    assert Sampling.of([{}, None]) is None
    assert Sampling.of([]) is None
    some = [Sampling(top_p=0.5, kept_set=True), Sampling(top_p=0.5)]
    assert Sampling.mixed(some) == Sampling(top_p=0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", nan), ("temperature", inf), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
        ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", nan), ("logprobs_mode", "raw_logits"),
        ("trainer_temperature", 0), ("kept_set", 1), ("temperature", None),
    ],
)  # fmt: skip
def test_values_that_vllm_does_not_take_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*; allowed: "):
        Sampling(**{name: value})


@pytest.mark.parametrize("params", [3, "top_p=0.8", object()])
def test_what_has_no_parameters_is_refused(params: object) -> None:
    with pytest.raises(ConfigError, match=r"sampling is .*; allowed: a vLLM SamplingParams"):
        Sampling.of(params)


def drawn(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    """Tokens [rows] sampled from the nuclei, the nuclei, and the engine's renormalised log-probs [rows]."""
    probs, ids = logits.softmax(-1).sort(-1, descending=True)
    keep = (probs.cumsum(-1) - probs) < top_p
    kept = torch.where(keep, probs, 0.0)
    mass = kept.sum(-1, keepdim=True)
    pick = torch.multinomial(kept / mass, 1)
    sets = [row[some].tolist() for row, some in zip(ids, keep, strict=True)]
    return ids.gather(-1, pick).squeeze(-1), sets, (probs.gather(-1, pick) / mass).log().squeeze(-1)


def test_scores_on_the_kept_set_are_the_engines_and_full_ones_are_off_by_the_kept_mass() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(4096, 500)
    tokens, sets, rollout = drawn(logits, 0.8)
    train = kept_logprobs(logits, tokens, sets)
    torch.testing.assert_close(train, rollout, rtol=0, atol=1e-5)
    full = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    ratios = (full - rollout).exp()
    least = Sampling(top_p=0.8).smallest_kept
    assert least is not None
    assert least - 1e-5 <= ratios.min()
    assert ratios.max() <= 1 + 1e-5
    assert ratios.mean() < 0.9  # what the remark warns of


def test_scores_on_a_known_set() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 50.0], [0.0, 0.0, 0.0, 0.0]]).log()
    logits[1] = 0.0
    found = kept_logprobs(logits, torch.tensor([1, 3]), [[0, 1, 2], [3]])
    assert found.tolist() == pytest.approx([log(2 / 6), 0.0])


def test_gradient_is_that_of_a_softmax_over_the_kept_set() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    sets = [[0, 2, 5], [1], [6, 0, 1, 2]]
    tokens = torch.tensor([2, 1, 0])
    kept_logprobs(logits, tokens, sets).sum().backward()
    masked = torch.full((3, 7), -inf, dtype=torch.float64)
    again = logits.detach().clone().requires_grad_()
    for row, ids in enumerate(sets):
        masked[row, ids] = 0.0
    (again + masked).log_softmax(-1).gather(-1, tokens[:, None]).sum().backward()
    torch.testing.assert_close(logits.grad, again.grad, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_scores_are_a_distribution_over_any_kept_set(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 12))
    logits = torch.tensor([data.draw(st.lists(st.floats(-80, 80), min_size=vocabulary, max_size=vocabulary))])
    kept = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=vocabulary, unique=True))
    rows = logits.expand(len(kept), -1)
    found = kept_logprobs(rows, torch.tensor(kept), [kept] * len(kept))
    assert float(found.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert bool((found <= 1e-6).all())


@pytest.mark.parametrize(
    ("sets", "tokens", "says"),
    [
        ([[0, 1]], [2], r"token 2 at position 0 is not in its kept set of 2"),
        ([[]], [0], r"token 0 at position 0 is not in its kept set of 0"),
        ([[0, 9]], [0], r"sampling mask has token 9; allowed: 0 to 3"),
        ([[0], [1]], [0], r"has 2 sets"),
        ([[0]], [0, 1], r"token_ids \(2,\)"),
        ([[True, False]], [0], r"values that are no token ids; allowed: the ids of each kept set"),
        ([[0, 1.5]], [0], r"values that are no token ids"),
    ],
)
def test_masks_of_other_tokens_are_refused(sets: list[list[int]], tokens: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kept_logprobs(torch.zeros(1, 4), torch.tensor(tokens), sets)


def test_vllms_own_sampling_mask_is_taken() -> None:
    outputs = pytest.importorskip("vllm.outputs")
    found = kept_logprobs(torch.zeros(2, 8), torch.tensor([3, 4]), outputs.SamplingMask([[3, 5], [4]]))
    assert found.tolist() == pytest.approx([-log(2), 0.0])


def test_nothing_sampled_is_nothing_scored() -> None:
    assert kept_logprobs(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), []).shape == (0,)
