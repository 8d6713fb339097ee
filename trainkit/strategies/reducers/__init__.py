"""Reducers: they sum the partial sums of a step over all ranks."""
