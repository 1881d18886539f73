"""A vector for each item, for labels without inputs."""

import torch
from torch import Tensor, nn

from lfc.backbones.base import Backbone
from lfc.errors import UserError

SCALE = 0.1
"""Deviation of an embedding's numbers at first: small, so that at first all items are about alike."""


class ItemEmbedding(Backbone):
    """A vector for each item of :class:`lfc.datamodules.ItemDataModule`, learned from the item's labels alone.

    It says nothing of an item that was not trained on: the vector of one is as it was drawn, from a normal
    distribution of deviation .1.

    Args:
        in_features: Number of items; set by the data.
        size: Width of the vectors.

    >>> ItemEmbedding(100)(torch.tensor([7, 7, 99])).shape
    torch.Size([3, 16])
    """

    def __init__(self, in_features: int, size: int = 16) -> None:
        super().__init__()
        if in_features is None:
            raise UserError("ItemEmbedding reads ItemDataModule's item numbers; take --data=ItemDataModule")
        if size < 1:
            raise UserError(f"--model.backbone.size={size}: a vector holds at least one number")
        self.embedding = nn.Embedding(in_features, size)
        self.out_features = size
        self.restart()

    def restart(self) -> None:
        """Draw the vectors anew."""
        nn.init.normal_(self.embedding.weight, std=SCALE)

    def forward(self, inputs: Tensor) -> Tensor:
        """Vectors ``(B, size)`` of the items ``(B,)``, by number."""
        if inputs.dtype != torch.long or inputs.dim() != 1:
            found = f"these inputs are {inputs.dtype} {tuple(inputs.shape)}"
            raise UserError(
                f"ItemEmbedding reads ItemDataModule's item numbers; {found}: take --data=ItemDataModule, or an MLP"
            )
        try:
            return self.embedding(inputs)
        except IndexError:
            known = self.embedding.num_embeddings
            raise UserError(
                f"ItemEmbedding knows {known} items and was given number {int(inputs.max())}; give the data that it "
                "was trained on"
            ) from None


__all__ = ["ItemEmbedding"]
