"""Feature vectors from a crowd folder."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lfc.annotations import Duplicates, UnknownItems, check_finite, read_crowd, read_features
from lfc.datamodules.base import CrowdDataModule


class FeatureDataModule(CrowdDataModule):
    """A crowd folder with ``features.npy``: a vector an item.

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
        self.features = read_features(path, crowd)
        self.in_features = self.features.shape[1]

    def load_inputs(self) -> Tensor:
        """All features in memory, ``(items, D)``."""
        check_finite(self.features, self.table)
        return torch.from_numpy(np.array(self.features, dtype=np.float32))  # a copy: the file is read-only
