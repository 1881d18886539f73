"""GLAD: some annotators are abler than others, some items easier."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lfc.aggregation.base import EM, Criterion, Votes, require


@dataclass
class Parameters:
    """What the M-step improves."""

    ability: Tensor
    """``(R,)``."""
    easiness: Tensor
    """``(N,)``; its exponential multiplies the ability."""


class GLAD(EM[Parameters]):
    """Whitehill et al., *Whose Vote Should Count More*, NIPS 2009.

    An annotator of ability ``alpha`` labels an item of easiness ``beta``, the logarithm of inverse difficulty, rightly
    with probability ``sigmoid(alpha * exp(beta))``, and otherwise says any other class alike; an ability below 0 is an
    adversary's. All classes are equally likely beforehand, and every ability and easiness has a normal prior of mean 1
    and variance 1; those without votes keep the mean. The objective is the log-likelihood of the votes plus the
    logarithm of these priors, without its constant.

    The M-step makes Newton steps on all abilities, then on all easinesses. Given the others each of these is a problem
    in one number, so that each is safeguarded by itself: a step that does not help is halved, and at last not made.

    Args:
        sweeps: Newton steps on abilities and easinesses in an M-step.
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
        sweeps: int = 3,
        max_iter: int = 100,
        tol: float = 1e-5,
        restarts: int = 1,
        criterion: Criterion = "likelihood",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__(max_iter, tol, restarts, criterion, seed, progress)
        require("sweeps", sweeps, sweeps >= 1, "a whole number from 1 up")
        self.sweeps = sweeps

    def _m_step(self, votes: Votes, posterior: Tensor, model: Parameters | None) -> Parameters:
        right = posterior[votes.item, votes.label]  # (A,) probability that the vote is right
        ability, easiness = (
            (torch.ones(votes.num_annotators).double(), torch.ones(votes.num_items).double())
            if model is None
            else (model.ability, model.easiness)
        )
        for _ in range(self.sweeps):
            ability = _improve(ability, votes.annotator, right, scale=easiness.exp()[votes.item])
            easiness = _improve(easiness, votes.item, right, factor=ability[votes.annotator])
        return Parameters(ability, easiness)

    def _e_step(self, votes: Votes, model: Parameters) -> tuple[Tensor, float]:
        # log p(label | class k) is log sigmoid(x) if k is the label, else log sigmoid(-x) - log(K - 1); they differ by
        # x + log(K - 1), so that only the cell of the label need be told from the others
        classes, others = votes.num_classes, math.log(votes.num_classes - 1)
        x = model.ability[votes.annotator] * model.easiness.exp()[votes.item]  # (A,)
        wrong = torch.bincount(votes.item, logsigmoid(-x) - others, minlength=votes.num_items)  # (N,)
        gain = torch.bincount(votes.item * classes + votes.label, x + others, minlength=votes.num_items * classes)
        joint = gain.view(-1, classes) + (wrong - math.log(classes)).unsqueeze(-1)
        return joint, -float(((model.ability - 1) ** 2).sum() + ((model.easiness - 1) ** 2).sum()) / 2

    def _result(self, votes: Votes, model: Parameters) -> dict[str, Any]:
        classes = votes.num_classes
        x = model.ability[votes.annotator] * model.easiness.exp()[votes.item]  # (A,)
        known = votes.annotator_counts
        right = torch.bincount(votes.annotator, x.sigmoid(), minlength=votes.num_annotators) / known.clamp_min(1)
        right = right.where(known > 0, 1 / classes)  # (R,)
        confusion = ((1 - right) / (classes - 1))[:, None, None].repeat(1, classes, classes)
        confusion.diagonal(dim1=1, dim2=2).copy_(right[:, None])
        annotators = {"ability": model.ability, "confusion": confusion}
        return {"annotators": annotators, "items": {"easiness": model.easiness}}


def expected_log_likelihood(x: Tensor, right: Tensor) -> Tensor:
    """``(A,)`` of each vote, up to a constant, where ``x`` is ability times ``exp(easiness)``.

    >>> expected_log_likelihood(torch.tensor([0.0]), torch.tensor([0.3]))
    tensor([-0.6931])
    """
    return right * x + logsigmoid(-x)


def derivatives(
    value: Tensor, owner: Tensor, right: Tensor, scale: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient, and a positive bound of the curvature, of the objective in each number of ``value``.

    Args:
        value: ``(M,)`` abilities or easinesses.
        owner: ``(A,)`` whose ability or easiness is at work in each vote.
        right: ``(A,)`` probability that the vote is right.
        scale: ``(A,)`` if ``value`` are abilities: ``exp(easiness)`` of the item.
        factor: ``(A,)`` if ``value`` are easinesses: the ability of the annotator.
    """
    x, slope = _argument(value, owner, scale, factor)
    sigma = x.sigmoid()
    gradient = torch.bincount(owner, (right - sigma) * slope, minlength=len(value)) - (value - 1)
    curvature = torch.bincount(owner, sigma * (1 - sigma) * slope**2, minlength=len(value)) + 1
    return gradient, curvature


def _argument(value: Tensor, owner: Tensor, scale: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x`` of each vote, and its derivative in the number that owns it; both ``(A,)``."""
    if scale is not None:
        return value[owner] * scale, scale
    assert factor is not None
    x = factor * value.exp()[owner]
    return x, x


def _improve(
    value: Tensor,
    owner: Tensor,
    right: Tensor,
    scale: Tensor | None = None,
    factor: Tensor | None = None,
    halvings: int = 6,
) -> Tensor:
    """One Newton step in each number, halved until it does not make that number's share of the objective worse."""

    def objective(at: Tensor) -> Tensor:
        x, _ = _argument(at, owner, scale, factor)
        return torch.bincount(owner, expected_log_likelihood(x, right), minlength=len(at)) - (at - 1) ** 2 / 2

    gradient, curvature = derivatives(value, owner, right, scale, factor)
    step = (gradient / curvature).clamp_(-1, 1)
    before = objective(value)
    for _ in range(halvings):
        worse = objective(value + step) < before
        if not worse.any():
            return value + step
        step = torch.where(worse, step / 2, step)
    return value + step.where(objective(value + step) >= before, 0.0)
