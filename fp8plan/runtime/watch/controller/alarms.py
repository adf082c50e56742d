"""The alarms of a step: their names, what each means, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Alarm(StrEnum):
    """A figure that no threshold repairs, or that KL alone does not show. No alarm loosens a threshold.

    MEANINGS has the meaning and the remedy of each.
    """

    KL = "kl"
    BROKEN = "broken"
    RAW_ESS = "raw_ess"
    CHI2 = "chi2"
    TAIL = "tail"
    UNIT_MEAN = "unit_mean"
    UNITS = "units"
    IDENTICAL = "identical"
    PLACEHOLDERS = "placeholders"
    INVALID = "invalid"
    LOST = "lost"
    KV_CLIP = "kv_clip"


class Meaning(NamedTuple):
    """The meaning of an alarm, and the remedy, as clauses of a sentence."""

    says: str
    remedy: str


DOCTOR: Final = "fp8plan.doctor(engine, weights=..., scored=...) tells old weights, temperature and KV scales apart"
MEANINGS: Final = {
    Alarm.KL: Meaning("smoothed KL above its limit", DOCTOR),
    Alarm.BROKEN: Meaning("KL beyond what any correction repairs", f"stop training on these rollouts; {DOCTOR}"),
    Alarm.RAW_ESS: Meaning("effective sample size of the untruncated weights too low", DOCTOR),
    Alarm.CHI2: Meaning("variance of the ratios too high", DOCTOR),
    Alarm.TAIL: Meaning("too many tokens with extreme ratios", DOCTOR),
    Alarm.UNIT_MEAN: Meaning(
        "the ratios' mean is not 1: the log-probs are not those of the policy that sampled",
        "sample with top_p=1, top_k=-1, min_p=0 and no penalties, at the trainer's temperature, with "
        "logprobs_mode='processed_logprobs'; look for shifted or synthetic tokens, such as an EOS that nobody sampled; "
        "weights of long sequences miss 1 by noise alone: use level='token'",
    ),
    Alarm.UNITS: Meaning(
        "KL by k1 is 2.3 times that by k3: the log-probs look like logarithms to base 10",
        "give natural logarithms on both sides: x * 2.302585",
    ),
    Alarm.IDENTICAL: Meaning(
        "both sides are the same numbers to the last bit",
        "give the engine's log-probs as rollout_logprobs, and the trainer's own as train_logprobs; with kernels that "
        "agree to the last bit (batch-invariant ones in both) this is as it should be",
    ),
    Alarm.PLACEHOLDERS: Meaning(
        "one side has log-probs of exactly 0.0 where the other is not sure: they were filled in, not computed",
        "mask tokens that nobody sampled or scored: padding, a tool's output, an EOS that was appended, log-probs that "
        "were missing; a cut (top_p, top_k, min_p) that kept one token gives 0.0, too",
    ),
    Alarm.INVALID: Meaning(
        "too many log-probs are NaN or infinite, as those of broken logits are",
        "look for NaN in the engine's logits (weights, KV scales) and in the trainer's; step down if FP8 makes them",
    ),
    Alarm.LOST: Meaning(
        "the correction takes most of the weight away, so that little of the batch trains",
        "use level='token', whose weights do not shrink with the length, or wider thresholds, or shorter responses",
    ),
    Alarm.KV_CLIP: Meaning(
        "the engine's fixed KV scales clip K or V; the sync's warning names the layers",
        "type attention_backend='TRITON_ATTN', whose scales are measured after each sync, or step down to a BF16 KV "
        "cache",
    ),
}
