"""Dawid-Skene: each annotator has a confusion matrix, found by expectation maximisation."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lfc.aggregation.base import EM, Criterion, Votes, first_greatest, one_hot, one_of, require


@dataclass
class Parameters:
    """What the M-step estimates."""

    prior: Tensor
    """``(K,)`` probability of each class."""
    said: Tensor
    """``(R, K, K)`` the confusion matrices turned: first the label said, then the true class."""
    log_said: Tensor
    """Their logarithm, -inf for what was never said."""


class DawidSkene(EM[Parameters]):
    """Dawid & Skene, *Maximum Likelihood Estimation of Observer Error-Rates Using the EM Algorithm*, 1979.

    Takes every item to have one class, drawn from a prior, and every annotator to err by a confusion matrix of their
    own, whatever the item. The objective is the log-likelihood of all votes,
    ``sum_i log sum_k prior[k] prod_{a of i} C[r_a, k, l_a]``, to which pseudo-counts add
    ``pseudo_count * sum log C``. A row of a matrix without any count is uniform.

    Args:
        kind: ``classic`` gives an annotator a ``K`` x ``K`` matrix; ``one_coin`` one accuracy, all errors being
            equally likely, which needs fewer votes.
        hard: Give each item wholly to its most probable class in every iteration (fast Dawid-Skene: Sinha, Rao &
            Balasubramanian 2018). The objective is then the likelihood of votes and classes together,
            ``sum_i log max_k`` in place of ``sum_k``.
        pseudo_count: Votes that every cell of every matrix has beforehand. Without any, an annotator who never said
            ``j`` of a ``k`` excludes class ``k`` from any item of which they do.
        max_iter: The most iterations of one start.
        tol: Stop when the objective changes by less than this per annotation; 0 to use all iterations.
        restarts: Number of starts: the soft majority vote, then random blends of it.
        criterion: What the start to keep is chosen by: the final objective (``likelihood``), or the share of items
            whose label agrees with the ``majority`` vote.
        seed: Of the random starts.
        progress: Show a progress bar on the terminal where a fit takes more than two seconds.
    """

    def __init__(
        self,
        kind: Literal["classic", "one_coin"] = "classic",
        hard: bool = False,
        pseudo_count: float = 0.0,
        max_iter: int = 100,
        tol: float = 1e-5,
        restarts: int = 1,
        criterion: Criterion = "likelihood",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__(max_iter, tol, restarts, criterion, seed, progress)
        one_of("kind", kind, ("classic", "one_coin"))
        require("pseudo_count", pseudo_count, pseudo_count >= 0, "a number from 0 up")
        self.kind, self.hard, self.pseudo_count = kind, hard, pseudo_count

    def _m_step(self, votes: Votes, posterior: Tensor, model: Parameters | None) -> Parameters:
        prior = posterior.sum(0) / votes.labelled.sum()
        counts = votes.sum_by_cell(posterior).add_(self.pseudo_count)  # (R, K, K), labels first
        if self.kind == "one_coin":
            counts = _tie(counts)
        total = counts.sum(1, keepdim=True)  # (R, 1, K)
        said = (counts / total).where(total > 0, 1 / votes.num_classes)
        return Parameters(prior, said, said.log())

    def _e_step(self, votes: Votes, model: Parameters) -> tuple[Tensor, float]:
        penalty = self.pseudo_count * float(model.log_said.sum()) if self.pseudo_count else 0.0
        return votes.sum_by_item(model.log_said).add_(model.prior.log()), penalty

    def _normalize(self, joint: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        if not self.hard:
            return super()._normalize(joint, previous)
        top, best = joint.amax(-1), first_greatest(joint)
        best = torch.where(top.isneginf(), first_greatest(previous), best)
        return one_hot(best, joint.shape[-1]), top

    def _result(self, votes: Votes, model: Parameters) -> dict[str, Any]:
        confusion = model.said.transpose(1, 2).contiguous()
        ability = confusion.diagonal(dim1=1, dim2=2) @ model.prior
        return {"annotators": {"confusion": confusion, "ability": ability}, "options": {"prior": model.prior}}


def _tie(counts: Tensor) -> Tensor:
    """Counts ``(R, K, K)`` as if all right answers, and all wrong ones, had been equally frequent.

    >>> _tie(torch.tensor([[[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 1.0]]]))
    tensor([[[2.0000, 0.5000, 0.5000],
             [0.5000, 2.0000, 0.5000],
             [0.5000, 0.5000, 2.0000]]])
    """
    classes = counts.shape[-1]
    right = counts.diagonal(dim1=1, dim2=2).sum(-1)  # (R,)
    wrong = counts.sum((1, 2)) - right
    off = (wrong.clamp_min(0) / (classes * (classes - 1)))[:, None, None].expand_as(counts).clone()
    off.diagonal(dim1=1, dim2=2).copy_((right / classes)[:, None])
    return off
