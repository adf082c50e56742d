"""A policy loss with fp8plan's correction for slime, whose trainer is Megatron.

    --use-tis --custom-tis-function-path fp8plan.integrations.slime.correct
    --train-env-vars '{"FP8PLAN_MONITOR": "/path/monitor.json"}'

Written for slime at commit 624b824a8 (38 commits after v0.3.1): `policy_loss_function` in
slime/backends/megatron_utils/loss.py. slime calls the function once for every micro-batch. integrations.hooks says
which ranks share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fp8plan.errors import ConfigError
from fp8plan.integrations.hooks import errors_of, megatron, running, settings_at, tensors
from fp8plan.runtime.watch.correction.settings import CorrectionSettings, Mode, Over, Rejection, Thresholds
from fp8plan.runtime.watch.mismatch.sampling import PROCESSED, UNCUT, Sampling

if TYPE_CHECKING:
    import torch

WHERE: Final = "slime's arguments"
MODES: Final[dict[str, Mode]] = {"truncate": "tis", "clip": "tis", "mask": "mis"}  # of tis_mode
TIS_CLIP: Final = 2.0  # slime's default of --tis-clip
LEVELS: Final[dict[str, Over]] = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}  # of rs_level


def correct(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The policy loss of a micro-batch times fp8plan's weights, fp8plan's masks, and figures.

    args:            slime's arguments; without `use_tis` (get_mismatch_metrics alone) only the figures are made
    pg_loss:         [tokens] of this context-parallel rank, all responses one after the other
    train_log_probs, rollout_log_probs: nats, for each response [its tokens on this rank]
    loss_masks:      for each response [response_length], whole under context parallelism too
    total_lengths:   tokens of each response with its prompt
    response_lengths: tokens of each response
    kwargs:          unused: later versions of slime may add arguments

    Returns (pg_loss, masks, figures). Figures have [tokens] each, and slime averages them over the masks that came in.
    Raises ConfigError for bad settings.
    """
    import torch

    from fp8plan.runtime.watch.correction.rejection import divergence

    replay = getattr(args, "use_rollout_routing_replay", False)
    batches = running(
        settings_at(), sampling=sampling_in(args), router_replay=replay, own=correction_in(args), where=WHERE
    )
    lengths = total_lengths, response_lengths
    logprobs = train_log_probs, rollout_log_probs
    train, rollout = (torch.cat(_across_ranks(parts, *lengths, gather=True)).detach() for parts in logprobs)
    correction = batches.correct(train, rollout, torch.cat(loss_masks), lengths=response_lengths)
    weights, mask = tensors(correction)
    log_ratio = (train - rollout).float()
    known = log_ratio.isfinite()
    log_ratio = torch.where(known, log_ratio, torch.zeros_like(log_ratio))
    figures = {
        "fp8plan/k3": divergence(log_ratio, "k3"),
        "fp8plan/weight": weights,
        "fp8plan/lost_tokens": (mask == 0).float(),
    }
    thresholds = {name: bound for name, bound in batches.figures(correction).items() if "threshold" in name}
    figures |= {name: torch.full_like(log_ratio, bound) for name, bound in thresholds.items()}
    responses = {name: figure.split(response_lengths) for name, figure in figures.items()}
    local = {name: torch.cat(_across_ranks(whole, *lengths, gather=False)) for name, whole in responses.items()}
    if not args.use_tis:
        return pg_loss, loss_masks, local
    return pg_loss * local["fp8plan/weight"], list(mask.split(response_lengths)), local


@errors_of(WHERE)
def correction_in(args: Any) -> CorrectionSettings | None:
    """The correction in slime's arguments; None at slime's defaults.

    Read are --tis-clip and --tis-clip-low, as `vanilla_tis_function` applies them, or else the custom config of slime's
    examples/train_infer_mismatch_helper (mis.py): `tis_mode` and the names around it.

    Raises ConfigError for what fp8plan does not have.
    """
    if not hasattr(args, "tis_mode"):
        clip, low = getattr(args, "tis_clip", TIS_CLIP), getattr(args, "tis_clip_low", 0.0)
        return None if (clip, low) == (TIS_CLIP, 0.0) else CorrectionSettings(thresholds=Thresholds(clip), floor=low)
    if args.tis_batch_normalize:
        raise ConfigError(
            "tis_batch_normalize is true, and a hook sees no whole batch to normalise over; type: tis_batch_normalize: "
            "false"
        )
    for name, allowed in (("tis_mode", MODES), ("tis_level", LEVELS), ("rs_level", LEVELS)):
        if getattr(args, name) not in allowed:
            raise ConfigError(f"{name} is {getattr(args, name)!r}; allowed: {', '.join(allowed)}")
    high = args.tis_upper_bound
    low = 1 / high if args.tis_lower_bound is None else args.tis_lower_bound
    rules, veto = list[Rejection](), None
    if args.use_rs:
        least = low if args.rs_lower_bound is None else args.rs_lower_bound
        most = high if args.rs_upper_bound is None else args.rs_upper_bound
        rules.append(Rejection(LEVELS[args.rs_level], "k1", most, least))
        veto = args.rs_veto_threshold
    mode, thresholds = MODES[args.tis_mode], Thresholds(high, (low, high))
    floor = low if args.tis_mode == "clip" else 0.0
    return CorrectionSettings(args.tis_level, mode, thresholds, tuple(rules), veto, floor=floor)


def sampling_in(args: Any) -> Sampling | None:
    """The sampling of rollouts in slime's arguments; None where they lack it.

    SGLang's log-probs are those before any cut. With rollout_top_p slime renormalises them over the kept tokens, and
    scores its trainer on the same ones. It divides the trainer's logits by rollout_temperature.
    """
    if not hasattr(args, "rollout_temperature"):
        return None
    kept = args.rollout_top_p < 1
    return Sampling(
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        logprobs_mode=PROCESSED if kept else UNCUT,
        kept_set=kept,
        trainer_temperature=args.rollout_temperature or None,
    )


def _across_ranks(parts: Any, total_lengths: list[int], response_lengths: list[int], gather: bool) -> list[Any]:
    """Whole responses from this context-parallel rank's parts. With gather=False: its parts of whole responses."""
    state = megatron()
    if state is None or state.get_context_parallel_world_size() == 1:
        return list(parts)
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    convert = all_gather_with_cp if gather else slice_log_prob_with_cp
    return [convert(*response) for response in zip(parts, total_lengths, response_lengths, strict=True)]
