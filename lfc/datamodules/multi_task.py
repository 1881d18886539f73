"""Several labelling tasks at once, on feature vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lfc.annotations import Duplicates, UnknownItems, check_finite, join_crowds, read_crowd, read_features
from lfc.datamodules.base import CrowdDataModule
from lfc.errors import UserError


class MultiTaskDataModule(CrowdDataModule):
    """Several crowd folders with ``features.npy``, a labelling task each, in part by the same annotators.

    Items are called ``task/item`` after the folder, annotators with the same id are the same, and the classes are those
    of all. Inputs are ``{"inputs": (B, D), "task": (B,)}``: the head reads the task beside the features. A trained
    model knows a task by its place in the list.

    Args:
        paths: The crowd folders, two or more, with features of the same width.
        duplicates: What to do where one annotator labelled one item twice: ``keep`` each as a vote, keep the ``first``
            or the ``last`` alone, or raise an ``error``.
        unknown_items: What to do with annotations of items that the items table lacks: an ``error``, or ``drop`` them.
        loading: Batches and what is held out, see :class:`lfc.datamodules.CrowdDataModule`.
    """

    tasks: list[str]
    """Names of the tasks: those of the folders, with a number where one comes again."""

    def __init__(
        self, paths: list[str], duplicates: Duplicates = "keep", unknown_items: UnknownItems = "error", **loading: Any
    ) -> None:
        if len(paths) < 2:
            raise UserError(f"--data.paths=[{', '.join(paths)}]: two crowd folders or more; for one, FeatureDataModule")
        self.crowds = [read_crowd(path, duplicates=duplicates, unknown_items=unknown_items) for path in paths]
        self.tasks = _distinct([Path(path).resolve().name for path in paths])
        super().__init__(crowd=join_crowds(self.crowds, self.tasks), **loading)
        self.num_tasks = len(self.tasks)
        self.features = [read_features(path, crowd) for path, crowd in zip(paths, self.crowds, strict=True)]
        self.in_features = self.features[0].shape[1]
        for path, features in zip(paths, self.features, strict=True):
            if features.shape[1] != self.in_features:
                wanted = f"where {Path(paths[0], 'features.npy')} has {self.in_features}"
                found = f"{Path(path, 'features.npy')}: {features.shape[1]} columns"
                raise UserError(f"{found} {wanted}; give every task features of the same width")

    def load_inputs(self) -> "TaskInputs":
        """All features in memory, and the task of each item."""
        for features, crowd in zip(self.features, self.crowds, strict=True):
            check_finite(features, crowd)
        sizes = torch.tensor([len(features) for features in self.features])
        together = np.concatenate(self.features, dtype=np.float32, casting="unsafe")
        return TaskInputs(torch.from_numpy(together), torch.repeat_interleave(sizes))


class TaskInputs:
    """Feature vectors and their tasks, selected together.

    Args:
        features: ``(items, D)``.
        task: ``(items,)``.
    """

    def __init__(self, features: Tensor, task: Tensor) -> None:
        self.features, self.task = features, task

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        return {"inputs": self.features[index], "task": self.task[index]}


def _distinct(names: list[str]) -> list[str]:
    """The names, with a number where one comes again.

    >>> _distinct(["cats", "dogs", "cats", "cats-2", "cats"])
    ['cats', 'dogs', 'cats-2', 'cats-2-2', 'cats-3']
    """
    found: list[str] = []
    for name in names:
        number, new = 1, name
        while new in found:
            number += 1
            new = f"{name}-{number}"
        found.append(new)
    return found


__all__ = ["MultiTaskDataModule", "TaskInputs"]
