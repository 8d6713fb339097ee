"""Variables in one place, and one thread per device that computes with them."""
