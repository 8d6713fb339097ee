"""Deferred initialization: a model without values, and a recording of how each of its tensors is initialized.

A model larger than the memory of one process cannot be built there, but several processes can train it. It is built on
torch's meta device while every operation of its constructor is recorded. Random operations run on one temporary tensor
at a time, so that the generator advances as in a normal build. Any tensor of the model can then be computed alone, with
the bits that building the whole model on the CPU would give.
"""

from trainkit.numerics.deferred.building import InitialValues, build_deferred, lazy_init_values
from trainkit.numerics.deferred.recording import CannotDeferError

__all__ = ["CannotDeferError", "InitialValues", "build_deferred", "lazy_init_values"]
