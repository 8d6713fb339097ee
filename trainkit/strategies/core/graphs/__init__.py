"""A step as graphs of torch.compile: forward and backward of a shard, clipping, and the update of the optimizer."""
