"""What ranks tell each other beside tensors: small things that JSON can hold."""

from __future__ import annotations

import json
from typing import Any

import torch

from trainkit.bounded_json import parse_json
from trainkit.objectives.base import Collective

__all__ = ["tell_all"]


def tell_all(content: Any, everyone: Collective) -> list[Any]:
    """What every rank has to say, by rank; collective.

    Example:
        >>> from trainkit.strategies.collective import LocalCollective
        >>> tell_all({"written": True}, LocalCollective())
        [{'written': True}]
    """
    said = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return [parse_json(part.cpu().numpy().tobytes()) for part in everyone.gather(said)]
