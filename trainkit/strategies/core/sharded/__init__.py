"""The common parts of strategies that shard parameters over ranks: shard geometry, checkpointing, norms, steps."""
