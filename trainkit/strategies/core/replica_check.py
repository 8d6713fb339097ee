"""Check whether the copies of the parameters are still equal, by a hash of their bits."""

from __future__ import annotations

from collections import Counter
from typing import Final

import torch
from torch import Tensor

from trainkit.strategies.core.replica import Replica

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK: Final = 1 << 22
"""Elements hashed at a time: the integers of a large parameter would take twice its memory."""


def bits_hash(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, each element times an odd number derived from its index, modulo 2^64, as
    int64.

    One changed bit always changes it, because multiplication by an odd number is invertible.

    Example:
        >>> int(bits_hash(torch.tensor([0.0, 0.0]))), bool(bits_hash(torch.ones(2)) == bits_hash(torch.ones(2)))
        (0, True)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        factors = torch.arange(start, start + part.numel(), device=tensor.device).mul_(2 * 0x9E3779B97F4A7C1).add_(1)
        total += factors.mul_(part).sum()
    return total


def drifted_parameter(replica: Replica) -> str | None:
    """Return the first parameter that differs in any bit between ranks, with the differing ranks; collective.

    If most ranks agree, the others are named; otherwise all but rank 0.
    """
    named = dict(replica.model.named_parameters())
    if replica.masters_apart:
        named |= {f"{name} (its master)": master for name, master in replica.masters.items()}
    device = next(iter(named.values())).device
    hashes = torch.stack([bits_hash(param).reshape(1).to(device) for param in named.values()])
    found = torch.cat(replica.data_ranks.gather(hashes.view(1, -1))).tolist()  # one row per rank
    wrong = [place for place in range(len(named)) if len({row[place] for row in found}) > 1]
    if not wrong:
        return None
    values = [row[wrong[0]] for row in found]
    usual = max(values, key=Counter(values).__getitem__)  # the first of the most frequent
    others = [str(rank) for rank, value in enumerate(values) if value != usual]
    ranks = f"rank{'' if len(others) == 1 else 's'} {', '.join(others)}"
    more = "" if len(wrong) == 1 else f", as do {len(wrong) - 1} more parameters"
    return f"the parameter {list(named)[wrong[0]]} differs on {ranks} from rank {values.index(usual)}{more}."
