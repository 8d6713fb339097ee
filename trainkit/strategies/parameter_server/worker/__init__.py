"""A worker: it pulls variables, computes gradients and pushes them."""
