"""The upper bound: what the network would learn from the truth."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lfc.batch import CrowdBatch
from lfc.heads.base import Head


class Gold(Head):
    """Cross-entropy on the gold labels, the ceiling that crowd heads are judged against.

    Items without a gold label are left out. There is no model of the annotators.

    Args:
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    needs_gold = True

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy summed over the items with gold, over ``len(batch)``."""
        gold = batch.gold if batch.gold is not None else torch.full_like(batch.items, -1)
        return F.nll_loss(self(features), gold, ignore_index=-1, reduction="sum") / len(batch)
