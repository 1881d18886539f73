"""Linear models and multi-layer perceptrons on feature vectors."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lfc.backbones.base import Backbone, redraw
from lfc.errors import UserError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "selu": nn.SELU, "tanh": nn.Tanh}


class MLP(Backbone):
    """Multi-layer perceptron on feature vectors; with ``hidden=[]`` the features go through, and the model is linear.

    Args:
        in_features: Width of the inputs; set by the data.
        hidden: Width of each hidden layer.
        dropout: Dropout after each hidden layer.
        activation: Non-linearity of the hidden layers.
        standardize: Whether to bring each input to mean 0 and deviation 1 over the training items.

    >>> MLP(512, hidden=[128])(torch.zeros(3, 512)).shape
    torch.Size([3, 128])
    >>> MLP(512, hidden=[]).out_features
    512
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        in_features: int,
        hidden: list[int] = [128],  # noqa: B006  a list is what a config file holds, and it is not changed
        dropout: float = 0.0,
        activation: Literal["relu", "gelu", "selu", "tanh"] = "relu",
        standardize: bool = False,
    ) -> None:
        super().__init__()
        self.standardize = standardize
        if standardize:
            self.register_buffer("mean", torch.zeros(in_features))
            self.register_buffer("scale", torch.ones(in_features))
        widths = [in_features, *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
            layers += [nn.Dropout(dropout)] if dropout else []
        self.layers = nn.Sequential(*layers)
        self.out_features = widths[-1]

    def prepare(self, inputs: Iterable[Tensor]) -> None:
        """Mean and deviation of the training inputs, in one pass; a constant input is only centred."""
        if not self.standardize:
            return
        count, mean, square = 0, torch.zeros_like(self.mean).double(), torch.zeros_like(self.mean).double()
        for x in inputs:  # the parallel form of Welford's update: two batches' moments make those of both
            x = x.double()
            shift, total = x.mean(0) - mean, count + len(x)
            square += (x - x.mean(0)).square().sum(0) + shift.square() * (count * len(x) / total)
            mean += shift * (len(x) / total)
            count = total
        deviation = (square / count).sqrt()
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(deviation > 1e-12 * mean.abs(), deviation, 1.0))

    def restart(self) -> None:
        """Draw the weights anew."""
        redraw(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features ``(B, out_features)`` of feature vectors ``(B, in_features)``."""
        if not inputs.is_floating_point():
            raise UserError(
                f"MLP reads feature vectors and these inputs are {inputs.dtype}; take --data=FeatureDataModule"
            )
        if self.standardize:
            inputs = (inputs - self.mean) / self.scale
        return self.layers(inputs)
