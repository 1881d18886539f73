"""What an aggregator is: annotations in, the class of each item and the quality of each annotator out.

Axes: ``N`` items, ``A`` annotations, ``R`` annotators, ``K`` classes. Every confusion matrix has the true class in its
rows and the class said in its columns. Statistics are in float64, and time and memory grow with ``A``, ``N`` and ``R``,
never with ``N`` x ``R``.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from scipy import sparse  # type: ignore[import-untyped]
from torch import Tensor

from lfc.annotations import Crowd
from lfc.batch import CrowdBatch
from lfc.errors import UserError

Criterion = Literal["likelihood", "majority"]


@dataclass(frozen=True)
class Votes:
    """Who said what of which item, ready to be summed by item and by annotator.

    >>> votes = Votes(
    ...     item=torch.tensor([1, 0, 1]),
    ...     annotator=torch.tensor([0, 0, 1]),
    ...     label=torch.tensor([2, 0, 2]),
    ...     num_items=3,
    ...     num_annotators=2,
    ...     num_classes=3,
    ... )
    >>> votes.tally.tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    """

    item: Tensor
    """``(A,)`` in ``[0, num_items)``."""
    annotator: Tensor
    """``(A,)`` in ``[0, num_annotators)``."""
    label: Tensor
    """``(A,)`` the class said, in ``[0, num_classes)``; a pair that comes twice is two votes."""
    num_items: int
    num_annotators: int
    num_classes: int

    def __post_init__(self) -> None:
        sizes = {"item": self.num_items, "annotator": self.num_annotators, "label": self.num_classes}
        for name, size in sizes.items():
            values = getattr(self, name)
            if values.shape != (len(self.item),) or values.dtype != torch.long:
                found = f"{values.dtype} {tuple(values.shape)}"
                raise UserError(f"votes: {name} is {found}; give int64 tensors of one length")
            low, high = values.aminmax() if len(values) else (0, 0)
            if len(values) and (low < 0 or high >= size):
                span = f"{low} to {high} where [0, {size})"
                raise UserError(f"votes: {name} goes from {span} was wanted; number them from 0")

    @classmethod
    def from_crowd(cls, crowd: Crowd) -> "Votes":
        """The annotations of every item of a crowd, whatever its split; item ``i`` is ``crowd.items[i]``."""
        table = crowd.annotations
        return cls(table.item, table.annotator, table.label, len(table), len(crowd.annotators), len(crowd.classes))

    @classmethod
    def from_batch(cls, batch: CrowdBatch, num_classes: int, num_annotators: int) -> "Votes":
        """The annotations of a batch; item ``i`` is its row ``i``."""
        row, annotator, label = batch.row.cpu(), batch.annotator.cpu(), batch.label.cpu()
        return cls(row, annotator, label, len(batch), num_annotators, num_classes)

    def __len__(self) -> int:
        """Number of annotations."""
        return len(self.label)

    @cached_property
    def tally(self) -> Tensor:
        """``(N, K)`` how often each item was given each class, float64."""
        size = self.num_items * self.num_classes
        return torch.bincount(self._cell(self.item, size), self._ones, size).view(-1, self.num_classes)

    @cached_property
    def labelled(self) -> Tensor:
        """``(N,)`` whether anybody labelled the item."""
        return self.item_counts > 0

    @cached_property
    def item_counts(self) -> Tensor:
        """``(N,)`` annotations of each item."""
        return self.tally.sum(-1).long()

    @cached_property
    def annotator_counts(self) -> Tensor:
        """``(R,)`` annotations by each annotator."""
        return torch.bincount(self.annotator, minlength=self.num_annotators)

    def _cell(self, row: Tensor, size: int) -> Tensor:
        """``(A,)`` the place of each vote in a table with a column a class; small numbers, for memory is what costs."""
        cell = torch.empty(len(self), dtype=torch.int if size < 2**31 else torch.long)
        return torch.add(self.label, row, alpha=self.num_classes, out=cell)

    @cached_property
    def _ones(self) -> Tensor:
        return torch.ones(len(self), dtype=torch.double)

    @cached_property
    def _cells(self) -> sparse.csr_matrix:
        """``(N, R * K)`` ones where an item has a vote: a column an (annotator, label). Sparse, ``A`` entries."""
        shape = self.num_items, self.num_annotators * self.num_classes
        cell = self._cell(self.annotator, shape[1])
        if (self.item[1:] < self.item[:-1]).any():  # a crowd's own table is in order
            cell = cell[self.item.to(cell.dtype).argsort(stable=True)]
        offsets = torch.zeros(self.num_items + 1, dtype=cell.dtype)
        torch.cumsum(self.item_counts, 0, out=offsets[1:])
        return sparse.csr_matrix((self._ones.numpy(), cell.numpy(), offsets.numpy()), shape, copy=False)

    def sum_by_item(self, rows: Tensor) -> Tensor:
        """``(N, K)``: for each item the sum, over its votes, of the row of what was said by whom.

        Args:
            rows: ``(R, K, K)``, first the annotator, then the label said, then the classes; contiguous float64.
        """
        return torch.from_numpy(self._cells @ rows.view(-1, self.num_classes).numpy())

    def sum_by_cell(self, rows: Tensor) -> Tensor:
        """``(R, K, K)``: for each annotator and label said, the sum of the rows of the items of which it was said.

        Args:
            rows: ``(N, K)``, contiguous float64.
        """
        sums = torch.from_numpy(self._cells.T @ rows.numpy())
        return sums.view(self.num_annotators, self.num_classes, self.num_classes)

    def shares(self) -> Tensor:
        """``(N, K)`` the share of each class among an item's votes; a row of zeros where it has none."""
        return self.tally / self.item_counts.clamp_min(1).unsqueeze(-1)


