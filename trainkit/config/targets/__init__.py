"""Check the names that a `_target_` may have, find the class, and build objects from it."""
