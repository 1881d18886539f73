"""CMM: annotations, or annotators, are of a few groups with a confusion matrix each."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lfc.batch import CrowdBatch
from lfc.errors import UserError
from lfc.functional import confusion_counts, normalize_rows, relative_change
from lfc.heads.base import ConfusionHead
from lfc.heads.majority import vote_distribution

CHUNK = 65_536
"""Annotations that an E-step looks at together."""
TINY = 1e-100
"""Probabilities below this are taken to be this, lest 0 be divided by 0."""


class Gate(nn.Linear):
    """A linear layer that starts at zero: every group alike, whatever the item."""

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class CMM(ConfusionHead):
    """Mena & Ñanculef, *Revisiting Machine Learning from Crowds a Mixture Model for Grouping Annotations*, CIARP 2019.

    There are ``M`` groups, and group ``m`` says ``j`` of an item of class ``k`` with probability ``beta[m, k, j]``.
    Every annotation is by itself a draw of a group and of a class: the likelihood per annotation. What decides on the
    group is the ``kind``:

    - ``global``: nothing, group ``m`` has probability ``alpha[m]``. Who annotates is not used to learn, so it need not
      be known, and there are no parameters of annotators.
    - ``individual``: each annotator has shares ``g[r, m]`` of their own.
    - ``gated``: a linear layer on the item's features, ``alpha[m](x)``; a mixture of experts.

    *The likelihood of* ``global`` *knows only the crowd's matrix*, the sum of ``alpha[m] beta[m]``: one group is as
    likely as many, the groups it ends with are those it began with, refined, and their number cannot be chosen by
    likelihood. To find groups of annotators take ``individual``, where who annotates tells them apart. Groups that
    are equal at first stay equal; so EM starts from clusters, found by k-means: of annotations (vote shares of the
    other classes), or for ``individual`` of annotators (confusion matrices against the majority vote).

    A round of EM fits the network to ``sum_j r[i, j] q[i, j](k)`` by cross-entropy, where ``r`` are the votes and ``q``
    is the posterior of an annotation's class; not normalised, so an item counts as often as it was annotated. Groups
    and their shares have closed forms. Labels are inferred by Bayes' rule over the network and all annotations of the
    item, each with its matrix averaged over groups by their probability before anything was said.

    Args:
        kind: What decides on the group of an annotation, see above.
        groups: Number of groups ``M``.
        alpha_prior: Added to each group's expected annotations when shares are estimated; for ``individual`` an
            annotator gets this many annotations more, spread evenly over groups. 0 is the paper's Equation 6.
        beta_prior: Added to every cell of every group's counts. 0 is the paper's Equation 6; the authors' code adds 1.
        start: What the class of an annotation is thought to be at first. ``shares``: the shares of the item's votes;
            ``random``: for each group a random mean of these and of what was said, as in the paper's experiments.
            The clusters, too, differ from one start to another.
        em_every: Epochs in which the network is fitted before groups and posteriors are updated.
        em_rounds: Most rounds; ``None`` goes on as long as training does. The paper has 50.
        em_tol: Training stops when a round changes the likelihood and the matrices by no more than this share; 0
            never. The paper has .03.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    alpha: Tensor
    beta: Tensor
    membership: Tensor
    targets: Tensor
    gate_targets: Tensor
    annotations: Tensor

    def __init__(
        self,
        kind: Literal["global", "individual", "gated"] = "global",
        groups: int = 3,
        alpha_prior: float = 1.0,
        beta_prior: float = 1.0,
        start: Literal["shares", "random"] = "shares",
        em_every: int = 1,
        em_rounds: int | None = None,
        em_tol: float = 1e-4,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        if groups < 1:
            raise UserError(f"--model.head.groups={groups}: at least one group")
        if groups == 1 and kind == "gated":
            raise UserError("--model.head.groups=1: a gate chooses among groups; take two, or --model.head.kind=global")
        for name, prior in {"alpha_prior": alpha_prior, "beta_prior": beta_prior}.items():
            if prior < 0:
                raise UserError(f"--model.head.{name}={prior}: 0 or above")
        self.kind, self.groups, self.start = kind, groups, start
        self.alpha_prior, self.beta_prior = alpha_prior, beta_prior
        self.em_every, self.em_rounds, self.em_tol = em_every, em_rounds, em_tol
        classes = self.num_classes
        self.gate = Gate(self.in_features, groups) if kind == "gated" else None
        self.register_buffer("alpha", torch.full((groups,), 1 / groups))
        self.register_buffer("beta", torch.full((groups, classes, classes), 1 / classes))
        self.register_buffer("membership", torch.full((self.num_annotators, groups), 1 / groups))
        self.register_buffer("targets", torch.zeros(self.num_items, classes))
        self.register_buffer("gate_targets", torch.zeros(self.num_items if self.gate else 0, groups))
        self.register_buffer("annotations", torch.zeros(self.num_annotators, dtype=torch.long))

    # EM

    def prepare(self, crowd: CrowdBatch) -> None:
        """Clusters stand for the first E-step: every annotation is of one group, the class as :attr:`start` says."""
        classes = self.num_classes
        self.annotations.copy_(torch.bincount(crowd.annotator, minlength=self.num_annotators))
        shares = vote_distribution(crowd.votes(classes).double(), "soft")
        group = self._first_groups(shares, crowd)  # (A,)
        rest = torch.rand(self.groups, dtype=torch.float64) if self.start == "random" else torch.zeros(self.groups)
        rest = rest.to(shares)[group, None]  # (A, 1)
        q = (1 - rest) * shares[crowd.row] + rest * F.one_hot(crowd.label, classes)  # (A, K)
        counts = q.new_zeros(self.groups * classes, classes).index_add_(0, group * classes + crowd.label, q)
        targets = q.new_zeros(len(crowd), classes).index_add_(0, crowd.row, q)
        chosen = F.one_hot(group, self.groups).to(q)
        owner, size = self._owners(crowd)
        groups = q.new_zeros(size, self.groups).index_add_(0, owner, chosen)
        self._maximise(counts.view(-1, classes, classes).transpose(1, 2), targets, groups)
        if self.kind == "individual":  # nobody is wholly of a group, or they would never leave it
            halfway = (self.membership + 1 / self.groups) / 2
            self.membership.copy_(halfway.where(self.annotations[:, None] > 0, self.alpha))
        self._update_membership(shares, crowd)
        if self.gate is not None:
            with torch.no_grad():
                self.gate.bias.copy_(self.alpha.clamp_min(1e-3).log())

    def e_step(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """The network's probabilities, ``(B, K)``; for ``gated`` then those of the groups, ``(B, K + M)``."""
        rows = self(features).exp()
        return rows if self.gate is None else torch.cat([rows, self.gate(features).softmax(-1)], -1)

    def m_step(self, rows: Tensor, crowd: CrowdBatch) -> Tensor:
        """Groups, shares and the network's targets, in float64."""
        f, gate = rows.double().split([self.num_classes, rows.shape[1] - self.num_classes], -1)
        change = self._maximise(*(self._global(f, crowd) if self.kind == "global" else self._each(f, gate, crowd)))
        self._update_membership(f, crowd)
        return change

    def _owners(self, crowd: CrowdBatch) -> tuple[Tensor, int]:
        """Whose shares decide on each annotation's group, ``(A,)``: which of how many annotators, items, or crowds."""
        if self.kind == "individual":
            return crowd.annotator, self.num_annotators
        return (crowd.row, len(crowd)) if self.kind == "gated" else (torch.zeros_like(crowd.row), 1)

    def _global(self, f: Tensor, crowd: CrowdBatch) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`_each` returns, at a cost of items and groups instead of annotations times groups."""
        alpha, beta = self.alpha.double(), self.beta.double()
        mixed = self.matrix.double()
        weight = crowd.votes(self.num_classes).double() / (f @ mixed).clamp_min(TINY)  # (N, K), r / p
        counts = alpha[:, None, None] * beta * (f.T @ weight)  # (M, K, K)
        return counts, f * (weight @ mixed.T), counts.sum((1, 2))[None]

    def _each(self, f: Tensor, gate: Tensor, crowd: CrowdBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Expected counts ``(M, K, K)``, targets ``(N, K)``, and annotations of each group by owner ``(R or N, M)``."""
        beta, (owner, size) = self.beta.double(), self._owners(crowd)
        prior = self.membership.double() if self.kind == "individual" else gate
        counts, targets, groups = torch.zeros_like(beta), torch.zeros_like(f), f.new_zeros(size, self.groups)
        for label, some in _by_label(crowd.label):
            said, t, g = beta[:, :, label], f[crowd.row[some]], prior[owner[some]]  # (M, K), (a, K), (a, M)
            joint = g * (t @ said.T)  # (a, M)
            p = joint.sum(-1, keepdim=True).clamp_min(TINY)
            counts[:, :, label] += said * ((g / p).T @ t)
            targets.index_add_(0, crowd.row[some], t * ((g / p) @ said))
            groups.index_add_(0, owner[some], joint / p)
        return counts, targets, groups

    def _maximise(self, counts: Tensor, targets: Tensor, groups: Tensor) -> Tensor:
        """Closed forms from expected counts; how much the matrices changed."""
        beta = normalize_rows(counts + self.beta_prior)
        change = relative_change(beta, self.beta.double())
        self.beta.copy_(beta)
        self.alpha.copy_(normalize_rows(counts.sum((1, 2)) + self.alpha_prior))
        self.targets.copy_(targets)
        if self.kind == "gated":
            self.gate_targets.copy_(groups)
        if self.kind == "individual":
            self.membership.copy_(normalize_rows(groups + self.alpha_prior / self.groups))
            self.membership[self.annotations == 0] = self.alpha
        return change

    def _update_membership(self, f: Tensor, crowd: CrowdBatch) -> None:
        """Where annotators have no shares of their own, how probable each group is from all that they said."""
        if self.kind != "individual":
            scores = f.new_zeros(self.num_annotators, self.groups)
            for label, some in _by_label(crowd.label):
                likely = f[crowd.row[some]] @ self.beta[:, :, label].double().T  # (a, M)
                scores.index_add_(0, crowd.annotator[some], likely.clamp_min(TINY).log())
            self.membership.copy_((_log(self.alpha.double()) + scores).softmax(-1))

    def _first_groups(self, shares: Tensor, crowd: CrowdBatch) -> Tensor:
        """The cluster of each annotation, ``(A,)``."""
        classes = self.num_classes
        if self.kind == "individual":
            majority = vote_distribution(crowd.votes(classes), "hard").double()
            who, inverse = crowd.annotator.unique(return_inverse=True)  # the others say nothing
            few = CrowdBatch(None, crowd.items, crowd.row, inverse, crowd.label)
            matrices = normalize_rows(confusion_counts(majority, few, len(who)) + 1)
            return _clusters(matrices.flatten(1), self.groups)[inverse]
        pairs, inverse = (crowd.row * classes + crowd.label).unique(return_inverse=True)
        # -p log o, where o is 1 for what was said and the same small number elsewhere; standardising drops its log
        others = shares[pairs // classes] * (1 - F.one_hot(pairs % classes, classes))  # (P, K)
        return _clusters(others, self.groups, axes=3)[inverse]

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """Cross-entropy against the last E-step, of the classes and of a gate's groups, over ``len(batch)``."""
        labelled = batch.labelled[:, None]
        total = (self.targets[batch.items] * labelled * self(features)).sum()
        if self.gate is not None:
            total = total + (self.gate_targets[batch.items] * labelled * self.gate(features).log_softmax(-1)).sum()
        return -total / len(batch)

    def log_prior(self) -> Tensor:
        """Of the matrices and the shares, up to a constant."""
        prior = self.beta_prior * _log(self.beta.double()).sum()
        if self.kind == "global":
            prior = prior + self.alpha_prior * _log(self.alpha.double()).sum()
        if self.kind == "individual":
            seen = self.membership[self.annotations > 0].double()
            prior = prior + self.alpha_prior / self.groups * _log(seen).sum()
        return prior

    # what was learned

    @property
    def matrix(self) -> Tensor:
        """The matrix of the crowd as a whole, ``(K, K)``: the groups' mean, weighted by their shares."""
        return torch.einsum("m,mkj->kj", self.alpha, self.beta)

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log sum_m p(group m) beta[m, k, label]``, ``(A, K)``."""
        if self.kind == "global":
            return _log(self.matrix.T[batch.label])
        return _log(torch.einsum("am,mka->ak", self._shares(features, batch), self.beta[:, :, batch.label]))

    def _shares(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``p(group)`` of each annotation before anything was said, ``(A, M)``."""
        if self.gate is not None:
            return self.gate(features).softmax(-1)[batch.row]
        return self.membership[batch.annotator] if self.kind == "individual" else self.alpha.expand(len(batch.row), -1)

    def _log_group(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log p(label | input, group)`` of each annotation, ``(A, M)``."""
        return _log(torch.einsum("ak,mka->am", self(features).exp()[batch.row], self.beta[:, :, batch.label]))

    def responsibilities(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``p(group | input, label)`` of each annotation by itself, ``(A, M)``; the annotator's where they matter."""
        return (_log(self._shares(features, batch)) + self._log_group(features, batch)).softmax(-1)

    def group_posterior(self, features: Tensor, batch: CrowdBatch) -> tuple[Tensor, Tensor]:
        """How probable each group is for the annotators of a batch, if all they say there is of one group.

        Their numbers only tell them apart, so they may be annotators that training never saw. Before anything was said
        each group has its share ``alpha`` of the crowd.

        Returns:
            Which annotators, ``(U,)``, in order, and ``p(group | their annotations)``, ``(U, M)``.
        """
        who, inverse = batch.annotator.unique(return_inverse=True)
        scores = _log(self.alpha).expand(len(who), -1).index_add(0, inverse, self._log_group(features, batch))
        return who, scores.softmax(-1)

    def annotators(self) -> dict[str, Tensor]:
        """Probabilities of each annotator's groups as ``embedding (R, M)``, the likeliest ``group``, and ``confusion``.

        For ``individual`` these are the annotator's shares; else what :meth:`group_posterior` says of all that they
        said in training. Who said nothing has the crowd's shares.
        """
        return {
            "confusion": torch.einsum("rm,mkj->rkj", self.membership, self.beta),
            "group": self.membership.argmax(-1),
            "embedding": self.membership.clone(),
        }

    def warnings(self) -> list[str]:
        """What a user should know of the groups that were found."""
        found = []
        if (order := switched(self.matrix)) is not None:
            moved = ", ".join(f"{k} as {j}" for k, j in enumerate(order.tolist()) if k != j)
            found.append(
                f"CMM: classes seem to have changed places (the crowd would call class {moved}), so inferred labels "
                "may be permuted; compare starts by --model.restart_criterion=majority, or take another seed"
            )
        given = self.annotations[self.annotations > 0]
        if self.kind == "individual" and len(given) and given.median() < self.num_classes:
            found.append(
                f"CMM: every other annotator gave {int(given.median())} labels or fewer, and there are "
                f"{self.num_classes} classes: too few to tell groups apart; take --model.head.kind=global"
            )
        return found


def switched(matrix: Tensor, margin: float = 0.05) -> Tensor | None:
    """The order of classes in which a confusion matrix makes sense, if clearly not the one it has.

    Args:
        matrix: ``(K, K)`` rows sum to one.
        margin: By how much the mean of the diagonal must rise in that order.

    Returns:
        ``(K,)`` the class said where the true class is each, or ``None``.

    >>> switched(torch.tensor([[0.1, 0.8, 0.1], [0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]))
    tensor([1, 0, 2])
    >>> switched(torch.tensor([[0.6, 0.4], [0.5, 0.5]]))
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # here: slow to import

    true, said = linear_sum_assignment(matrix.detach().cpu().double().numpy(), maximize=True)
    order = torch.from_numpy(said).to(matrix.device)
    rise = matrix[true, order].mean() - matrix.diagonal().mean()
    return order if rise > margin else None


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()


def _by_label(label: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each label with positions where it was given, at most ``CHUNK`` at a time."""
    order, sizes = label.argsort(stable=True), torch.bincount(label).tolist()
    for value, positions in enumerate(order.split(sizes)):
        for some in positions.split(CHUNK):
            if len(some):
                yield value, some


def _clusters(points: Tensor, groups: int, axes: int | None = None) -> Tensor:
    """Which of at most ``groups`` clusters each of ``points (P, E)`` is in, ``(P,)``, by k-means on unit variances.

    Args:
        points: Where they are.
        groups: How many clusters, unless there are fewer places.
        axes: Keep so many directions, those along which the points vary most; ``None`` keeps the axes as they are.
    """
    if not len(points) or groups == 1:
        return points.new_zeros(len(points), dtype=torch.long)
    distinct, place = points.unique(dim=0, return_inverse=True)
    if len(distinct) <= groups:
        return place
    from sklearn.cluster import MiniBatchKMeans  # here: slow to import

    points = points - points.mean(0)
    if axes is not None:
        points = points @ torch.linalg.eigh(points.T @ points)[1][:, -axes:]
    scale = points.std(0, correction=0)
    points = points[:, scale > 1e-6 * scale.max()] / scale[scale > 1e-6 * scale.max()]
    seed = int(torch.randint(2**31 - 1, ()))
    means = MiniBatchKMeans(groups, init="k-means++", batch_size=128, n_init=3, random_state=seed)
    return torch.from_numpy(means.fit_predict(points.cpu().numpy())).to(place)


__all__ = ["CMM", "switched"]