@dataclass
class Aggregation:
    """What an aggregator found."""

    posterior: Tensor
    """``(N, K)`` probability of each class, float64; uniform for an item that nobody labelled."""
    labelled: Tensor
    """``(N,)`` whether anybody labelled the item."""
    annotators: dict[str, Tensor] = field(default_factory=dict)
    """What was found of each annotator, ``R`` rows each: ``confusion (R, K, K)``, ``ability (R,)``."""
    items: dict[str, Tensor] = field(default_factory=dict)
    """What was found of each item, ``N`` rows each, such as ``easiness (N,)``."""
    history: list[float] = field(default_factory=list)
    """The objective after each iteration, which never decreases; empty for a method without iterations."""
    converged: bool = True
    """Whether the objective had settled when the iterations ended."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else was estimated or chosen: the ``prior`` of the classes, a tuned option with its scores."""

    @property
    def label(self) -> Tensor:
        """``(N,)`` the most probable class, the first of equals; -1 for an item that nobody labelled."""
        label = first_greatest(self.posterior)
        label.numpy()[~self.labelled.numpy()] = -1
        return label


def first_greatest(rows: Tensor) -> Tensor:
    """``(N,)`` where each row of ``(N, K)`` is greatest, for equals the first.

    >>> first_greatest(torch.tensor([[0.2, 0.4, 0.4], [0.5, 0.0, 0.5]])).tolist()
    [1, 0]
    """
    return torch.from_numpy(rows.numpy().argmax(-1))  # torch's own promises no order among equals


