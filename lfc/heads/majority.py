"""Majority vote, the baseline everybody starts from."""

from typing import Literal

from torch import Tensor

from lfc.batch import CrowdBatch
from lfc.heads.base import Head


def vote_distribution(votes: Tensor, kind: Literal["hard", "soft"]) -> Tensor:
    """Votes ``(B, K)`` as label distributions; a row of zeros where nobody voted.

    Soft: the share of each class. Hard: all on the class with most votes, and *a tie goes to the class that comes
    first in the list of classes*.

    >>> import torch
    >>> votes = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    >>> vote_distribution(votes, "soft").tolist()
    [[0.0, 0.5, 0.5], [0.75, 0.25, 0.0], [0.0, 0.0, 0.0]]
    >>> vote_distribution(votes, "hard").tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    if kind == "hard":
        # argmax promises no order among equals, so the first of the maximal ones is asked for by name
        first = (votes == votes.amax(-1, keepdim=True)).float().cumsum(-1) == 1
        votes = (first & (votes == votes.amax(-1, keepdim=True))).float() * (votes.sum(-1, keepdim=True) > 0)
    return votes / votes.sum(-1, keepdim=True).clamp_min(1)


class MajorityVote(Head):
    """Cross-entropy on the majority vote, of which an item without annotations has none.

    Takes all annotators to be equally good. Ties of the hard vote go to the class listed first.

    Args:
        kind: ``soft`` trains on the shares of the votes, ``hard`` on the class with most votes.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    def __init__(self, kind: Literal["hard", "soft"] = "soft", **sizes: int) -> None:
        super().__init__(**sizes)
        self.kind = kind

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy against the votes, summed over the items that have any, over ``len(batch)``."""
        return -(self._target(batch) * self(features)).sum() / len(batch)

    def posterior(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """The vote itself; the network's opinion where nobody voted."""
        target = self._target(batch)
        return target + (target.sum(-1, keepdim=True) == 0) * self(features).exp()

    def _target(self, batch: CrowdBatch) -> Tensor:
        return vote_distribution(batch.votes(self.num_classes), self.kind)
