"""Where this checkout is."""

from tests.support.installing import ROOT

__all__ = ["ROOT"]
