"""What a `_target_` may name, the class behind it, and building objects from it."""
