"""Crowd layer: a map of each annotator's own on top of a shared classifier."""

from typing import Literal

import torch
from torch import Tensor

from lfc.batch import CrowdBatch
from lfc.heads.base import AnnotatorTable, Head, gather_rows

CERTAIN = 0.99
"""Confidence at which the confusion of a log-probability layer is read off."""


class CrowdLayer(Head):
    """Crowd layer of Rodrigues & Pereira, *Deep Learning from Crowds*, AAAI 2018.

    Each annotator ``r`` turns the network's output ``p`` into logits ``z`` of what they will say, and cross-entropy on
    the annotations trains both. It is a likelihood per annotation, but not a mixture over true classes: the layer
    applies a softmax to a map of a softmax, so the identity does not give plain cross-entropy, and no annotation can
    at first have a probability above ``e / (e + K - 1)``. With many classes or badly scaled features that is slow to
    outgrow; ``input=log_prob`` has no such bound.

    Args:
        kind: The map: ``MW`` a matrix ``W_r p``, ``VW`` a weight a class ``w_r * p``, ``VB`` a bias a class
            ``p + b_r``, ``VW+B`` both, ``SW`` one weight ``s_r p``. All start at the identity.
        input: What the map reads: ``prob``, as published, or ``log_prob``, whose identity is plain cross-entropy.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    def __init__(
        self,
        kind: Literal["MW", "VW", "VB", "VW+B", "SW"] = "MW",
        input: Literal["prob", "log_prob"] = "prob",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.kind, self.input = kind, input
        classes = self.num_classes
        weight = {"MW": torch.eye(classes), "VW": torch.ones(classes), "VW+B": torch.ones(classes), "SW": torch.ones(1)}
        self.weight = AnnotatorTable(weight[kind], self.num_annotators) if kind in weight else None
        self.bias = AnnotatorTable(torch.zeros(classes), self.num_annotators) if "B" in kind else None

    def annotation_log_prob(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log softmax(z)`` at the label given, ``(A,)``."""
        z = self._map(self._input(self(features)).index_select(0, batch.row), batch.annotator)  # (A, K)
        return z.log_softmax(-1).gather(-1, batch.label[:, None]).squeeze(-1)

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy summed over annotations, over ``len(batch)``."""
        return -self.annotation_log_prob(features, batch).sum() / len(batch)

    def annotators(self) -> dict[str, Tensor]:
        """The confusion that the maps imply, ``(R, K, K)``: what each annotator says of a class the network is sure of.

        The weights themselves are no confusion matrices: they may be negative, and their shift is free.
        """
        classes, device = self.num_classes, self.classifier.weight.device
        sure = torch.eye(classes, device=device)
        if self.input == "log_prob":  # the logarithm of a certain prediction is not finite
            rest = (1 - CERTAIN) / max(classes - 1, 1)
            sure = (sure * (CERTAIN - rest) + rest).log()
        everyone = torch.arange(self.num_annotators, device=device)
        with torch.no_grad():
            rows = [self._map(row.expand(len(everyone), -1), everyone).softmax(-1) for row in sure]
        return {"confusion": torch.stack(rows, 1)}

    def _input(self, log_t: Tensor) -> Tensor:
        return log_t.exp() if self.input == "prob" else log_t

    def _map(self, p: Tensor, annotator: Tensor) -> Tensor:
        """``z`` of each annotation, ``(A, K)``; ``W`` has the class said in its rows, the true class in its columns."""
        z = p
        if self.weight is not None:
            rows, inverse = gather_rows(self.weight, annotator)
            weight = rows.index_select(0, inverse)
            z = (weight * p[:, None]).sum(-1) if self.kind == "MW" else weight * p
        if self.bias is not None:
            rows, inverse = gather_rows(self.bias, annotator)
            z = z + rows.index_select(0, inverse)
        return z
