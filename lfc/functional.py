"""Crowd arithmetic on long-form annotations, as pure functions.

Axes: ``B`` items in a batch, ``A`` annotations, ``R`` annotators, ``K`` classes. Every confusion matrix has the true
class in its rows and the class said in its columns: ``C[r, k, j] = p(annotator r says j | the class is k)``.

Two likelihoods go by one name. With ``log_t (B, K)`` the log-probability of each class and ``log_obs (A, K)`` that of
what was said, given each class:

- per annotation: ``sum_a log sum_k t[row_a, k] obs[a, k]``, each annotation a draw of its own;
- joint: ``sum_i log sum_k t[i, k] prod_{a of i} obs[a, k]``, all annotations of an item sharing one true class.

They agree only where no item has two annotations.
"""

import math

import torch
from torch import Tensor

from lfc.batch import CrowdBatch


def annotation_log_likelihood(log_t: Tensor, log_obs: Tensor, row: Tensor) -> Tensor:
    """Log-probability of each annotation by itself, ``(A,)``: ``log sum_k t[row_a, k] obs[a, k]``.

    >>> log_t = torch.tensor([[0.7, 0.3]]).log()
    >>> log_obs = torch.tensor([[0.9, 0.2], [0.4, 0.7]]).log()  # one said 0, another said 1
    >>> annotation_log_likelihood(log_t, log_obs, torch.tensor([0, 0])).exp()
    tensor([0.6900, 0.4900])
    """
    return torch.logsumexp(log_t.index_select(0, row) + log_obs, -1)


def log_joint(log_t: Tensor, log_obs: Tensor, row: Tensor) -> Tensor:
    """``log p(class, annotations of the item)``, ``(B, K)``; for an item without annotations, ``log_t``."""
    return log_t.index_add(0, row, log_obs)


def joint_log_likelihood(log_t: Tensor, log_obs: Tensor, row: Tensor) -> Tensor:
    """Log-probability of all annotations of each item together, ``(B,)``; 0 for an item without any.

    >>> log_t = torch.tensor([[0.7, 0.3]]).log()
    >>> log_obs = torch.tensor([[0.9, 0.2], [0.4, 0.7]]).log()
    >>> joint_log_likelihood(log_t, log_obs, torch.tensor([0, 0])).exp()
    tensor([0.2940])
    """
    return torch.logsumexp(log_joint(log_t, log_obs, row), -1)


def posterior(log_t: Tensor, log_obs: Tensor, row: Tensor) -> Tensor:
    """``p(class | input, annotations)``, ``(B, K)``, of items whose annotations share one true class.

    >>> log_t = torch.tensor([[0.7, 0.3], [0.5, 0.5]]).log()
    >>> log_obs = torch.tensor([[0.9, 0.2], [0.4, 0.7]]).log()
    >>> posterior(log_t, log_obs, torch.tensor([0, 0]))
    tensor([[0.8571, 0.1429],
            [0.5000, 0.5000]])
    """
    return log_joint(log_t, log_obs, row).softmax(-1)


def confusion_counts(posterior: Tensor, batch: CrowdBatch, num_annotators: int) -> Tensor:
    """Expected number of times annotator ``r`` said ``j`` where the class was ``k``, ``(R, K, K)``.

    Args:
        posterior: ``(B, K)`` probability of each class; a one-hot row where it is known, zeros to leave an item out.
        batch: ``B`` items.
        num_annotators: ``R``; 1 together with ``batch.annotator`` all 0 counts the crowd as a whole.
    """
    classes = posterior.shape[-1]
    cells = batch.annotator * classes + batch.label  # (A,)
    counts = posterior.new_zeros(num_annotators * classes, classes)
    counts.index_add_(0, cells, posterior.index_select(0, batch.row))
    return counts.view(num_annotators, classes, classes).transpose(1, 2)


def normalize_rows(counts: Tensor) -> Tensor:
    """Rows that sum to one; a row without any count becomes uniform.

    >>> normalize_rows(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
    tensor([[0.7500, 0.2500],
            [0.5000, 0.5000]])
    """
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.where(total > 0, 1.0), 1 / counts.shape[-1])


def relative_change(new: Tensor, old: Tensor) -> Tensor:
    """Mean of ``|new - old| / old`` over positive entries: how far a round of EM moved its parameters.

    >>> relative_change(torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.6]))
    tensor(0.2083)
    """
    return ((new - old).abs() / old.clamp_min(1e-7)).mean()


def jensen_shannon(p: Tensor, q: Tensor, floor: float = 1e-7) -> Tensor:
    """Jensen-Shannon divergence of distributions along the last axis, in bits, so between 0 and 1.

    >>> jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    tensor(0.3113)
    """
    p, q = p.clamp_min(floor), q.clamp_min(floor)
    middle = (p + q) / 2
    return ((p * (p / middle).log() + q * (q / middle).log()).sum(-1) / 2) / math.log(2)


def matrix_divergence(predicted: Tensor, true: Tensor) -> Tensor:
    """Jensen-Shannon divergence of two confusion matrices ``(..., K, K)``: the mean over their rows, in bits.

    >>> matrix_divergence(torch.eye(3), torch.full((3, 3), 1 / 3))
    tensor(0.4591)
    """
    return jensen_shannon(predicted, true).mean(-1)
