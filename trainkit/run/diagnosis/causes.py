"""Causes: the faults that a diagnosis can name, and the point of docs/numbers.md that each of them breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TITLES: Final = {
    3: ("gradient", "3-gradient"),
    4: ("randomness and buffers", "4-randomness-and-buffers"),
    5: ("order of summation", "5-order-of-summation"),
    6: ("learning rate", "6-learning-rate"),
}


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault, described in words."""

    rule: int
    """The point of docs/numbers.md that it breaks."""
    words: str
    parts_replicas: bool = False
    """Whether the replicas diverge after the first step, so that later steps cannot be predicted."""

    @property
    def title(self) -> str:
        """The rule by number and name."""
        return f"rule {self.rule} ({_TITLES[self.rule][0]})"

    @property
    def page(self) -> str:
        """The page and anchor that define the rule."""
        return f"docs/numbers.md#{_TITLES[self.rule][1]}"


MEAN_OF_MEANS: Final = Cause(3, "the mean of the shards' means")
NOT_REDUCED: Final = Cause(3, "the gradient of one replica, not added to that of the others", parts_replicas=True)
COUNTED_TWICE: Final = Cause(3, "the sum of the gradients, added up again")
AVERAGED: Final = Cause(3, "the average of the shards' gradients in place of their sum")
LAYOUT: Final = Cause(3, "the memory of the gradient is read as contiguous, against the parameter's strides")
CLIPPED_APART: Final = Cause(3, "gradients clipped before they are added up")
NOT_CLIPPED: Final = Cause(3, "the gradient is not clipped")
DRAWN_ALIKE: Final = Cause(4, "random numbers are keyed without the shard: every shard draws those of shard 0")
BUFFERS_OF_ONE: Final = Cause(4, "the buffers of one replica, not averaged with those of the others")
BUFFERS_UNWEIGHTED: Final = Cause(4, "the buffers of shards averaged alike, whatever their samples")
EVERY_SHARD_MOVES: Final = Cause(4, "the buffers move once a shard in place of once a step")
ORDER: Final = Cause(5, "numerics.reproducible=true promises equal bits, and they are equal to rounding only")
RATE: Final = Cause(6, "the learning rate is multiplied or divided by the number of replicas or shards")
DECAY_PER_SHARD: Final = Cause(6, "weight decay acts once a shard or once a replica in place of once a step")
NOT_DECAYED: Final = Cause(6, "weight decay does not act")
STATE_LOST: Final = Cause(6, "the optimizer forgets its state between steps")
