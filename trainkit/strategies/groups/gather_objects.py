"""What ranks tell each other beside tensors: small things that JSON can hold."""

from __future__ import annotations

import json
from typing import Any

import torch

from trainkit.bounded_json import parse_json
from trainkit.objectives.base import Collective

__all__ = ["all_gather_object"]


def all_gather_object(content: Any, everyone: Collective) -> list[Any]:
    """Gather an object from every rank, in rank order; collective.

    Example:
        >>> from trainkit.strategies.groups.collective import LocalCollective
        >>> all_gather_object({"written": True}, LocalCollective())
        [{'written': True}]
    """
    said = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return [parse_json(part.cpu().numpy().tobytes()) for part in everyone.gather(said)]
