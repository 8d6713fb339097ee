"""Deferred initialisation: a model without numbers, and how each of its numbers is to be made.

A model that is larger than the memory of a process cannot be built there, but it can be trained by several. It is
built on torch's meta device while every operation of its constructor is written down; random ones are carried out on
one temporary tensor at a time, so that the generator goes on as it would have. Any tensor of the model can then be
made alone, with the bits that building the whole on the CPU would have given it.
"""

from trainkit.numerics.deferred.building import InitialValues, build_deferred, lazy_init_values
from trainkit.numerics.deferred.tape import CannotDeferError

__all__ = ["CannotDeferError", "InitialValues", "build_deferred", "lazy_init_values"]
