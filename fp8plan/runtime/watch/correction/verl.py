"""verl's settings and names of figures, so that fp8plan can continue a run of verl, and be compared with it.

On the same batch, figures and weights equal those of verl 0.9.1 (trainer/ppo/rollout_corr_helper.py) to rtol 1e-5 and
atol 1e-6 (tests/runtime/watch/correction/test_verl_parity.py). Differences, all deliberate:

what                       verl 0.9.1                                  fp8plan
bounds of k1               on pi_rollout / pi_train: "0.1_2.0" keeps   on pi_train / pi_rollout, as of weights;
                           ratios of 0.5 to 10                         `from_verl` turns them round
NaN, infinite log-probs    every figure is NaN; such a token's weight  left out of all figures, weight 0, masked out,
                           is NaN, e^20 or e^-20 (its sequence's too)  counted in `invalid`
no valid token             raises ValueError                           defined: no mismatch, tokens = 0, no metrics
a row without a token      a sequence with log-prob 0 and weight 0     no sequence: in no figure (verl's issue 7771)
all weights 0 (IcePop)     ZeroDivisionError                           rollout_is_eff_sample_size = 0
levels and modes           token, sequence; TIS, IcePop                also geometric (0.7's), MIS
binary_kl (PR 6800)        in no release                               refused: a correction has ratios alone
veto                       gone since 0.7.1                            `veto`, under 0.7's names
input                      computed in its own dtype, bf16 too         float32 for any input; sums are float64
rollout_is_std, rs_*_std   float32 E[x^2] - E[x]^2, too coarse below   the same in float64: equal to verl's function
                           3e-4 of the mean                            with float64 input
k3 of a rejection          float32 exp(x) - 1 - x: noise of 1e-7       expm1(x) - x
k3_kl, ratio above e^88    infinity                                    finite (float64)
rollout_is_min             e^ of the smallest sum of log ratios        clamped to e^+-20, as its weight is
 of level sequence
metrics over ranks         each rank's own, but for the mean of        each rank's own, and by `Correction.reduced`,
                           batch_normalize                             `MismatchSums.reduced` those of all tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, cast

from fp8plan.checks import with_nearest
from fp8plan.errors import ConfigError
from fp8plan.runtime.watch.correction.settings import (
    REJECTIONS,
    CorrectionSettings,
    Estimator,
    Level,
    Over,
    Rejection,
    Thresholds,
)
from fp8plan.runtime.watch.mismatch.sums import TINY, Moments

# Sums of a rule: its divergence over tokens, and clamped to its limits (for the standard deviation); tokens, or
# sequences, beyond the limits; the same by sequence; masked tokens and sequences.
RULE_SUMS: Final = (
    "value", "clamped", "above", "below", "sequence", "sequence_above", "sequence_below", "masked", "masked_sequences",
)  # fmt: skip
# The fields of verl 0.9.1's RolloutCorrectionConfig: default, types, and allowed values in words.
_NUMBERS: Final = (str, int, float)
_FIELDS: Final[dict[str, tuple[Any, tuple[type, ...], str]]] = {
    "rollout_is": (None, (str, NoneType), "token, sequence or null"),
    "rollout_is_threshold": (2.0, (*_NUMBERS, NoneType), 'a number, or lower_upper as in "0.5_2.0"'),
    "rollout_is_batch_normalize": (False, (bool,), "true or false"),
    "rollout_rs": (None, (str, NoneType), f"null, or with commas between: {', '.join(REJECTIONS)}"),
    "rollout_rs_threshold": (None, (*_NUMBERS, NoneType), "null, a number, or text with commas between"),
    "bypass_mode": (False, (bool,), "true or false"),
    "loss_type": ("ppo_clip", (str,), "ppo_clip or reinforce"),
}
_INTO: Final = "algorithm", "rollout_correction"  # path to them in verl's config
_HYDRA: Final = "_target_"  # Hydra's name of a node's class


def from_verl(config: Mapping[str, Any] | Any) -> CorrectionSettings:
    """verl's settings of rollout correction as CorrectionSettings.

    config: verl's whole config, its `algorithm`, or `algorithm.rollout_correction`: a mapping, a DictConfig, or an
            object with such fields. If the last is null, there is no correction

    It reads rollout_is, rollout_is_threshold (2.0, "2.0": TIS; "0.5_5.0": IcePop), rollout_is_batch_normalize,
    rollout_rs and rollout_rs_threshold. bypass_mode with loss_type ppo_clip (the default) has no weights: the ratio is
    in the loss, and verl computes weights only to log them. Missing fields have verl's defaults; rollout_is has none.

    Raises ConfigError for settings that verl refuses, a value of another type, and an unknown field; it names the
    nearest field.
    """
    try:
        config = _rollout_correction(config)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf's, for ??? and for an interpolation that leads nowhere
        raise ConfigError(f"the config cannot be read: {error}; allowed: one whose values are all given") from None
    level, threshold = config["rollout_is"], config["rollout_is_threshold"]
    for name, allowed in (("rollout_is", (None, "token", "sequence")), ("loss_type", ("ppo_clip", "reinforce"))):
        if config[name] not in allowed:
            raise _wrong(name, config[name])
    if threshold is None or (config["bypass_mode"] and config["loss_type"] == "ppo_clip"):
        level = None
    low, high = (None, 2.0) if level is None else _numbers("rollout_is_threshold", threshold)
    return CorrectionSettings(
        level=cast("Level | None", level),
        mode="tis" if low is None else "icepop",
        thresholds=Thresholds(tis=high) if low is None else Thresholds(None, (low, high)),
        reject=_rejections(config["rollout_rs"], config["rollout_rs_threshold"]),
        batch_normalize=config["rollout_is_batch_normalize"],
    )


def _rollout_correction(config: Any) -> dict[str, Any]:
    """All fields of rollout_correction, from wherever it lies in `config`, checked."""
    path, node = "", config
    for name in _INTO:
        inside = _fields(path, node)
        if name in set(inside):  # verl's own configs are no whole mappings
            if stray := [str(key) for key in inside if key != name and _is_ours(str(key))]:
                raise ConfigError(
                    f"{path or 'the config'} has {', '.join(stray[:5])} beside {name}; allowed: inside it"
                )
            path, node = f"{path}.{name}".lstrip("."), inside[name]
    inside = _fields(path, node)
    if not inside and not path.endswith(_INTO[-1]):
        raise ConfigError(f"{path or 'the config'} is empty; allowed: one with rollout_correction, or its fields")
    unknown = [str(name) for name in inside if name not in _FIELDS and name != _HYDRA]
    if unknown:
        named = with_nearest(unknown, [*_FIELDS, *_INTO])
        raise ConfigError(
            f"{path or 'the config'} has {', '.join(named[:5])}, which verl's rollout_correction has not; allowed: "
            f"verl's whole config, its algorithm, or rollout_correction with {', '.join(_FIELDS)}"
        )
    values = {name: inside[name] if name in set(inside) else default for name, (default, _, _) in _FIELDS.items()}
    for name, value in values.items():
        kinds = _FIELDS[name][1]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _wrong(name, value)
    return values


def _is_ours(name: str) -> bool:
    """True for a name that belongs in rollout_correction, or is meant to."""
    return name in (*_FIELDS, *_INTO) or name.startswith(("rollout_is", "rollout_rs", "rollout_corr"))


def _fields(path: str, node: Any) -> Mapping[str, Any]:
    """A node of a config as a mapping; null is an empty one, except at the top."""
    if node is None and path:
        return {}
    if not isinstance(node, Mapping) and hasattr(node, "__dict__") and not isinstance(node, type):
        node = vars(node)
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{path or 'the config'} is {node!r}; allowed: a mapping, a DictConfig or an object with its fields"
        )
    return node


def _wrong(name: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} is {value!r}; allowed: {_FIELDS[name][2]}")


def _rejections(options: str | None, thresholds: str | float | None) -> tuple[Rejection, ...]:
    if options is None:
        return ()
    names = list(dict.fromkeys(option.strip() for option in options.split(",") if option.strip()))
    unknown = sorted(set(names) - set(REJECTIONS))
    if unknown or not names:
        allowed = ", ".join(REJECTIONS)
        if "binary_kl" in names:
            allowed += "; binary_kl compares probabilities, and a correction has their ratio alone"
        raise ConfigError(f"rollout_rs is {options!r}; allowed, with commas between: {allowed}")
    bounds = [] if thresholds is None else [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if len(bounds) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold is {thresholds!r}; allowed: one for all of rollout_rs, or {len(names)} with commas "
            "between"
        )
    if len(bounds) == 1:
        bounds *= len(names)
    return tuple(_rejection(name, text) for name, text in zip(names, bounds, strict=True))


def _rejection(name: str, text: str) -> Rejection:
    low, high = _numbers(f"rollout_rs_threshold of {name}", text)
    over, estimator = name.rsplit("_", 1)
    if estimator != "k1":
        if low is not None:
            raise ConfigError(f"rollout_rs_threshold of {name} is {text!r}; allowed: one number, an upper bound")
        return Rejection(cast("Over", over), cast("Estimator", estimator), high)
    if low is None and high < 1:
        raise ConfigError(f"rollout_rs_threshold of {name} is {text!r}; allowed: lower_upper, or one number from 1")
    return Rejection(cast("Over", over), "k1", high if low is None else 1 / low, 1 / high)


def _numbers(name: str, text: str | float) -> tuple[float | None, float]:
    """(low or None, high) of "0.5_2.0", "2.0" or 2.0."""
    try:
        *rest, high = (float(part) for part in str(text).split("_"))
        (low,) = rest or (None,)
    except ValueError:
        raise ConfigError(f'{name} is {text!r}; allowed: a number, or lower_upper as in "0.5_2.0"') from None
    if not high > 0 or (low is not None and not 0 < low <= high):
        raise ConfigError(f"{name} is {text!r}; allowed: above 0, lower not above upper")
    return low, high


def is_metrics(sums: Mapping[str, Moments], settings: CorrectionSettings) -> dict[str, float]:
    """Figures of the weights, under the names and definitions of verl's compute_is_metrics."""
    weight, sequence = sums["weight"], sums["sequence"]
    metrics = {
        "rollout_is_mean": weight.mean,
        "rollout_is_max": sums["shown"].largest,
        "rollout_is_min": sums["shown"].least,
        "rollout_is_std": weight.std(),
        "rollout_is_ratio_fraction_high": sums["above"].mean,
        "rollout_is_ratio_fraction_low": sums["below"].mean,
        "rollout_is_eff_sample_size": effective(weight),
        "rollout_is_seq_mean": sequence.mean,
        "rollout_is_seq_std": sequence.std(ddof=1),
        "rollout_is_seq_max": sequence.largest,
        "rollout_is_seq_min": sequence.least,
        "rollout_is_seq_max_deviation": max(abs(sequence.largest - 1), abs(sequence.least - 1)),
        "rollout_is_seq_fraction_high": sums["sequence_above"].mean,
        "rollout_is_seq_fraction_low": sums["sequence_below"].mean,
    }
    return metrics if settings.mode == "tis" else metrics | {"rollout_is_oob_ratio": sums["clipped"].mean}


