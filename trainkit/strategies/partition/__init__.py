"""Maps: which part of a model is placed where, for device maps and pipelines."""
