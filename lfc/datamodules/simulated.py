"""Crowds simulated on data that need no download: the truth about items and annotators is known."""

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lfc.annotations import SPLITS, Annotations, Crowd
from lfc.datamodules.base import CrowdDataModule
from lfc.errors import UserError

Source = Literal["gaussians", "digits"]
Kind = Literal["groups", "mixed", "uniform"]

CENTRES = np.array([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0]])
"""Of the three Gaussians, as in the authors' code; the paper prints others."""
SIGMA = 0.4
GROUP_SHARES = (0.25, 0.55, 0.20)
GROUPS = np.array(
    [
        [[0.80952, 0.09524, 0.09524], [0, 0.89474, 0.10526], [0.40299, 0.12127, 0.47575]],
        [[0.60714, 0, 0.39286], [0.09125, 0.42395, 0.48479], [0.10526, 0, 0.89474]],
        [[0.89474, 0, 0.10526], [0.08602, 0, 0.91398], [0.74128, 0, 0.25872]],
    ]
)
"""Confusion matrices of the three groups, true row and given column; five digits, so rows are normalised."""
ORDINARY, SPAMMER, ADVERSARY = 0, 1, 2


class SimulatedDataModule(CrowdDataModule):
    """A simulated crowd that labels Gaussians or small images of digits.

    The defaults are Setup (1) of the Crowd Mixture Model's paper: three Gaussians, and annotators of three groups of
    behaviour. Each annotator labels each training item independently with probability ``labels_per_item /
    num_annotators``; an item nobody drew gets one annotator at random, and annotators who drew nothing are left out.
    Validation and test items have no annotations, and every item has its gold label.

    >>> data = SimulatedDataModule(num_items=300, num_annotators=20)
    >>> data.num_items, data.num_annotators, data.num_classes, data.in_features
    (300, 20, 3, 2)
    >>> data.table.annotators[:2], data.table.items[0], tuple(data.table.confusion.shape)
    (['a00000', 'a00001'], 'train_00000', (20, 3, 3))

    Args:
        source: The items: three two-dimensional ``gaussians``, or the ``digits`` that come with scikit-learn, 1797 real
            images of 8 x 8 pixels, split 60/20/20.
        num_items: Training items; ``null`` takes 2457 Gaussian points, or all 1078 training digits.
        crowd: How annotators err. ``groups``: each belongs to one of three groups with a confusion matrix each (three
            classes only); ``mixed``: each has an accuracy between .4 and .95 and errors of their own, beside spammers
            and adversaries; ``uniform``: all have the same accuracy and err evenly. ``null`` takes ``groups`` for
            gaussians and ``mixed`` for digits.
        accuracy: Accuracy of every annotator of a ``uniform`` crowd.
        spammers: Share of annotators of a ``mixed`` crowd who answer at random.
        adversaries: Share of annotators of a ``mixed`` crowd who are right one time in ten.
        num_annotators: Annotators to draw from.
        labels_per_item: Mean number of labels of a training item.
        seed: Of the simulation. Items depend on it and their number alone, so crowds can be compared on the same items.
        loading: Batches and what is held out, see :class:`lfc.datamodules.CrowdDataModule`.
    """

    groups: Tensor
    """``(R,)`` true group of each annotator: of ``groups``, which of the three; of ``mixed``, 0 ordinary, 1 spammer, 2
    adversary; of ``uniform``, 0."""

    def __init__(
        self,
        source: Source = "gaussians",
        num_items: int | None = None,
        crowd: Kind | None = None,
        accuracy: float = 0.8,
        spammers: float = 0.1,
        adversaries: float = 0.0,
        num_annotators: int = 100,
        labels_per_item: float = 5.0,
        seed: int = 0,
        **loading: Any,
    ) -> None:
        if source not in get_args(Source):
            raise UserError(f"--data.source={source}: one of {', '.join(get_args(Source))}")
        kind = crowd or ("groups" if source == "gaussians" else "mixed")
        if kind not in get_args(Kind):
            raise UserError(f"--data.crowd={crowd}: one of {', '.join(get_args(Kind))}, or null")
        if source == "digits" and kind == "groups":
            raise UserError("--data.crowd=groups: its matrices have 3 classes and digits has 10; take mixed or uniform")
        if num_items is not None and num_items < 1:
            raise UserError(f"--data.num_items={num_items}: at least one training item, or null")
        for name, share in {"accuracy": accuracy, "spammers": spammers, "adversaries": adversaries}.items():
            if not 0 <= share <= 1:
                raise UserError(f"--data.{name}={share}: a share from 0 to 1")
        if spammers + adversaries > 1 + 1e-9:
            raise UserError(f"--data.spammers={spammers} and --data.adversaries={adversaries}: together at most 1")
        if num_annotators < 1:
            raise UserError(f"--data.num_annotators={num_annotators}: at least one annotator")
        if not 0 < labels_per_item <= num_annotators:
            raise UserError(
                f"--data.labels_per_item={labels_per_item}: above 0 and at most --data.num_annotators={num_annotators}"
            )
        if seed < 0:
            raise UserError(f"--data.seed={seed}: 0 or above")

        draw_items, draw_pairs, draw_answers = np.random.default_rng(seed).spawn(3)
        parts = _gaussians(draw_items, num_items) if source == "gaussians" else _digits(draw_items, num_items)
        sizes = [len(gold) for _, gold in parts]
        gold = np.concatenate([gold for _, gold in parts])
        item, drawn = _pairs(draw_pairs, sizes[0], num_annotators, labels_per_item)
        used, annotator = np.unique(drawn, return_inverse=True)
        num_classes = 3 if source == "gaussians" else 10
        groups, confusion = _annotators(kind, draw_answers, len(used), num_classes, accuracy, spammers, adversaries)
        label = _answers(draw_answers, confusion, annotator, gold[item])
        said = [torch.from_numpy(column) for column in (item, annotator, label)]

        table = Crowd(
            items=[name for split, n in zip(SPLITS, sizes, strict=True) for name in _names(f"{split}_", range(n))],
            annotators=_names("a", used.tolist(), below=num_annotators),
            classes=[str(k) for k in range(num_classes)],
            annotations=Annotations.from_long(said[0], said[1], said[2], num_items=len(gold)),
            split=torch.repeat_interleave(torch.tensor(sizes)),
            gold=torch.from_numpy(gold),
            name=source,
            confusion=torch.from_numpy(confusion).float(),
        )
        super().__init__(crowd=table, **loading)
        self.groups = torch.from_numpy(groups)
        self.features = torch.from_numpy(np.concatenate([inputs for inputs, _ in parts])).float()
        self.in_features = self.features.shape[1]

    def load_inputs(self) -> Tensor:
        """All points or pixels, ``(items, D)``."""
        return self.features