def effective(weight: Moments) -> float:
    """Effective sample size of weights as a fraction (Kish); 0 if all are 0."""
    return (weight.mean + TINY) ** 2 / weight.mean_square if weight.mean_square else 0.0


def rs_metrics(sums: Mapping[str, Moments], settings: CorrectionSettings) -> dict[str, float]:
    """Figures of rejections by verl's compute_rollout_rejection_mask, and of the veto by verl 0.7.0."""
    metrics: dict[str, float] = {}
    for rule in settings.reject:
        of_rule = {name: sums[f"{rule.name}_{name}"] for name in RULE_SUMS}
        value, sequence = of_rule["value"], of_rule["sequence"]
        figures = {
            "mean": value.mean,
            "max": value.largest,
            "min": value.least,
            "fraction_high": of_rule["above"].mean,
            "fraction_low": of_rule["below"].mean,
            "std": of_rule["clamped"].std(),
            "seq_mean": sequence.mean,
            "seq_std": sequence.std(ddof=1),
            "seq_max": sequence.largest,
            "seq_min": sequence.least,
            "seq_max_deviation": max(abs(sequence.largest), abs(sequence.least)),
            "seq_fraction_high": of_rule["sequence_above"].mean,
            "masked_fraction": of_rule["masked"].mean,
            "seq_masked_fraction": of_rule["masked_sequences"].mean,
        }
        if rule.estimator == "k1":
            figures["seq_fraction_low"] = of_rule["sequence_below"].mean
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in figures.items()}
    if settings.reject:
        metrics["rollout_rs_masked_fraction"] = sums["masked"].mean
        metrics["rollout_rs_seq_masked_fraction"] = sums["masked_sequences"].mean
    if settings.veto is not None:
        metrics["rollout_is_veto_fraction"] = sums["vetoed_sequences"].mean
        metrics["rollout_is_catastrophic_token_fraction"] = sums["catastrophic"].mean
    return metrics
