"""What a `_target_` may name, which class stands behind it, and objects built from it."""
