"""What a run makes of its model before it is placed: what is recomputed in backward, and what is compiled."""

from trainkit.strategies.shaping.shape import Compiles, Shaping, shape, shaping_notes, shaping_problems

__all__ = ["Compiles", "Shaping", "shape", "shaping_notes", "shaping_problems"]
