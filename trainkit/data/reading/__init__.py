"""From a dataset to batches: order, workers, collation and prefetching."""
