"""What a head is: the part of a model that turns features and annotations into a loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lfc import functional
from lfc.backbones.base import redraw
from lfc.batch import CrowdBatch


class AnnotatorTable(nn.Embedding):
    """Parameters with a row an annotator, of which a step reads and moves only those in its batch.

    The optimiser that ``lfc`` builds knows these tables: they have a learning rate of their own, and in a large crowd
    sparse gradients and :class:`lfc.optim.RowAdam`. (An ``nn.Embedding``, since that is how DDP knows that a gradient
    may be sparse.)

    Args:
        row: ``(...)`` what every annotator's row is at first.
        num_annotators: Number of rows ``R``.

    >>> import torch
    >>> table = AnnotatorTable(torch.eye(2), num_annotators=1000)
    >>> table(torch.tensor([7, 7, 3])).shape
    torch.Size([3, 2, 2])
    """

    def __init__(self, row: Tensor, num_annotators: int) -> None:
        super().__init__(num_annotators, row.numel(), _weight=row.reshape(1, -1).repeat(num_annotators, 1))
        self.shape, self.first = row.shape, row.detach().reshape(1, -1).clone()
        self.before_read: Callable[[Tensor | None], None] | None = None
        """Called with the rows about to be read in training (``None``: all); ``RowAdam`` catches them up."""

    def reset_parameters(self) -> None:
        """Every row as it was at first; a table that starts at random draws anew."""
        with torch.no_grad():
            self.weight.copy_(self.first.expand_as(self.weight))

    def forward(self, annotator: Tensor) -> Tensor:
        """The rows of ``annotator (A,)``, ``(A, ...)``."""
        if self.before_read is not None and self.training:
            self.before_read(annotator)
        return super().forward(annotator).view(-1, *self.shape)

    @property
    def table(self) -> Tensor:
        """All rows, ``(R, ...)``, detached: for reports, never for a step."""
        return self.weight.detach().view(-1, *self.shape)


class Head(nn.Module, ABC):
    """A plug-in loss: features ``(B, D)`` and annotations in, one number out.

    A head that learns by gradient writes :meth:`loss`; one with EM writes :meth:`e_step` or :meth:`posterior`, and
    :meth:`m_step`. All is plain tensor code, without ranks, loaders or hooks. State that gradients do not reach lives
    in persistent buffers, so that checkpoints carry it.

    EM goes in rounds: some epochs of gradient descent on :meth:`loss`, which is the M-step of the network against what
    the last E-step left in the buffers; then the E-step of every training item; then :meth:`m_step`, which has closed
    forms. :meth:`prepare` stands for the first E-step and M-step, so most EM heads end it with ``self.m_step(votes,
    crowd)``. EM ends after ``em_rounds``, or when a round changes little; training then stops, or goes on to fine-tune.

    Args:
        in_features: Width ``D`` of the backbone's output; set by the backbone.
        num_classes: Number of classes ``K``; set by the data.
        num_annotators: Number of annotators ``R``; set by the data.
        num_items: Number of training items ``N``; set by the data.
        num_tasks: Number of labelling tasks ``T``; with more than one, the last ``T`` features are 1 for the item's own
            task and 0 for the others; set by the data.
        profile_features: Width ``F`` of what is known of each annotator; set by the data.
    """

    em_every: int = 0
    """Epochs in an EM round; 0, with no ``em_steps`` either, means that gradients are all there is."""
    em_steps: int = 0
    """Gradient steps in an EM round, made up to whole epochs, for a head that counts these instead of epochs."""
    em_rounds: int | None = None
    """Most rounds of EM; ``None`` goes on as long as training does."""
    em_tol: float = 0.0
    """EM ends when a round changes :meth:`objective` and the closed-form parameters by no more than this share."""
    finetune_steps: int = 0
    """Gradient steps after EM, with :attr:`finetuning` set."""
    finetuning: bool = False
    """Whether EM is over and :meth:`loss` is to be the likelihood itself; set by the module."""
    needs_gold: bool = False
    """Whether the head is trained on gold labels; every other head must not read them."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        num_annotators: int,
        num_items: int,
        num_tasks: int = 1,
        profile_features: int = 0,
    ) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        self.num_annotators, self.num_items = num_annotators, num_items
        self.num_tasks, self.profile_features = num_tasks, profile_features
        self.classifier = nn.Linear(in_features, num_classes)

    def prepare(self, crowd: CrowdBatch) -> None:
        """Look at the whole crowd once, before training; row ``i`` is training item ``i`` and there are no inputs."""

    def forward(self, features: Tensor) -> Tensor:
        """``log p(class | input)``, ``(B, K)``."""
        return self.classifier(features).log_softmax(-1)

    @abstractmethod
    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """What to minimise: a sum over annotations, or items, divided by ``len(batch)``."""

    def annotation_log_prob(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log p(this annotator says this label | input)`` of each annotation, ``(A,)``; scores held-out annotations.

        A head without a model of its annotators takes them to say what the network says.
        """
        return self(features)[batch.row, batch.label]

    def posterior(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``p(class | input, annotations)``, ``(B, K)``; the network's own opinion unless a head knows more."""
        return self(features).exp()

    def e_step(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Rows ``(B, ...)`` of what :meth:`m_step` needs; the posterior unless a head keeps more."""
        return self.posterior(features, batch)

    def m_step(self, rows: Tensor, crowd: CrowdBatch) -> Tensor | None:
        """Update, in place, the buffers that gradient descent does not.

        Args:
            rows: :meth:`e_step` of every training item, ``(N, ...)``, equal on every rank.
            crowd: Every training annotation; row ``i`` is item ``i`` and ``inputs`` is ``None``.

        Returns:
            Mean relative change of what has a closed form, for the test of convergence; ``None`` where nothing has.
        """

    def log_likelihood(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Of each item's annotations, ``(B,)``, as the head's EM maximises it; by default each annotation by itself."""
        return self(features).new_zeros(len(batch)).index_add(0, batch.row, self.annotation_log_prob(features, batch))

    def log_prior(self) -> Tensor | float:
        """What priors add to the log-likelihood: the sum is what an exact round of EM never lowers."""
        return 0.0

    def restart(self, crowd: CrowdBatch) -> None:
        """Begin anew from other random numbers: what was drawn is drawn again, then :meth:`prepare`."""
        redraw(self)
        self.prepare(crowd)

    def warnings(self) -> list[str]:
        """What a user should know of the solution, a line each, asked for when training ends."""
        return []

    def annotators(self) -> dict[str, Tensor]:
        """What was learned of each annotator, detached, ``R`` rows each.

        Known names are ``confusion (R, K, K)``, ``ability (R,)``, ``group (R,)`` and ``embedding (R, E)``.
        """
        return {}


class ConfusionHead(Head):
    """A head that says how likely each label is, given each true class; the rest follows from :meth:`log_obs`."""

    likelihood: Literal["per_annotation", "joint"] = "per_annotation"
    """Which of the two likelihoods of :mod:`lfc.functional` the head maximises."""

    @abstractmethod
    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log p(annotator says label | class k)`` of each annotation, ``(A, K)``."""

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """The negative log-likelihood that the head maximises, summed, over ``len(batch)``."""
        log_t, log_obs = self(features), self.log_obs(features, batch)
        likelihood = (
            functional.annotation_log_likelihood
            if self.likelihood == "per_annotation"
            else functional.joint_log_likelihood
        )
        return -likelihood(log_t, log_obs, batch.row).sum() / len(batch)

    def annotation_log_prob(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log sum_k p(class k | input) p(label | class k)``, ``(A,)``."""
        return functional.annotation_log_likelihood(self(features), self.log_obs(features, batch), batch.row)

    def posterior(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Bayes' rule over the network's opinion and all annotations of the item, ``(B, K)``."""
        return functional.posterior(self(features), self.log_obs(features, batch), batch.row)

    def log_likelihood(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Of each item's annotations, ``(B,)``: per annotation or joint, as :attr:`likelihood` says."""
        if self.likelihood == "per_annotation":
            return super().log_likelihood(features, batch)
        return functional.joint_log_likelihood(self(features), self.log_obs(features, batch), batch.row)


def gather_rows(table: AnnotatorTable, annotator: Tensor) -> tuple[Tensor, Tensor]:
    """Each annotator of the batch once: rows ``(U, ...)``, and ``(A,)`` where among them each annotation's is.

    Work on a row (a softmax, a product) is then done once an annotator, not once an annotation.
    """
    unique, inverse = annotator.unique(return_inverse=True)
    return table(unique), inverse


def pick(matrices: Tensor, inverse: Tensor, label: Tensor) -> Tensor:
    """``matrices[inverse, :, label]``, ``(A, K)``: the column of what was said, for every true class."""
    classes = matrices.shape[-1]
    columns = matrices.transpose(1, 2).reshape(-1, classes)  # (U * K, K), a row a (annotator, label)
    return columns.index_select(0, inverse * classes + label)


__all__ = ["AnnotatorTable", "ConfusionHead", "Head", "gather_rows", "pick"]
