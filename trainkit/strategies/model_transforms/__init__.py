"""Transform a model before it is placed: recompute modules in backward, and compile them."""

from trainkit.strategies.model_transforms.shape import (
    Compiles,
    ModelTransforms,
    apply_transforms,
    shaping_notes,
    shaping_problems,
)

__all__ = ["Compiles", "ModelTransforms", "apply_transforms", "shaping_notes", "shaping_problems"]
