"""Minimax conditional entropy: annotators and items both have confusion matrices."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from lfc.aggregation.base import EM, Aggregation, Bar, Criterion, Votes, require

GAMMAS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""What the strength of the regularisation is chosen from."""
CHUNK = 2**20
"""Numbers in the largest temporary tensor."""


@dataclass
class Parameters:
    """What the M-step improves."""

    scores: Tensor
    """``(R + N, K, K)``: first those of annotators (sigma), then those of items (tau); true classes in rows."""
    weight: Tensor
    """``(R + N, 1, 1)`` strength of the penalty on each."""


class MMCE(EM[Parameters]):
    """Zhou et al., *Regularized Minimax Conditional Entropy for Crowdsourcing*, 2015.

    Annotator ``r`` says ``j`` of item ``i`` of class ``k`` with probability
    ``softmax_j(sigma[r, k, j] + tau[i, k, j])``, so that items too are confusing in ways of their own. All classes are
    equally likely beforehand. The objective is the dual of the minimax problem: the log-likelihood of the votes less
    ``alpha / 2 * sum(sigma ** 2) + beta / 2 * sum(tau ** 2)``, where ``alpha = gamma * K ** 2`` and
    ``beta = alpha * (mean votes of an annotator) / (mean votes of an item)``, over those who have any.

    The M-step is a concave problem, which L-BFGS improves from where the iteration before left it. An annotator's
    reported confusion matrix is that on an item without peculiarities, ``softmax_j(sigma[r, k, j])``.

    Args:
        gamma: Strength of the regularisation; by default the one of 1/4, 1/2, 1, 2, 4 with the highest likelihood of
            held-out votes. Every vote is held out once, in one of ``folds`` random parts. The others give the posterior
            ``q`` of its item and the parameters, and it scores ``log sum_k q[k] P(its label | k)``. Where there are
            fewer votes than folds, 1.
        folds: Parts of the cross-validation.
        steps: The most L-BFGS steps of an M-step.
        max_iter: The most iterations of one start.
        tol: Stop when the objective changes by less than this per annotation; 0 to use all iterations.
        restarts: Number of starts: the soft majority vote, then random blends of it.
        criterion: What the start to keep is chosen by: the final objective (``likelihood``), or the share of items
            whose label agrees with the ``majority`` vote.
        seed: Of the random starts and of the cross-validation.
        progress: Show a progress bar on the terminal where a fit takes more than two seconds.
    """

    def __init__(
        self,
        gamma: float | None = None,
        folds: int = 5,
        steps: int = 10,
        max_iter: int = 50,
        tol: float = 1e-5,
        restarts: int = 1,
        criterion: Criterion = "likelihood",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__(max_iter, tol, restarts, criterion, seed, progress)
        require("gamma", gamma, gamma is None or gamma > 0, "a number above 0, or none to choose it")
        require("folds", folds, folds >= 2, "a whole number from 2 up")
        require("steps", steps, steps >= 1, "a whole number from 1 up")
        self.gamma, self.folds, self.steps = gamma, folds, steps

    def _steps(self) -> int:
        fits = self.restarts + (len(GAMMAS) * self.folds if self.gamma is None else 0)
        return fits * self.max_iter

    def _fit(self, votes: Votes, bar: Bar) -> Aggregation:
        if self.gamma is not None:
            return super()._fit(votes, bar)
        scores = {} if len(votes) < self.folds else {gamma: self._score(votes, gamma, bar) for gamma in GAMMAS}
        gamma = max(scores, key=scores.__getitem__) if scores else 1.0
        result = self._with(gamma, restarts=self.restarts)._fit(votes, bar)
        result.options["scores"] = scores
        return result

    def _with(self, gamma: float, restarts: int = 1) -> "MMCE":
        options = self.max_iter, self.tol, restarts, self.criterion, self.seed
        return MMCE(gamma, self.folds, self.steps, *options)

    def _score(self, votes: Votes, gamma: float, bar: Bar) -> float:
        """Mean log-probability of a held-out vote."""
        generator = torch.Generator().manual_seed(self.seed)
        fold = torch.randperm(len(votes), generator=generator) % self.folds  # (A,)
        total = 0.0
        for number in range(self.folds):
            rest, held = _where(votes, fold != number), _where(votes, fold == number)
            result, model, _ = self._with(gamma)._run(rest, rest.shares(), bar)
            result.posterior[~rest.labelled] = 1 / votes.num_classes
            for part in _chunks(held):
                log_p = _log_softmax(model.scores, part)[1]  # (A, K)
                total += float((result.posterior[part.item].log() + log_p).logsumexp(-1).sum())
        return total / len(votes)

    def _m_step(self, votes: Votes, posterior: Tensor, model: Parameters | None) -> Parameters:
        if model is None:
            model = self._begin(votes)
        weight, shape = model.weight, model.scores.shape
        losses: list[float] = []

        def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = objective(torch.from_numpy(x).view(shape), weight, votes, posterior)
            losses.append(-value)
            return -value, slope.neg_().view(-1).numpy()

        options = {"maxiter": self.steps, "ftol": 1e-11, "gtol": 1e-7}
        found = minimize(loss, model.scores.view(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
        # the first loss is that of the start: no worse, or no step
        return Parameters(torch.from_numpy(found.x).view(shape), weight) if found.fun <= losses[0] else model

    def _begin(self, votes: Votes) -> Parameters:
        assert self.gamma is not None
        size = votes.num_annotators + votes.num_items
        alpha = self.gamma * votes.num_classes**2
        beta = alpha * float(votes.labelled.sum() / (votes.annotator_counts > 0).sum())
        weight = torch.full((size, 1, 1), beta, dtype=torch.double)
        weight[: votes.num_annotators] = alpha
        return Parameters(torch.zeros(size, votes.num_classes, votes.num_classes, dtype=torch.double), weight)

    def _e_step(self, votes: Votes, model: Parameters) -> tuple[Tensor, float]:
        joint = torch.full_like(votes.tally, -math.log(votes.num_classes))
        for part in _chunks(votes):
            joint.index_add_(0, part.item, _log_softmax(model.scores, part)[1])
        return joint, -float((model.weight * model.scores**2).sum()) / 2

    def _result(self, votes: Votes, model: Parameters) -> dict[str, Any]:
        confusion = model.scores[: votes.num_annotators].softmax(-1)
        items = {"confusion": model.scores[votes.num_annotators :].softmax(-1)}
        ability = confusion.diagonal(dim1=1, dim2=2).mean(-1)
        return {
            "annotators": {"confusion": confusion, "ability": ability},
            "items": items,
            "options": {"gamma": self.gamma},
        }


def objective(scores: Tensor, weight: Tensor, votes: Votes, posterior: Tensor) -> tuple[float, Tensor]:
    """The concave function that the M-step improves, and its gradient ``(R + N, K, K)``.

    Args:
        scores: ``(R + N, K, K)`` of annotators, then of items.
        weight: ``(R + N, 1, 1)`` of the penalty.
        votes: ``A`` of them.
        posterior: ``(N, K)``.
    """
    slope = -weight * scores
    value = float((slope * scores).sum()) / 2
    for part in _chunks(votes):
        log_p, log_said = _log_softmax(scores, part)  # (A, K, K), (A, K)
        share = posterior.index_select(0, part.item)  # (A, K)
        value += float((share * log_said).sum())
        pull = log_p.exp_().mul_(-share.unsqueeze(-1))  # (A, K, K): share * (1 if said - P)
        pull[torch.arange(len(part)), :, part.label] += share
        slope.index_add_(0, part.annotator, pull).index_add_(0, part.item + votes.num_annotators, pull)
    return value, slope


def _log_softmax(scores: Tensor, votes: Votes) -> tuple[Tensor, Tensor]:
    """``log P(j | k)`` of each vote's annotator and item, ``(A, K, K)``, and that of the label said, ``(A, K)``."""
    both = scores.index_select(0, votes.annotator) + scores.index_select(0, votes.item + votes.num_annotators)
    log_p = both.log_softmax(-1)
    return log_p, log_p[torch.arange(len(votes)), :, votes.label]


def _where(votes: Votes, keep: Tensor) -> Votes:
    sizes = votes.num_items, votes.num_annotators, votes.num_classes
    return Votes(votes.item[keep], votes.annotator[keep], votes.label[keep], *sizes)


def _chunks(votes: Votes) -> list[Votes]:
    """The votes in parts whose ``(A, K, K)`` tensors stay small."""
    size = max(1, CHUNK // votes.num_classes**2)
    if len(votes) <= size:
        return [votes]
    sizes = votes.num_items, votes.num_annotators, votes.num_classes
    triples = zip(votes.item.split(size), votes.annotator.split(size), votes.label.split(size), strict=True)
    return [Votes(*triple, *sizes) for triple in triples]
