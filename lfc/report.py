"""What a trained model says of the annotated items and of the annotators."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lfc.annotations import TRAIN, Crowd
from lfc.batch import CrowdBatch
from lfc.datamodules.base import CrowdDataModule
from lfc.functional import confusion_counts, normalize_rows
from lfc.heads.base import ConfusionHead, Head
from lfc.heads.majority import vote_distribution
from lfc.metrics import annotator_scores, label_scores, wrong_label_auroc

LARGEST = 500_000_000
"""Numbers in a crowd's matrices beyond which they are not compared with gold."""


class Findings:
    """What was inferred of a crowd's annotated items and of its annotators, with its scores and tables.

    Args:
        crowd: Who said what.
        index: ``(n,)`` which of its items are annotated.
        posterior: ``(n, K)`` probabilities of their inferred labels.
        known: What is known of each annotator, by name, ``R`` rows each; see :meth:`lfc.heads.Head.annotators`.
    """

    def __init__(self, crowd: Crowd, index: Tensor, posterior: Tensor, known: dict[str, Tensor]) -> None:
        self.crowd, self.index, self.posterior, self.known = crowd, index, posterior, known
        table, self.gold = crowd.annotations.select(index), crowd.gold[index]
        self.batch = CrowdBatch(None, torch.arange(len(table)), table.item, table.annotator, table.label)
        self.votes = self.batch.votes(posterior.shape[-1])
        self.majority = vote_distribution(self.votes, "hard").argmax(-1)
        self.labels = torch.bincount(table.annotator, minlength=len(crowd.annotators))
        """``(R,)`` how many labels each annotator gave."""
        self._train = crowd.split[index] == TRAIN
        self.active = torch.zeros(len(self.labels), dtype=torch.bool)
        """``(R,)`` whether an annotator gave a label that was learned from."""
        self.active[table.annotator[self._train[table.item]]] = True

    # the annotators

    @property
    def trust(self) -> Tensor:
        """``(A,)`` probability that each annotation is right."""
        return self.posterior[self.batch.row, self.batch.label]

    def _per_annotator(self, value: Tensor, among: Tensor) -> Tensor:
        """``(R,)`` mean of ``value (A,)`` over each annotator's annotations ``among (A,)``; NaN where there is none."""
        annotator, size = self.batch.annotator[among], len(self.labels)
        sums = torch.bincount(annotator, value[among].double(), minlength=size)
        return sums / torch.bincount(annotator, minlength=size)

    @property
    def accuracy(self) -> Tensor:
        """``(R,)`` share of each annotator's labels that are right as inferred; NaN for one never learned from."""
        everything = torch.ones_like(self.batch.row, dtype=torch.bool)
        return self._per_annotator(self.trust, everything).where(self.active, torch.nan)

    @property
    def gold_accuracy(self) -> Tensor:
        """``(R,)`` share of each annotator's labels that agree with gold, where it is known."""
        gold = self.gold[self.batch.row]
        return self._per_annotator(gold == self.batch.label, gold >= 0)

    def overall(self, posterior: Tensor, among: Tensor | None = None) -> Tensor:
        """``(K, K)`` what the crowd as a whole says of each class, given what the items ``among (n,)`` are."""
        weight = posterior if among is None else posterior * among[:, None]
        crowd = CrowdBatch(None, self.batch.items, self.batch.row, torch.zeros_like(self.batch.row), self.batch.label)
        return normalize_rows(confusion_counts(weight, crowd, 1)[0])

    # scores

    def scores(self) -> dict[str, Tensor]:
        """``labels/*`` and ``annotators/*``, as far as gold is known."""
        known = self.gold >= 0
        if not known.any():
            return {}
        on_known = known[self.batch.row]
        wrong = self.gold[self.batch.row] != self.batch.label
        return {
            **label_scores(self.posterior, self.gold, self.majority),
            **self._matrix_scores(known & self._train),
            **wrong_label_auroc(self.trust[on_known], wrong[on_known]),
        }

    def _matrix_scores(self, among: Tensor) -> dict[str, Tensor]:
        """Divergence from the matrices that gold, or the simulator, says are true."""
        classes, annotators = self.posterior.shape[-1], len(self.labels)
        if not among.any() or annotators * classes**2 > LARGEST:
            return {}
        truth = torch.nn.functional.one_hot(self.gold.clamp_min(0), classes).float() * among[:, None]
        exact = self.crowd.confusion
        true = normalize_rows(confusion_counts(truth, self.batch, annotators)) if exact is None else exact
        if "confusion" in self.known:
            confusion = self.known["confusion"]
            overall = confusion[self.active].mean(0)
        else:  # all annotators are taken to be alike
            overall = self.overall(self.posterior, self._train)
            confusion = overall.expand(annotators, -1, -1)
        return annotator_scores(confusion, overall, true.float(), self.overall(truth), self.active)

    # tables

    def label_rows(self) -> Iterator[list[Any]]:
        """Header and rows of ``labels.csv``: every annotated item."""
        yield ["item", "label", "confidence", *(f"p_{name}" for name in self.crowd.classes), "majority", "gold"]
        index = self.index.tolist()
        rows = zip(index, self.posterior.tolist(), self.majority.tolist(), self.gold.tolist(), strict=True)
        for item, p, majority, gold in rows:
            yield [self.crowd.items[item], *self._probabilities(p), self._name(majority), self._name(gold)]

    def annotator_rows(self, pseudonyms: bool = False) -> Iterator[list[Any]]:
        """Header and rows of ``annotators.csv``: every annotator, by their own id or by a number."""
        vectors = {name: value.tolist() for name, value in self.known.items() if value.dim() == 1}
        yield ["annotator", "labels", "accuracy", "gold_accuracy", *vectors]
        columns = (self.labels.tolist(), self.accuracy.tolist(), self.gold_accuracy.tolist())
        for r, (labels, accuracy, gold_accuracy) in enumerate(zip(*columns, strict=True)):
            name = f"annotator-{r:05d}" if pseudonyms else self.crowd.annotators[r]
            learned = [_short(vector[r]) if self.active[r] else "" for vector in vectors.values()]
            yield [name, labels, _short(accuracy), _short(gold_accuracy), *learned]

    def _name(self, code: int) -> str:
        return self.crowd.classes[code] if code >= 0 else ""

    def _probabilities(self, p: list[float]) -> list[Any]:
        return probability_cells(self.crowd.classes, p)


