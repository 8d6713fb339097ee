"""Compare the training of a strategy with that of one device: `trainkit prove`.

A proof has two answers: are both, as they would be started, the same training, and are their numbers the same? If the
numbers differ, it names the point of docs/numbers.md that the candidate breaks.

    proving      trains every candidate a few steps with equal shards, and asks the others
    comparing    both answers: plans by their keys, tensors by name, step by step
    examining    compares every step of a candidate with a plain loop that starts from the candidate's own checkpoint
                 by forward and backward of each shard without any part of an executor, and finds the fault that
                 makes a difference of the shards and the update of a step
"""