Pair = tuple[np.ndarray, np.ndarray]


def _gaussians(rng: np.random.Generator, num_items: int | None) -> list[Pair]:
    """Inputs ``(n, D)`` and gold ``(n,)`` of train, valid and test."""

    def part(size: int) -> Pair:
        gold = rng.permutation(np.arange(size) % len(CENTRES))
        return CENTRES[gold] + SIGMA * rng.standard_normal((size, 2)), gold

    valid, test = part(819), part(819)  # first, so that they do not depend on the size of the training set
    return [part(2457 if num_items is None else num_items), valid, test]


def _digits(rng: np.random.Generator, num_items: int | None) -> list[Pair]:
    """The same of digits."""
    from sklearn.datasets import load_digits  # here: slow to import

    inputs, gold = load_digits(return_X_y=True)
    order = rng.permutation(len(gold))
    train, valid, test = np.split(order, [round(0.6 * len(gold)), round(0.8 * len(gold))])
    if num_items is not None and num_items > len(train):
        raise UserError(f"--data.num_items={num_items}: digits has {len(train)} training items; ask for fewer, or null")
    return [(inputs[rows] / 16, gold[rows].astype(np.int64)) for rows in (train[:num_items], valid, test)]


def _pairs(rng: np.random.Generator, items: int, annotators: int, labels_per_item: float) -> Pair:
    """Who labels what: every pair with the same probability, without visiting every pair; sorted by item."""
    counts = np.maximum(rng.binomial(annotators, labels_per_item / annotators, size=items), 1)  # (N,)
    most = counts > annotators / 2  # there draw who does not label: a redraw then succeeds every other time or oftener
    wanted = np.where(most, annotators - counts, counts)
    pairs = np.empty(0, dtype=np.int64)  # item * annotators + annotator
    while (missing := wanted - np.bincount(pairs // annotators, minlength=items)).any():
        item = np.repeat(np.arange(items), missing)
        new = np.sort(item * annotators + rng.integers(annotators, size=len(item)))
        pairs = np.sort(np.concatenate([pairs, new]), kind="stable")  # a merge: both are sorted
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # repeats fall away
    everyone = most.nonzero()[0][:, None] * annotators + np.arange(annotators)
    pairs = np.setxor1d(pairs, everyone.ravel(), assume_unique=True)
    return pairs // annotators, pairs % annotators


def _annotators(
    kind: Kind, rng: np.random.Generator, size: int, classes: int, accuracy: float, spammers: float, adversaries: float
) -> Pair:
    """Groups ``(R,)`` and confusion matrices ``(R, K, K)``."""
    if kind == "groups":
        group = rng.choice(len(GROUPS), size=size, p=GROUP_SHARES)
        return group, (GROUPS / GROUPS.sum(-1, keepdims=True))[group]
    if kind == "mixed":
        group = rng.choice(3, size=size, p=[max(1 - spammers - adversaries, 0), spammers, adversaries])
        right = np.where(group == ADVERSARY, 0.1, rng.uniform(0.4, 0.95, size=size))
        errors = rng.dirichlet(np.ones(classes - 1), size=(size, classes))
    else:
        group = np.zeros(size, dtype=np.int64)
        right = np.full(size, accuracy)
        errors = np.full((size, classes, classes - 1), 1 / (classes - 1))
    diagonal = np.eye(classes, dtype=bool)
    confusion = np.empty((size, classes, classes))
    confusion[:, diagonal] = right[:, None]
    confusion[:, ~diagonal] = ((1 - right)[:, None, None] * errors).reshape(size, -1)
    if kind == "mixed":
        confusion[group == SPAMMER] = 1 / classes
    return group, confusion


def _answers(rng: np.random.Generator, confusion: np.ndarray, annotator: np.ndarray, gold: np.ndarray) -> np.ndarray:
    """A class for each annotation, drawn from its annotator's row for the true class."""
    below = confusion.cumsum(-1)[annotator, gold, :-1]  # (A, K - 1)
    return (rng.random((len(gold), 1)) >= below).sum(-1)


def _names(prefix: str, numbers: range | list[int], below: int | None = None) -> list[str]:
    width = max(5, len(str((len(numbers) if below is None else below) - 1)))  # sorted as text they stay in order
    return [f"{prefix}{number:0{width}d}" for number in numbers]


__all__ = ["SimulatedDataModule"]
