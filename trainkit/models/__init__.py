"""Models of the recipes, and sampling from a language model; a model of the user's own is any `torch.nn.Module`."""
