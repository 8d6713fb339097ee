"""Model, data, objective, metric and callback of this package; the YAML files below conf/ name them."""
