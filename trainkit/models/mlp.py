"""A network of fully connected layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Final, Literal

from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, below, unit

_ACTIVATIONS: Final = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


class Mlp(nn.Module):
    """Linear layers with an activation between; inputs of any shape are flattened.

    Example:
        >>> sum(p.numel() for p in Mlp(in_features=64, hidden=[128], out_features=10).parameters())
        9610
    """

    draws_nothing: ClassVar[bool] = True
    """The model's own code draws no random number; a dropout module in it does."""

    def __init__(
        self,
        *,
        in_features: Annotated[int, at_least(1), unit("features")],
        hidden: Annotated[list[int], unit("units")],
        out_features: Annotated[int, at_least(1), unit("features")],
        activation: Literal["relu", "gelu", "tanh"] = "relu",
        dropout: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.0,
        batch_norm: bool = False,
    ) -> None:
        """Build the layers.

        Args:
            in_features: inputs per sample, after flattening.
            hidden: width of each hidden layer; empty for a linear model.
            out_features: outputs per sample: classes, or regression values.
            activation: the activation after each hidden layer.
            dropout: fraction of hidden activations zeroed in training, in [0, 1).
            batch_norm: whether to normalize each hidden layer before its activation.
        """
        super().__init__()
        widths = [in_features, *hidden]
        if min(widths) < 1:
            raise ConfigError([Problem(key="model.hidden", value=hidden, rule="every width must be 1 or more.")])
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers.append(nn.Linear(fan_in, fan_out))
            if batch_norm:
                layers.append(nn.BatchNorm1d(fan_out))
            layers.append(_ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], out_features))
        self.layers = nn.Sequential(*layers)

    def tensor_plan(self, degree: int) -> dict[str, str]:  # noqa: ARG002 - every plan takes the degree
        """Return how the layers are sharded over ranks: in pairs, by rows and by columns; a batch norm needs whole
        activations.

        Example:
            >>> Mlp(in_features=64, hidden=[128], out_features=10).tensor_plan(2)
            {'layers.0': 'colwise', 'layers.2': 'rowwise'}
        """
        linear = [f"layers.{index}" for index, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        if any(isinstance(layer, nn.BatchNorm1d) for layer in self.layers):
            return dict.fromkeys(linear[:-1], "colwise_gathered")
        pairs = dict(zip(linear[::2], linear[1::2], strict=False))
        plan = {name: style for pair in pairs.items() for name, style in zip(pair, ("colwise", "rowwise"), strict=True)}
        drop = [f"layers.{index}" for index, layer in enumerate(self.layers) if isinstance(layer, nn.Dropout)]
        return plan | dict.fromkeys(drop[: 2 * len(pairs) : 2], "dropout")  # after the first layer of each pair

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (samples, ...) to (samples, out_features)."""
        outputs: Tensor = self.layers(inputs.flatten(1) if inputs.dim() > 2 else inputs)
        return outputs
