"""The sampling parameters of a rollout, and how they bias the ratios between trainer and rollout.

    sampling = Sampling.of(sampling_params)          # vLLM's, a trainer's configuration, or the body of a request
    for remark in sampling.remarks():                # the bias, its size, and the remedy
        print(remark)

A ratio compares the trainer's log-prob with the engine's. Its mean is 1 only if both score the distribution that
sampled. The engine samples from softmax(logits / temperature), with penalties and biases on the logits, cut to the
tokens that top_k, top_p, min_p and constraints keep. A trainer that scores the whole vocabulary knows none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import inf, log
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from fp8plan.checks import Range, in_range, whole
from fp8plan.errors import ConfigError
from fp8plan.runtime.tokens import whole_numbers

if TYPE_CHECKING:
    import torch

# The engine's log-probs: after everything that sampling does to logits; before the cut alone (SGLang's); before it all.
LogprobsMode = Literal["processed_logprobs", "uncut_logprobs", "raw_logprobs"]
PROCESSED, UNCUT, RAW = MODES = get_args(LogprobsMode)

# Settings of a request that forbid or force tokens, by the names of vLLM, of its HTTP routes and of TRL.
CONSTRAINTS: Final = (
    "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs", "structured_outputs_regex", "response_format",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "thinking_token_budget", "trace_decode_token_ids",
    "use_beam_search",
)  # fmt: skip
KEPT: Final = ", or score the trainer on the kept set (fp8plan.kept_logprobs)"  # the other remedy of a cut
# vLLM samples at this temperature if a request asks for a lower one above 0 (vllm/sampling_params.py, _MAX_TEMP, 0.32).
# SGLang does not.
LEAST_TEMPERATURE: Final = 0.01
# Values that vLLM allows.
RANGES: Final[dict[str, Range]] = {
    "temperature": (lambda x: 0 <= x < inf, "0 or more"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, 1 at most"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (lambda x: 0 < x < inf, "above 0"),
    "presence_penalty": (lambda x: abs(x) <= 2, "-2 to 2"),
    "frequency_penalty": (lambda x: abs(x) <= 2, "-2 to 2"),
    "trainer_temperature": (lambda x: 0 < x < inf, "above 0, or None"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a rollout, under vLLM's names; each default changes nothing.

    temperature:   divisor of the engine's logits; 0: greedy. vLLM raises lower ones than 0.01, and so does this class
    top_p:         probability mass to keep; 1: all
    top_k:         number of tokens to keep; 0: all
    min_p:         least probability to keep, as a share of the likeliest token's; 0: all
    repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0: none
    logit_bias:    True if some logits had a bias
    constrained:   True if tokens were forbidden or forced (CONSTRAINTS)
    logprobs_mode: the engine's: "processed_logprobs"; "raw_logprobs", those before temperature, penalties and cuts; or
                   "uncut_logprobs", those before the cut alone, which SGLang gives
    kept_set:      True if the trainer scored on the kept set (`kept_logprobs`)
    trainer_temperature: divisor of the trainer's logits; None: not known

    Raises ConfigError for values that vLLM does not allow.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: bool = False
    constrained: bool = False
    logprobs_mode: LogprobsMode = "processed_logprobs"
    kept_set: bool = False
    trainer_temperature: float | None = None

    def __post_init__(self) -> None:
        in_range(self, RANGES)
        for name in RANGES:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        if self.logprobs_mode != UNCUT:
            object.__setattr__(self, "temperature", sampled_at(self.temperature))
        object.__setattr__(self, "top_k", max(0, whole("top_k", self.top_k, -1)))
        for name in ("logit_bias", "constrained", "kept_set"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed: True or False")
        if self.logprobs_mode not in MODES:
            raise ConfigError(f"logprobs_mode is {self.logprobs_mode!r}; allowed: {', '.join(MODES)}")
        if self.kept_set and self.logprobs_mode != PROCESSED:
            raise ConfigError(
                f"kept_set=True with {self.logprobs_mode}, which are not of the kept set; allowed: {PROCESSED}"
            )

    @classmethod
    def of(cls, params: Any, logprobs_mode: str = PROCESSED, **more: Any) -> Self | None:
        """Read the sampling parameters of a rollout. None means not known, and stays None.

        params:        a Sampling, a vLLM SamplingParams, or a mapping with vLLM's names, of which other names are
                       ignored and null is the default; or several of these, which `mixed` joins
        logprobs_mode: the engine's, unless params is a Sampling or a mapping that has one
        more:          kept_set, trainer_temperature

        Raises ConfigError for an object without sampling parameters, and for values that vLLM does not allow.
        """
        if params is None:
            return None
        if isinstance(params, cls):
            return replace(params, **more)
        names = (*(field.name for field in fields(cls)), *CONSTRAINTS)
        if isinstance(params, Mapping):
            values = {name: params.get(name) for name in names}
        elif hasattr(params, "temperature"):
            values = {name: getattr(params, name, None) for name in names}
        elif isinstance(params, Iterable) and not isinstance(params, (str, bytes)):
            return cls.mixed(cls.of(each, logprobs_mode, **more) for each in params)
        else:
            raise ConfigError(f"sampling is {params!r:.60}; allowed: a vLLM SamplingParams, a mapping, or a Sampling")
        values["logit_bias"] = bool(values["logit_bias"])
        values["constrained"] = any(bool(values.pop(name)) for name in CONSTRAINTS) or bool(values["constrained"])
        known = {name: value for name, value in values.items() if value is not None}
        return cls(**{"logprobs_mode": logprobs_mode} | known | more)

    @classmethod
    def mixed(cls, samplings: Iterable[Self | None]) -> Self | None:
        """The sampling of requests that differ: each field is the one that changes most. None if one is not known."""
        every = list(dict.fromkeys(samplings))
        if not every or None in every:
            return None
        return cls(**{name: max((getattr(each, name) for each in every), key=far) for name, far in CHANGE.items()})

    @property
    def greedy(self) -> bool:
        """True if the likeliest token was always chosen, and nothing was sampled."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if some tokens could not be sampled: the support is cut."""
        return self.greedy or bool(self._cuts())

    @property
    def reshapes(self) -> bool:
        """True if penalties or a bias moved probability between tokens."""
        return bool(self._shapes())

    @property
    def smallest_kept(self) -> float | None:
        """The least probability mass that a kept set may have: 1 without a cut, top_p for a nucleus, None if unknown.

        The mass is under the engine's distribution before the cut, after temperature and penalties. top_k and min_p
        keep a mass that depends on that distribution, so it is unknown. `kept_set` changes nothing here.
        """
        if not self.truncates:
            return 1.0
        nucleus = not self.greedy and self.top_k == 0 and self.min_p == 0 and not self.constrained
        return self.top_p if nucleus else None

    @property
    def biased(self) -> bool:
        """True if the ratios certainly miss the trainer's distribution or the one that sampled."""
        return any(self._biases())

    def refuse(self, where: str, go_on: str) -> None:
        """Raise ConfigError if the ratios are `biased`.

        where: place of the parameters, which begins the error; go_on: the setting that accepts the bias
        """
        if biases := [*self._biases(kept="")]:
            raise ConfigError(f"{where}: {'; '.join(biases)}; to train on it all the same, type {go_on}")

    def remarks(self) -> tuple[str, ...]:
        """Sentences on each bias: its cause, its size if known, and the remedy. Empty if there is none.

        If `biased` is false, a remark names a condition that fp8plan cannot check.
        """
        return (*self._biases(), *self._conditions())

    def _biases(self, kept: str = KEPT) -> Iterator[str]:
        cuts, shapes, at = self._cuts(), self._shapes(), f"temperature {self.temperature:g}"
        if self.temperature == LEAST_TEMPERATURE:
            at += " (vLLM raises lower ones to it)"
        if self.greedy:
            yield f"{at}: the likeliest token was taken, and no ratio is that of a sample; set temperature=1.0"
        elif cuts and self.logprobs_mode != PROCESSED:
            yield (
                f"{_and(cuts)} with {self.logprobs_mode}: these are the log-probs before the cut, so the ratios do not "
                f"show that some tokens could not be sampled; set {_and(cuts.values())}"
            )
        elif cuts and not self.kept_set:
            least = self.smallest_kept
            mass = "the kept mass, of unknown size," if least is None else f"the kept mass ({least:g} to 1)"
            yield (
                f"{_and(cuts)}: vLLM renormalises over the kept tokens, so each ratio is {mass} times what it should "
                f"be; set {_and(cuts.values())}{kept}"
            )
        if shapes and self.logprobs_mode == RAW:
            yield (
                f"{_and(shapes)} with {RAW}: these are the log-probs before it, so the ratios do not show that "
                f"another distribution sampled; set {_and(shapes.values())}"
            )
        elif shapes:
            yield (
                f"{_and(shapes)}: the engine samples from a distribution that the trainer does not score, so the "
                f"ratios are off by an unknown factor; set {_and(shapes.values())}"
            )
        if self.temperature not in (0, 1) and self.logprobs_mode == RAW:
            yield (
                f"{at} with {RAW}: these are the log-probs at temperature 1, which did not sample; set "
                f"logprobs_mode={PROCESSED!r}"
            )
        elif not self.greedy and self.trainer_temperature not in (None, self.temperature):
            yield (
                f"{at}: the trainer divides its logits by {self.trainer_temperature:g}, so the ratios are of two "
                f"temperatures; divide them by {self.temperature:g}"
            )

    def _conditions(self) -> Iterator[str]:
        if self.temperature not in (0, 1) and self.trainer_temperature is None and self.logprobs_mode != RAW:
            yield (
                f"temperature {self.temperature:g}: the ratios are right only if the trainer divides its logits by "
                f"{self.temperature:g}, which fp8plan does not see"
            )

    def _cuts(self) -> dict[str, str]:
        """Each parameter that cuts the support, in words -> the remedy."""
        cuts = {
            f"top_p {self.top_p:g}": (self.top_p < 1, "top_p=1.0"),
            f"top_k {self.top_k}": (self.top_k > 0, "top_k=0"),
            f"min_p {self.min_p:g}": (self.min_p > 0, "min_p=0.0"),
            "constraints on tokens": (self.constrained, "no min_tokens, bad_words, allowed_token_ids or the like"),
        }
        return {words: remedy for words, (on, remedy) in cuts.items() if on}

    def _shapes(self) -> dict[str, str]:
        """Each parameter that reshapes the distribution, in words -> the remedy."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        values = {name: getattr(self, name) for name in neutral}
        shapes = {
            f"{name} {values[name]:g}": f"{name}={none}" for name, none in neutral.items() if values[name] != none
        }
        if self.logit_bias:
            shapes["a logit_bias"] = "no logit_bias"
        return shapes


def sampled_at(temperature: float) -> float:
    """Return the temperature at which vLLM samples if it is asked for `temperature`."""
    return temperature if temperature <= 0 else max(temperature, LEAST_TEMPERATURE)


def _and(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _distance(neutral: float) -> Callable[[Any], float]:
    """The distance of a positive factor from `neutral`, as a ratio; 0 is farthest."""
    return lambda value: abs(log(value / neutral)) if value else inf


# The change that a value of each field makes: `mixed` keeps the value with the largest.
CHANGE: Final[dict[str, Callable[[Any], float]]] = {
    "temperature": _distance(1.0),
    "top_p": _distance(1.0),
    "top_k": lambda tokens: 1 / tokens if tokens else 0.0,
    "min_p": float,
    "repetition_penalty": _distance(1.0),
    "presence_penalty": abs,
    "frequency_penalty": abs,
    "logit_bias": bool,
    "constrained": bool,
    "logprobs_mode": MODES.index,
    "kept_set": lambda kept: not kept,
    "trainer_temperature": lambda value: 0.0 if value is None else 1.0,
}


def kept_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, sampling_mask: Any) -> torch.Tensor:
    """The trainer's log-probs, in nats, of sampled tokens within the sets that the engine kept.

    logits:        [tokens, vocabulary], already divided by the temperature of the rollout; gradients flow
    token_ids:     [tokens] that were sampled
    sampling_mask: for each token the ids of its kept set: `sampling_mask` of a vLLM CompletionOutput, with
                   return_sampling_mask=True (vLLM 0.28 and later), or a list of lists

    Returns [tokens] float32: logit of the token, less the log of the sum of exp(logit) over its kept set. vLLM's
    processed_logprobs score the same distribution. A trainer that uses them passes Sampling(kept_set=True).
    Raises ConfigError for shapes that do not agree, ids beyond the vocabulary, and a token outside its set.
    """
    import torch

    rows = getattr(sampling_mask, "token_ids", sampling_mask)
    sets = [ids.tolist() if hasattr(ids, "tolist") else list(ids) for ids in rows]
    if not all(map(whole_numbers, sets)):
        raise ConfigError("the sampling mask has values that are no token ids; allowed: the ids of each kept set")
    if logits.dim() != 2 or tuple(token_ids.shape) != logits.shape[:1] or len(sets) != len(logits):
        raise ConfigError(
            f"logits have shape {tuple(logits.shape)}, token_ids {tuple(token_ids.shape)}, and the sampling mask has "
            f"{len(sets)} sets; allowed: [tokens, vocabulary], [tokens], and a set for each token"
        )
    device = logits.device
    sizes = torch.tensor([len(ids) for ids in sets], dtype=torch.long)
    row = torch.repeat_interleave(torch.arange(len(sets)), sizes).to(device)
    kept = torch.tensor([token for ids in sets for token in ids], dtype=torch.long, device=device)
    tokens = token_ids.to(device, torch.long)
    beyond = (kept < 0) | (kept >= logits.shape[1])
    if bool(beyond.any()):
        raise ConfigError(f"the sampling mask has token {int(kept[beyond][0])}; allowed: 0 to {logits.shape[1] - 1}")
    inside = torch.zeros(len(sets), dtype=torch.bool, device=device).index_fill_(0, row[kept == tokens[row]], True)
    if not bool(inside.all()):
        at = int((~inside).nonzero()[0])
        raise ConfigError(
            f"token {int(tokens[at])} at position {at} is not in its kept set of {len(sets[at])} tokens; allowed: the "
            "sampling mask of these very tokens"
        )
    values = logits[row, kept].float()
    largest = torch.full((len(sets),), -inf, device=device).scatter_reduce(0, row, values.detach(), "amax")
    total = torch.zeros(len(sets), device=device).index_add(0, row, (values - largest[row]).exp())
    own = logits.gather(1, tokens[:, None]).squeeze(1).float()
    return own - largest - total.log()
