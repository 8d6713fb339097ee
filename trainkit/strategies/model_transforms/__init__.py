"""Transform a model before it is placed: recompute modules in backward, and compile them."""

from trainkit.strategies.model_transforms.shape import (
    NO_TRANSFORMS,
    Compiles,
    ModelTransforms,
    apply_transforms,
    recomputed_modules,
    shaping_notes,
    shaping_problems,
)

__all__ = [
    "NO_TRANSFORMS",
    "Compiles",
    "ModelTransforms",
    "apply_transforms",
    "recomputed_modules",
    "shaping_notes",
    "shaping_problems",
]
