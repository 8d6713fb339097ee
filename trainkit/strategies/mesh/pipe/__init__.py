"""Pipeline parallelism: the stages of a replica on several ranks, by `torch.distributed.pipelining`."""
