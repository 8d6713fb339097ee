"""The numbers contract: what a training computes, wherever it runs.

Order of the samples, the cut of a batch into shards, keys of randomness, learning rates, precision and the order of
summation. Nothing here knows a process, a device group or a strategy.
"""
