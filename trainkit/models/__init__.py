"""Models of the recipes, and sampling from a language model; the user's own model is any `torch.nn.Module`."""

from trainkit.names import lazy

__getattr__ = lazy(__name__)
