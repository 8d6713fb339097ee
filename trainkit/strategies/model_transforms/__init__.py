"""What a run makes of its model before it is placed: what is recomputed in backward, and what is compiled."""

from trainkit.strategies.model_transforms.shape import (
    Compiles,
    ModelTransforms,
    apply_transforms,
    shaping_notes,
    shaping_problems,
)

__all__ = ["Compiles", "ModelTransforms", "apply_transforms", "shaping_notes", "shaping_problems"]
