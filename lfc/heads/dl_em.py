"""DL-EM: expectation-maximisation with a network as every item's prior."""

import torch
from torch import Tensor

from lfc.batch import CrowdBatch
from lfc.functional import confusion_counts, normalize_rows, relative_change
from lfc.heads.base import ConfusionHead


class DLEM(ConfusionHead):
    """Raykar et al., *Learning from Crowds*, JMLR 2010, with a network, as in Albarqouni et al.'s AggNet, 2016.

    Each annotator has a confusion matrix, the same for every item, and all annotations of an item share one true class:
    the joint likelihood. Starting from the shares of the votes, a round fits the network to the items' posteriors by
    cross-entropy, then the posteriors are Bayes' rule over network and annotators, and the matrices are the posteriors'
    expected counts. Dawid and Skene's model is the same with one prior for all items.

    Args:
        pseudo_count: Added to every cell of every annotator's counts (a Dirichlet prior); 0 is maximum likelihood.
        em_every: Epochs in which the network is fitted to the posteriors before they are updated.
        em_rounds: Most rounds; ``None`` goes on as long as training does.
        em_tol: Training stops when a round changes the likelihood and the matrices by no more than this share; 0 never.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    likelihood = "joint"
    targets: Tensor
    log_confusion: Tensor

    def __init__(
        self,
        pseudo_count: float = 1.0,
        em_every: int = 1,
        em_rounds: int | None = None,
        em_tol: float = 1e-4,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.pseudo_count, self.em_every, self.em_rounds, self.em_tol = pseudo_count, em_every, em_rounds, em_tol
        classes = self.num_classes
        self.register_buffer("targets", torch.zeros(self.num_items, classes))
        self.register_buffer("log_confusion", torch.zeros(self.num_annotators, classes, classes))

    def prepare(self, crowd: CrowdBatch) -> None:
        """The shares of the votes stand for the first E-step."""
        self.m_step(normalize_rows(crowd.votes(self.num_classes)), crowd)

    def m_step(self, rows: Tensor, crowd: CrowdBatch) -> Tensor:
        """Matrices from expected counts, in float64; the posteriors are the network's targets."""
        counts = confusion_counts(rows.double(), crowd, self.num_annotators)
        confusion = normalize_rows(counts + self.pseudo_count)
        change = relative_change(confusion, self.log_confusion.double().exp())
        self.log_confusion.copy_(confusion.clamp_min(torch.finfo(torch.float32).tiny).log())
        self.targets.copy_(rows)
        return change

    def log_prior(self) -> Tensor:
        """Of the matrices, up to a constant."""
        return self.pseudo_count * self.log_confusion.double().sum()

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log C[annotator, k, label]``, ``(A, K)``."""
        return self.log_confusion[batch.annotator, :, batch.label]

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy against the last E-step's posteriors, summed over labelled items, over ``len(batch)``."""
        targets = self.targets[batch.items] * batch.labelled[:, None]
        return -(targets * self(features)).sum() / len(batch)

    def annotators(self) -> dict[str, Tensor]:
        """Each annotator's ``confusion``, ``(R, K, K)``."""
        return {"confusion": self.log_confusion.exp()}