class Report(Findings):
    """Gathers, in one pass over the data, what a run folder holds: predictions, inferred labels, annotators.

    Args:
        data: The crowd.
        head: The trained head.
        device: Where to gather.
    """

    def __init__(self, data: CrowdDataModule, head: Head, device: torch.device) -> None:
        self.data, classes = data, head.num_classes
        self.predictions = torch.zeros(len(data.datasets["test"]), classes, device=device)
        """``(test items, K)`` probabilities."""
        self.posterior = torch.zeros(len(data.datasets["annotated"]), classes, device=device)
        self.known = {name: value.cpu() for name, value in head.annotators().items()}
        self._sums: Tensor | None = None
        if "confusion" not in self.known and isinstance(head, ConfusionHead):
            self._sums = torch.zeros(head.num_annotators, classes, classes, device=device)

    def update(self, head: Head, features: Tensor, batch: CrowdBatch) -> None:
        """Add a batch of annotated items."""
        self.posterior[batch.items] = head.posterior(features, batch)
        if self._sums is not None:  # matrices that differ from item to item: their mean over those the annotator saw
            assert isinstance(head, ConfusionHead)
            said = batch.label
            for label in range(head.num_classes):
                batch.label = torch.full_like(said, label)
                self._sums[:, :, label].index_add_(0, batch.annotator, head.log_obs(features, batch).exp())
            batch.label = said

    def reduce(self, reduce: Callable[[Tensor, str], Tensor]) -> None:
        """Complete the tables over all ranks; an item that two of them saw is like any other."""
        self.predictions, posterior = (reduce(t, "max").cpu() for t in (self.predictions, self.posterior))
        if self._sums is not None:
            self.known["confusion"] = normalize_rows(reduce(self._sums, "sum").cpu())
        super().__init__(self.data.table, self.data.datasets["annotated"].index, posterior, self.known)

    def prediction_rows(self) -> Iterator[list[Any]]:
        """Header and rows of ``predictions.csv``: every test item."""
        return prediction_rows(self.data, "test", self.predictions)


def prediction_rows(data: CrowdDataModule, split: str, probabilities: Tensor) -> Iterator[list[Any]]:
    """Header and rows of ``predictions.csv``: an item each, with ``p(class | input)``."""
    yield ["item", "label", "confidence", *(f"p_{name}" for name in data.classes), "gold"]
    dataset = data.datasets[split]
    assert dataset.gold is not None
    for item, p, gold in zip(dataset.index.tolist(), probabilities.tolist(), dataset.gold.tolist(), strict=True):
        yield [data.table.items[item], *probability_cells(data.classes, p), data.classes[gold] if gold >= 0 else ""]


def probability_cells(classes: list[str], p: list[float]) -> list[Any]:
    """The likeliest class, its probability, and that of every class."""
    best = max(range(len(p)), key=p.__getitem__)
    return [classes[best], _short(p[best]), *map(_short, p)]


def _short(value: float) -> str | int:
    """Six digits say all there is; nothing at all for a NaN."""
    return "" if value != value else value if isinstance(value, int) else f"{value:.6g}"
