"""The experts of each token, as an engine returned them, laid out as a trainer's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN: Final = -1  # in place of an expert's number: the token keeps the experts of the trainer's own router


def padded_routes(routes: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Return the routes of a padded batch, for `replayed`.

    routes:         for each sequence what the engine returned: (tokens, layers, experts per token), from the
                    sequence's first token on
    attention_mask: (batch, length), 1 at tokens and 0 at padding, on either side

    Returns int16 (batch, length, layers, experts per token) on the mask's device. Padding and tokens after the last
    route are UNKNOWN: the last token of a response was never an input of the engine. Raises ConfigError if the numbers
    of sequences differ, a sequence has more routes than tokens, or the routes are of several models.
    """
    import torch

    if len(routes) != len(attention_mask):
        raise ConfigError(
            f"{len(routes)} sequences have routes, and the mask has {len(attention_mask)} rows; pass both"
        )
    parts = [_as_tensor(part) for part in routes]
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) != 1:
        raise ConfigError(f"the routes have layers and experts per token {sorted(shapes)}; allowed: of one model")
    batch = torch.full((*attention_mask.shape, *shapes.pop()), UNKNOWN, dtype=torch.int16)
    for number, (row, part, mask) in enumerate(zip(batch, parts, attention_mask.bool().cpu(), strict=True)):
        places = mask.nonzero()[:, 0]
        if len(part) > len(places):
            raise ConfigError(f"sequence {number} has routes of {len(part)} tokens; allowed: {len(places)} or fewer")
        row[places[: len(part)]] = part
    return batch.to(attention_mask.device)


def packed_routes(routes: Sequence[Any], lengths: Sequence[int]) -> Tensor:
    """Return the routes of sequences that are packed into one row, for `replayed`.

    routes:  as for `padded_routes`
    lengths: tokens of each sequence in the row

    Returns int16 (1, sum of lengths, layers, experts per token) on the host. Raises ConfigError as `padded_routes`.
    """
    import torch

    if len(routes) != len(lengths):
        raise ConfigError(f"{len(routes)} sequences have routes, and there are {len(lengths)} lengths; pass both")
    rows = [padded_routes([part], torch.ones(1, length)) for part, length in zip(routes, lengths, strict=True)]
    return torch.cat(rows, dim=1)


def _as_tensor(part: Any) -> Tensor:
    import numpy as np
    import torch

    if isinstance(part, np.ndarray):
        part = torch.from_numpy(part.astype(np.int16))  # torch has no arithmetic on uint16
    if not isinstance(part, torch.Tensor) or part.dim() != 3:
        kind = getattr(part, "shape", type(part).__name__)
        raise ConfigError(
            f"the routes of a sequence are {kind}; allowed: an array (tokens, layers, experts per token), as "
            "generate(..., routed_experts=True) returns it in `outputs[0].routed_experts`"
        )
    return part.to(torch.int16)


class Differing(NamedTuple):
    """How often two routings pick other experts, whatever their order.

    tokens:  share of tokens that differ in one layer or more
    choices: share of pairs of token and layer that differ
    """

    tokens: float
    choices: float


def share_differing(routes: Tensor, others: Tensor, mask: Tensor | None = None) -> Differing:
    """Return how often two routings of the same tokens differ.

    routes, others: (..., layers, experts per token)
    mask:           (...), the tokens to count; None: all

    Layers and tokens that are UNKNOWN in either do not count. Raises ConfigError for other shapes, and if no token
    counts.
    """
    if routes.shape != others.shape or (mask is not None and mask.shape != routes.shape[:-2]):
        shapes = [tuple(tensor.shape) for tensor in (routes, others, mask) if tensor is not None]
        raise ConfigError(f"the shapes are {shapes}; allowed: routings of one shape, and a mask without their last two")
    others = others.to(routes.device)
    known = (routes[..., 0] != UNKNOWN) & (others[..., 0] != UNKNOWN)
    if mask is not None:
        known &= mask.to(known.device).bool()[..., None]
    if not known.any():
        raise ConfigError("no token has routes in both; pass routes of the tokens in the mask")
    differ = (routes.sort(dim=-1).values != others.sort(dim=-1).values).any(dim=-1) & known
    counted = known.any(dim=-1)
    return Differing(
        tokens=(differ.any(dim=-1).sum() / counted.sum()).item(), choices=(differ.sum() / known.sum()).item()
    )
