"""SpeeLFC and SpeeLFC-D: end-to-end learning with a real transition matrix for each annotator."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lfc.batch import CrowdBatch
from lfc.heads.base import AnnotatorTable, ConfusionHead, gather_rows, pick


class SpeeLFC(ConfusionHead):
    """SpeeLFC of Chen et al., *Structured Probabilistic End-to-End Learning from Crowds*, IJCAI 2020.

    Each annotator has a confusion matrix, the same for every item; it is the row-wise softmax of free parameters, and
    one optimiser fits it together with the network. Maximises the likelihood per annotation.

    Args:
        diagonal: Initial value of a matrix's diagonal before the softmax; the other entries are 1. The paper's 1.4 for
            two classes makes .60 of an annotator's labels right at first, its 4.7 for ten classes .82; ``None`` takes
            whatever makes it .8 for the number of classes at hand.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    def __init__(self, diagonal: float | None = None, **sizes: int) -> None:
        super().__init__(**sizes)
        classes = self.num_classes
        # softmax(d, 1, ..., 1)[0] = .8  <=>  d = 1 + log(.8 / .2 * (K - 1))
        start = 1 + math.log(4 * (classes - 1)) if diagonal is None else diagonal
        self.ancestral = AnnotatorTable(torch.ones(classes, classes).fill_diagonal_(start), self.num_annotators)

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log C[annotator, k, label]``, ``(A, K)``."""
        rows, inverse = gather_rows(self.ancestral, batch.annotator)  # (U, K, K)
        return pick(rows.log_softmax(-1), inverse, batch.label)

    def annotators(self) -> dict[str, Tensor]:
        """Each annotator's ``confusion``, ``(R, K, K)``."""
        return {"confusion": self.ancestral.table.softmax(-1)}


class SpeeLFCD(ConfusionHead):
    """SpeeLFC-D of Chen et al., *Structured Probabilistic End-to-End Learning from Crowds*, IJCAI 2020.

    An annotator ``r`` is right on item ``i`` with probability ``s = sigmoid(ability_r * easiness_i)`` and otherwise
    says any other class, each alike. The easiness is a network's, on the same features as the classifier, so that in
    a hard item nobody is believed much; a negative ability is that of an annotator who is mostly wrong. Maximises the
    likelihood per annotation, in log space: the easiness reaches 100, where a plain sigmoid is 1 to rounding.

    The paper's easiness network reads the raw input; here it reads the backbone's output, which is the same thing
    where the backbone is linear, and otherwise saves a second backbone.

    Args:
        ability: Every annotator's ability at first; the paper's .028 makes .80 of the labels right at easiness 50.
        hidden: Width of the easiness network's hidden layer.
        dropout: Dropout in the easiness network.
        smallest: Least easiness there is, the paper's lambda 1.
        range: How far the easiness can rise above that, the paper's lambda 2.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    def __init__(
        self,
        ability: float = 0.028,
        hidden: int = 32,
        dropout: float = 0.5,
        smallest: float = 0.001,
        range: float = 100.0,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.smallest, self.range = smallest, range
        self.ability = AnnotatorTable(torch.full((1,), ability), self.num_annotators)
        self.easiness_net = nn.Sequential(
            nn.Linear(self.in_features, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1)
        )
        for layer in self.easiness_net:
            if isinstance(layer, nn.Linear):  # so that an item's easiness is about half the range at first
                nn.init.zeros_(layer.bias)

    def easiness(self, features: Tensor) -> Tensor:
        """How easy each item is, ``(B,)``, from ``smallest`` to ``smallest + range``."""
        return self.smallest + self.range * self.easiness_net(features).squeeze(-1).sigmoid()

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log s`` where the class is the label given, ``log((1 - s) / (K - 1))`` elsewhere, ``(A, K)``."""
        x = self.ability(batch.annotator) * self.easiness(features)[batch.row, None]  # (A, 1), the logit of s
        right = F.one_hot(batch.label, self.num_classes).bool()
        return torch.where(right, F.logsigmoid(x), F.logsigmoid(-x) - math.log(self.num_classes - 1))

    def annotators(self) -> dict[str, Tensor]:
        """Each annotator's ``ability``, ``(R,)``."""
        return {"ability": self.ability.table.squeeze(-1)}
