"""The one type that crosses every boundary: datamodule to backbone, backbone to head, head to report.

Axes, here and everywhere: ``N`` training items, ``B`` items in a batch, ``A`` annotations in a batch, ``R`` annotators,
``K`` classes, ``D`` feature width.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class CrowdBatch:
    """``B`` items and the ``A`` annotations they received, in long form.

    Annotation ``a`` says that annotator ``annotator[a]`` gave the item in row ``row[a]`` of this batch the class
    ``label[a]``. Time and memory grow with annotations, never with items x annotators, and an item nobody labelled is
    simply absent from ``row``. The whole training set is the same type with ``inputs=None``.
    """

    inputs: Any
    """What the backbone reads: a tensor ``(B, ...)``, a dict of them, a list of texts; ``None`` for a whole crowd."""
    items: Tensor
    """``(B,)`` position of each item in its split; for training items a row of ``[0, num_items)``."""
    row: Tensor
    """``(A,)`` position in this batch, in ``[0, B)``, of the item annotated."""
    annotator: Tensor
    """``(A,)`` who said it, in ``[0, num_annotators)``."""
    label: Tensor
    """``(A,)`` the class they said, in ``[0, num_classes)``."""
    gold: Tensor | None = None
    """``(B,)`` reference class, -1 where unknown; for evaluation, and for the head that is trained on it."""
    soft: Tensor | None = None
    """``(B, K)`` distribution of the human labels, a row of zeros where unknown."""
    profile: Tensor | None = None
    """``(A, F)`` features of the annotator behind each annotation."""

    train: Tensor | None = None
    """``(B,)`` row of each item among the training items, -1 for any other; where a head asks what it knew of them."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def labelled(self) -> Tensor:
        """``(B,)`` whether anybody labelled the item."""
        return torch.zeros(len(self), dtype=torch.bool, device=self.row.device).index_fill_(0, self.row, True)

    def votes(self, num_classes: int) -> Tensor:
        """How often each item was given each class, ``(B, K)``.

        >>> batch = CrowdBatch(
        ...     None,
        ...     items=torch.tensor([7, 9, 4]),
        ...     row=torch.tensor([0, 0, 1]),
        ...     annotator=torch.tensor([0, 1, 0]),
        ...     label=torch.tensor([2, 2, 0]),
        ... )
        >>> batch.votes(3).tolist()
        [[0.0, 0.0, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        """
        flat = torch.bincount(self.row * num_classes + self.label, minlength=len(self) * num_classes)
        return flat.view(len(self), num_classes).float()

    def _map(self, convert: Any) -> "CrowdBatch":
        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return convert(value)
            return {key: apply(v) for key, v in value.items()} if isinstance(value, dict) else value

        return CrowdBatch(**{f.name: apply(getattr(self, f.name)) for f in fields(self)})

    def to(self, *args: Any, **kwargs: Any) -> "CrowdBatch":
        """A copy with every tensor moved, as ``Tensor.to`` moves one; Lightning calls it."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> "CrowdBatch":
        """A copy in page-locked memory; the data loader calls it."""
        return self._map(lambda tensor: tensor.pin_memory())