def normalize_joint(joint: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior ``(N, K)`` and log-likelihood ``(N,)`` of ``joint (N, K)``; an impossible row stays as it was before.

    ``joint`` is overwritten: the posterior takes its place.

    >>> joint = torch.tensor([[0.3, 0.1], [0.0, 0.0]]).log()
    >>> normalize_joint(joint, torch.tensor([[0.5, 0.5], [0.2, 0.8]]))
    (tensor([[0.7500, 0.2500],
            [0.2000, 0.8000]]), tensor([-0.9163,    -inf]))
    """
    top = joint.amax(-1, keepdim=True)  # (N, 1)
    posterior = joint.sub_(top).exp_()
    total = posterior.sum(-1, keepdim=True)  # (N, 1)
    posterior.div_(total)
    likelihood = total.log_().add_(top).squeeze(-1)
    if (impossible := top.squeeze(-1).isneginf()).any():
        posterior[impossible], likelihood[impossible] = previous[impossible], -torch.inf
    return posterior, likelihood


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """``(N, K)`` float64 with a one in each row."""
    return torch.zeros(len(index), num_classes, dtype=torch.double).scatter_(1, index.unsqueeze(-1), 1.0)


def require(option: str, value: object, fits: bool, wanted: str) -> None:
    """Raise an error that names the option unless its value ``fits``.

    >>> require("tol", -1, False, "a number from 0 up")
    Traceback (most recent call last):
    lfc.errors.UserError: tol: -1 where a number from 0 up was wanted; change it
    """
    if not fits:
        raise UserError(f"{option}: {value!r} where {wanted} was wanted; change it")


def one_of(option: str, value: object, allowed: Sequence[str]) -> None:
    """Raise an error unless the value is one of those allowed."""
    require(option, value, value in allowed, f"one of {', '.join(allowed)}")


class Bar:
    """A progress bar on the terminal, which a fit of less than two seconds never shows.

    Args:
        title: What is under way.
        total: The greatest number of steps.
        wanted: Whether to show it at all.
    """

    patience = 2.0
    """Seconds before it appears."""

    def __init__(self, title: str, total: int, wanted: bool = True) -> None:
        self.title, self.total, self.wanted = title, total, wanted
        self.done, self.began = 0, time.monotonic()
        self.progress: Progress | None = None
        self.task = TaskID(0)

    def step(self, count: int = 1) -> None:
        """Count steps as done."""
        self.done += count
        if self.progress is None and self.wanted and time.monotonic() - self.began > self.patience:
            console = Console(stderr=True)
            self.wanted = console.is_terminal
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self.progress = Progress(*columns, console=console, transient=True, disable=not self.wanted)
            self.task = self.progress.add_task(self.title, total=self.total)
            self.progress.start()
        if self.progress is not None:
            self.progress.update(self.task, completed=self.done)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Work is bound by memory, so that a second thread gains little; on a busy machine, waiting for it costs much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Aggregator(ABC):
    """A method that infers one class an item from the votes alone, without looking at the items.

    Args:
        progress: Show a progress bar on the terminal where a fit takes more than two seconds.
    """

    def __init__(self, progress: bool = True) -> None:
        self.progress = progress

    def fit(self, crowd: Crowd | Votes) -> Aggregation:
        """Infer the class of every item; the same votes give the same result.

        Raises:
            UserError: Where there is nothing to aggregate.
        """
        with torch.no_grad(), _one_thread():
            votes = crowd if isinstance(crowd, Votes) else Votes.from_crowd(crowd)
            name = crowd.name if isinstance(crowd, Crowd) else "votes"
            if not len(votes):
                raise UserError(f"{name}: no annotations to aggregate; add some to annotations.csv")
            if votes.num_classes < 2:
                raise UserError(f"{name}: {votes.num_classes} class(es), at least two are needed; list every class")
            with Bar(type(self).__name__, self._steps(), self.progress) as bar:
                result = self._fit(votes, bar)
            result.posterior[~votes.labelled] = 1 / votes.num_classes
        return result

    def _steps(self) -> int:
        """The greatest number of steps that :meth:`_fit` reports."""
        return 1

    @abstractmethod
    def _fit(self, votes: Votes, bar: Bar) -> Aggregation:
        """The method; rows of ``posterior`` of unlabelled items may hold anything."""


Model = TypeVar("Model")


class EM(Aggregator, Generic[Model]):
    """Expectation maximisation: the loop, the stop, and the restarts; a method writes the two steps.

    The first start is the soft majority vote, any further one a random blend of it. Of several starts the one kept is
    the first with the greatest ``criterion``.

    Args:
        max_iter: The most iterations of one start.
        tol: Stop when the objective changes by less than this per annotation; 0 to use all iterations.
        restarts: Number of starts.
        criterion: What the start to keep is chosen by: the final objective (``likelihood``), or the share of items
            whose label agrees with the ``majority`` vote, which cannot be deceived by classes that changed places.
        seed: Of the random starts.
        progress: Show a progress bar on the terminal where a fit takes more than two seconds.
    """

    def __init__(
        self,
        max_iter: int = 100,
        tol: float = 1e-5,
        restarts: int = 1,
        criterion: Criterion = "likelihood",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__(progress)
        require("max_iter", max_iter, max_iter >= 1, "a whole number from 1 up")
        require("tol", tol, tol >= 0, "a number from 0 up")
        require("restarts", restarts, restarts >= 1, "a whole number from 1 up")
        one_of("criterion", criterion, ("likelihood", "majority"))
        self.max_iter, self.tol, self.restarts, self.criterion, self.seed = max_iter, tol, restarts, criterion, seed

    @abstractmethod
    def _m_step(self, votes: Votes, posterior: Tensor, model: Model | None) -> Model:
        """The parameters given ``posterior (N, K)``; ``model`` are those before, ``None`` in the first iteration.

        Rows of ``posterior`` are zero where an item has no votes. The expected log-likelihood must not decrease.
        """

    @abstractmethod
    def _e_step(self, votes: Votes, model: Model) -> tuple[Tensor, float]:
        """``log p(class, votes of the item)``, ``(N, K)``, and the log of the parameters' prior, up to a constant."""

    @abstractmethod
    def _result(self, votes: Votes, model: Model) -> dict[str, Any]:
        """Fields of :class:`Aggregation` that follow from the parameters: ``annotators``, ``items``, ``options``."""

    def _normalize(self, joint: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """The posterior ``(N, K)`` and log-likelihood ``(N,)`` of ``joint (N, K)``, which may be overwritten."""
        return normalize_joint(joint, previous)

    def _steps(self) -> int:
        return self.restarts * self.max_iter

    def _fit(self, votes: Votes, bar: Bar) -> Aggregation:
        best, model, score = self._run(votes, votes.shares(), bar)
        for start in range(1, self.restarts):
            other, others, its = self._run(votes, self._random_start(votes, start), bar)
            if its > score:
                best, model, score = other, others, its
        for name, value in self._result(votes, model).items():
            setattr(best, name, value)
        return best

    def _random_start(self, votes: Votes, start: int) -> Tensor:
        """The soft majority vote, blended half and half with random distributions; ``(N, K)``."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + start)
        noise = torch.rand(votes.num_items, votes.num_classes, generator=generator, dtype=torch.double)
        noise = -noise.clamp_min(1e-300).log_()  # exponential, so that the normalised rows are uniform on the simplex
        blend = votes.shares() + noise / noise.sum(-1, keepdim=True)
        return blend / 2 * votes.labelled.unsqueeze(-1)

    def _run(self, votes: Votes, posterior: Tensor, bar: Bar) -> tuple[Aggregation, Model, float]:
        """One start; the result without what follows from its parameters, these, and its criterion."""
        model: Model | None = None
        history: list[float] = []
        converged = False
        blank = (~votes.labelled).nonzero().squeeze(-1)
        while len(history) < self.max_iter and not converged:
            model = self._m_step(votes, posterior, model)
            joint, log_prior = self._e_step(votes, model)
            posterior, likelihood = self._normalize(joint, posterior)
            posterior[blank], likelihood[blank] = 0.0, 0.0
            history.append(float(likelihood.sum()) + log_prior)
            converged = len(history) > 1 and abs(history[-1] - history[-2]) < self.tol * len(votes)
            bar.step()
        bar.step(self.max_iter - len(history))
        assert model is not None
        result = Aggregation(posterior, votes.labelled, history=history, converged=converged)
        return result, model, history[-1] if self.criterion == "likelihood" else self._agreement(votes, result)

    def _agreement(self, votes: Votes, result: Aggregation) -> float:
        majority = first_greatest(votes.tally)
        return float((result.label == majority)[votes.labelled].double().mean())
