"""Two stages: infer the labels first, then train on them."""

from typing import Literal

import torch
from torch import Tensor

from lfc.aggregation import Aggregator, DawidSkene, Votes
from lfc.batch import CrowdBatch
from lfc.functional import confusion_counts, normalize_rows
from lfc.heads.base import ConfusionHead


class TwoStage(ConfusionHead):
    """Cross-entropy on labels that an aggregator inferred from the annotations alone, before training.

    With ``DawidSkene`` it is known as DL-DS. The annotators' matrices are the aggregator's, or the counts of what each
    said against the inferred labels. For held-out annotations network and matrices are put together.

    Args:
        aggregator: How the labels are inferred: ``DawidSkene``, the default, ``GLAD``, ``MMCE``, ``MajorityVote``, or
            any other :class:`lfc.aggregation.Aggregator`, each with options of its own.
        kind: ``soft`` trains on the inferred probabilities, ``hard`` on the likeliest class.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    targets: Tensor
    log_confusion: Tensor

    def __init__(
        self, aggregator: Aggregator | None = None, kind: Literal["soft", "hard"] = "soft", **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.aggregator, self.kind = aggregator or DawidSkene(), kind
        classes = self.num_classes
        self.register_buffer("targets", torch.full((self.num_items, classes), 1 / classes))
        self.register_buffer("log_confusion", torch.zeros(self.num_annotators, classes, classes).log_softmax(-1))

    def prepare(self, crowd: CrowdBatch) -> None:
        """The first stage."""
        result = self.aggregator.fit(Votes.from_batch(crowd, self.num_classes, self.num_annotators))
        targets = result.posterior.to(self.targets)
        if self.kind == "hard":
            targets = torch.zeros_like(targets).scatter_(1, result.label.clamp_min(0).to(targets.device)[:, None], 1.0)
        self.targets.copy_(targets)
        confusion = result.annotators.get("confusion")
        if confusion is None:
            confusion = normalize_rows(confusion_counts(result.posterior, crowd.to("cpu"), self.num_annotators))
        self.log_confusion.copy_(confusion.clamp_min(torch.finfo(torch.float32).tiny).log())

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log C[annotator, k, label]``, ``(A, K)``."""
        return self.log_confusion[batch.annotator, :, batch.label]

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy against the inferred labels, summed over labelled items, over ``len(batch)``."""
        targets = self.targets[batch.items] * batch.labelled[:, None]
        return -(targets * self(features)).sum() / len(batch)

    def posterior(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """What the aggregator inferred of a training item; the network's opinion of any other."""
        network = self(features).exp()
        if batch.train is None:
            return network
        inferred = (batch.train >= 0) & batch.labelled
        return torch.where(inferred[:, None], self.targets[batch.train.clamp_min(0)], network)

    def annotators(self) -> dict[str, Tensor]:
        """Each annotator's ``confusion``, ``(R, K, K)``."""
        return {"confusion": self.log_confusion.exp()}
