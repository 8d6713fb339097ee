"""Commands that use trained models."""
