"""Transforms of a model or its optimizer before a strategy takes them."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
