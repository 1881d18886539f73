"""What a backbone is: the part of a model that turns inputs into features."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lfc.errors import UserError


class Backbone(nn.Module, ABC):
    """Inputs in, features ``(B, out_features)`` out.

    A backbone takes ``in_features`` even if it has no use for it (``None`` where the inputs have no width), so that any
    backbone fits any data in a config.
    """

    out_features: int
    """Width ``D`` of what :meth:`forward` returns; known as soon as the backbone is built."""

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor:
        """Features ``(B, out_features)`` of a batch's inputs."""

    def prepare(self, inputs: Iterable[Any]) -> None:
        """Look at the training inputs once, before training, batch by batch; what is learned goes into buffers."""

    def restart(self) -> None:
        """Begin anew from other random numbers, where there are any; a backbone with given weights has none."""
        raise UserError(
            f"{type(self).__name__} starts from given weights, so a restart is no other start; take --model.restarts=1"
        )


def redraw(module: nn.Module) -> None:
    """Draw anew, from the global generator, every parameter of a module that knows how it began."""
    for part in module.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
