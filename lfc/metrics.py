"""Scores of a split under the names of the run folder; torchmetrics counts and sums over processes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassCalibrationError, MulticlassF1Score

from lfc.batch import CrowdBatch
from lfc.functional import matrix_divergence

SMALL = 1e-5
"""Added to both distributions of the Kullback-Leibler divergence, as the label-distribution literature does."""


class Scores(nn.Module):
    """What is measured on a split: against gold, against held-out annotations, against label distributions.

    Every process computes every score, and one that nothing was counted for is left out, on all processes alike.

    Args:
        num_classes: ``K``.
        full: Whether to add what is only worth its time in a final test: F1, calibration, distances of distributions.
    """

    def __init__(self, num_classes: int, full: bool = False) -> None:
        super().__init__()
        self.golds, self.annotations, self.distributions = SumMetric(), SumMetric(), SumMetric()
        metrics: dict[str, Metric | MetricCollection] = {"acc": MulticlassAccuracy(num_classes, average="micro")}
        if full:
            metrics |= {
                "f1": MulticlassF1Score(num_classes, average="macro"),
                "ece": MulticlassCalibrationError(num_classes),
            }
        # torchmetrics would merge the states of look-alikes in the first update, which differs between processes
        self.against_gold = MetricCollection(metrics, compute_groups=False)
        self.nll, self.annotation_nll = MeanMetric(), MeanMetric()
        self.kl, self.manhattan = MeanMetric(), MeanMetric()
        self.full = full

    def update(self, log_probs: Tensor, batch: CrowdBatch) -> None:
        """Count predictions ``log p (B, K)`` against gold and, in a full test, against human distributions."""
        if batch.gold is not None:
            known = batch.gold >= 0
            if known.any():
                gold, log_p = batch.gold[known], log_probs[known]
                self.golds.update(known.sum())
                self.against_gold.update(log_p.exp(), gold)
                self.nll.update(-log_p.gather(-1, gold[:, None]).squeeze(-1))
        if self.full:
            human = batch.soft if batch.soft is not None else batch.votes(log_probs.shape[-1])
            known = human.sum(-1) > 0
            if known.any():
                y = human[known] / human[known].sum(-1, keepdim=True)
                h = log_probs[known].exp()
                self.distributions.update(known.sum())
                self.kl.update(((y + SMALL) * ((y + SMALL) / (h + SMALL)).log()).sum(-1))
                self.manhattan.update((y - h).abs().sum(-1))

    def update_annotations(self, log_prob: Tensor) -> None:
        """Count the log-probabilities ``(A,)`` of annotations that were held out."""
        if len(log_prob):
            self.annotations.update(torch.tensor(len(log_prob), device=log_prob.device))
            self.annotation_nll.update(-log_prob)

    def compute(self, prefix: str) -> dict[str, Tensor]:
        """The scores counted since the last :meth:`reset`, named ``prefix/score``."""
        scores: dict[str, Tensor] = {}
        if self.golds.compute() > 0:
            scores |= {**self.against_gold.compute(), "nll": self.nll.compute()}
        if self.annotations.compute() > 0:
            scores["annotation_nll"] = self.annotation_nll.compute()
        if self.full and self.distributions.compute() > 0:
            scores |= {"kl": self.kl.compute(), "manhattan": self.manhattan.compute()}
        return {f"{prefix}/{name}": value for name, value in scores.items()}

    def reset(self) -> None:
        """Forget what was counted."""
        for metric in self.children():
            metric.reset()  # type: ignore[operator]


def label_scores(posterior: Tensor, gold: Tensor, majority: Tensor) -> dict[str, Tensor]:
    """How often the inferred labels ``(n, K)`` are right, and how often the majority vote ``(n,)``.

    >>> posterior, majority = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])
    >>> label_scores(posterior, torch.tensor([0, 1]), majority)
    {'labels/acc': tensor(1.), 'labels/majority_acc': tensor(0.5000)}
    """
    known = gold >= 0
    if not known.any():
        return {}
    right = {"labels/acc": posterior.argmax(-1) == gold, "labels/majority_acc": majority == gold}
    return {name: values[known].float().mean() for name, values in right.items()}


def annotator_scores(
    confusion: Tensor, overall: Tensor, true_confusion: Tensor, true_overall: Tensor, active: Tensor
) -> dict[str, Tensor]:
    """Divergence in bits of the estimated from the true matrices: mean over annotators, and of the crowd as a whole.

    Args:
        confusion: ``(R, K, K)`` estimated; an expanded ``(1, K, K)`` where all are taken to be alike.
        overall: ``(K, K)`` estimated for the crowd as a whole.
        true_confusion: ``(R, K, K)``.
        true_overall: ``(K, K)``.
        active: ``(R,)`` whether the annotator gave any label to learn from.
    """
    return {
        "annotators/i_js": matrix_divergence(confusion[active], true_confusion[active]).mean(),
        "annotators/g_js": matrix_divergence(overall, true_overall),
    }


def wrong_label_auroc(trust: Tensor, wrong: Tensor) -> Mapping[str, Tensor]:
    """How well ``1 - trust (A,)`` finds the labels that are wrong ``(A,)``: area under the ROC curve."""
    if wrong.all() or not wrong.any():
        return {}
    return {"annotators/auroc": BinaryAUROC()(1 - trust, wrong.long())}
