"""Majority vote: every annotator counts the same."""

from typing import Literal

from lfc.aggregation.base import Aggregation, Aggregator, Bar, Votes, first_greatest, one_hot, one_of
from lfc.functional import normalize_rows


class MajorityVote(Aggregator):
    """Majority vote, which takes all annotators to be equally good.

    A tie goes to the class listed first. An annotator's confusion matrix is counted against the vote's own outcome.

    Args:
        kind: ``soft`` gives each class its share of the votes, ``hard`` all to the class with most votes.
        progress: Show a progress bar on the terminal where a fit takes more than two seconds.

    >>> import torch
    >>> votes = Votes(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 1, 2, 3]), torch.tensor([1, 1, 0, 1]), 2, 4, 2)
    >>> result = MajorityVote().fit(votes)
    >>> result.posterior.tolist(), result.label.tolist()
    ([[0.25, 0.75], [0.5, 0.5]], [1, -1])
    """

    def __init__(self, kind: Literal["soft", "hard"] = "soft", progress: bool = True) -> None:
        super().__init__(progress)
        one_of("kind", kind, ("soft", "hard"))
        self.kind = kind

    def _fit(self, votes: Votes, bar: Bar) -> Aggregation:
        outcome = votes.shares()
        if self.kind == "hard":
            outcome = one_hot(first_greatest(outcome), votes.num_classes)
        counts = votes.sum_by_cell(outcome).transpose(1, 2)  # (R, K, K), true classes first
        confusion = normalize_rows(counts)
        right = counts.diagonal(dim1=1, dim2=2).sum(-1)  # (R,) votes that agree with the outcome
        total = counts.sum((1, 2))  # (R,) votes, since an item's outcome sums to one
        ability = (right / total).where(total > 0, 1 / votes.num_classes)
        return Aggregation(outcome, votes.labelled, annotators={"confusion": confusion, "ability": ability})
