"""Transform a model before it is placed: its memory format, recomputation in backward, and compilation."""

from trainkit.strategies.model_transforms.compiling import is_compiled, uncompiled
from trainkit.strategies.model_transforms.selective import selective_contexts
from trainkit.strategies.model_transforms.shape import (
    NO_TRANSFORMS,
    Compiles,
    ModelTransforms,
    apply_transforms,
    format_for,
    recomputed_modules,
    shaping_notes,
    shaping_problems,
)

__all__ = [
    "NO_TRANSFORMS",
    "Compiles",
    "ModelTransforms",
    "apply_transforms",
    "format_for",
    "is_compiled",
    "recomputed_modules",
    "selective_contexts",
    "shaping_notes",
    "shaping_problems",
    "uncompiled",
]
