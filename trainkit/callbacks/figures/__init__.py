"""Callbacks that show tensors, classes and samples as figures."""
