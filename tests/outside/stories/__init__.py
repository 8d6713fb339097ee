"""A package of a user: one story a file, each a small training with a model, data and an objective of its own.

`RECIPE` of a story is its `conf/recipe/NAME.yaml`. `python -m stories NAME` runs a story (`__main__.py`).
"""
