"""Labels without inputs: the items themselves, by number."""

from typing import Any

import torch
from torch import Tensor

from lfc.annotations import TRAIN, Duplicates, UnknownItems, read_crowd
from lfc.datamodules.base import CrowdDataModule


class ItemDataModule(CrowdDataModule):
    """A crowd folder whose items are known by their labels alone: inputs are the items' numbers, from 0.

    Nothing but the tables is read; there need be no ``features.npy``. Its backbone is
    :class:`lfc.backbones.ItemEmbedding`.

    Args:
        path: The crowd folder.
        duplicates: What to do where one annotator labelled one item twice: ``keep`` each as a vote, keep the ``first``
            or the ``last`` alone, or raise an ``error``.
        unknown_items: What to do with annotations of items that the items table lacks: an ``error``, or ``drop`` them.
        loading: Batches and what is held out, see :class:`lfc.datamodules.CrowdDataModule`.
    """

    def __init__(
        self, path: str, duplicates: Duplicates = "keep", unknown_items: UnknownItems = "error", **loading: Any
    ) -> None:
        crowd = read_crowd(path, duplicates=duplicates, unknown_items=unknown_items)
        super().__init__(crowd=crowd, **loading)
        self.in_features = len(crowd.items)
        if untrained := int((crowd.split != TRAIN).sum()):
            unknown = f"{untrained} of {len(crowd.items)} items are not in the train split"
            self.table.notes.append(f"{unknown}: nothing is learned of them; choose no epoch by them (--run.monitor)")

    def load_inputs(self) -> Tensor:
        """The number of each item, ``(items,)``."""
        return torch.arange(len(self.table.items))


__all__ = ["ItemDataModule"]
