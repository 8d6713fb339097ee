"""From a dataset to batches: order, workers, collation and reading ahead."""
