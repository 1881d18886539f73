"""LIA: how hard each item is and how competent each annotator, as functions that also hold for new ones."""

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lfc.batch import CrowdBatch
from lfc.functional import annotation_log_likelihood, joint_log_likelihood, normalize_rows, posterior
from lfc.heads.base import AnnotatorTable, ConfusionHead

CHUNK = 1 << 22
"""How many numbers the matrices of items by annotators may take at a time."""


class Dense(nn.Linear):
    """A linear map of vectors ``(n, W)`` to tensors ``(n, *shape)``: weights Glorot-uniform at first, biases zero.

    Args:
        in_features: ``W``.
        shape: Of what comes out.
        copies: How many maps there are; with it, an axis of this length comes before ``shape``.

    >>> Dense(16, 3, 3).weight.shape, Dense(16, 3, 3, copies=2)(torch.zeros(5, 16)).shape
    (torch.Size([3, 3, 16]), torch.Size([5, 2, 3, 3]))
    """

    def __init__(self, in_features: int, *shape: int, copies: int | None = None) -> None:
        self.fan, self.shape = in_features + math.prod(shape), shape if copies is None else (copies, *shape)
        super().__init__(in_features, math.prod(self.shape))
        self.weight = nn.Parameter(self.weight.detach().view(*self.shape, in_features))
        self.bias = nn.Parameter(self.bias.detach().view(self.shape))

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = math.sqrt(6 / self.fan)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Tensors ``(n, *shape)`` of vectors ``(n, W)``."""
        return F.linear(input, self.weight.flatten(0, -2), self.bias.flatten()).view(-1, *self.shape)


class RandomTable(AnnotatorTable):
    """A vector an annotator, drawn at random, of length about 1.

    Args:
        width: Of each vector.
        num_annotators: Number of rows ``R``.
    """

    def __init__(self, width: int, num_annotators: int) -> None:
        super().__init__(torch.zeros(width), num_annotators)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every row anew."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class LIA(ConfusionHead):
    """LIA of the ICLR 2020 submission *Learning from Imperfect Annotations: An End-to-End Approach*.

    Each pair of an item ``i`` and an annotator ``r`` has a confusion matrix of its own: the row of class ``k`` is the
    softmax, over what may be said ``j``, of ``log sum_l exp(D_i[k, j, l] + C_r[k, j, l])``. The difficulty ``D`` is a
    network's of the item, the competence ``C`` a linear function of what represents the annotator, and the classifier
    ``h`` a network of its own. So one can ask, also for new items and annotators, who should label what.

    Training is EM of the joint likelihood, whose first E-step is replaced by the shares of the votes since otherwise
    nothing would tell the classes apart; its M-steps are gradient steps, and posteriors are Bayes' rule over ``h`` and
    the matrices. Fine-tuning then maximises the likelihood of each annotation by itself. The paper takes Adam with
    AMSGrad, a rate of .001 and betas of .9 and .99.

    As printed, the paper's equations 4, 7 and 9 divide by a sum over true classes; here rows sum to one, as its text
    has it. Hidden layers are SELU. With several tasks (LIA-ML), items share all hidden layers and annotators their
    representations, and each task has output layers of its own. All tasks share one list of classes; those that a task
    never uses are not ruled out but become unlikely.

    Args:
        hidden: Width of each hidden layer of the classifier, and of the difficulty's network, on the backbone's
            features.
        embedding: Width of what is learned to represent an annotator.
        latent: Size ``L`` of the latent axis of difficulties and competences.
        combine: What becomes of the latent axis: ``lse`` sums ``exp(D + C)`` over it before rows are normalised;
            ``mixture`` takes the mean of ``L`` matrices normalised each by itself. The same where ``latent`` is 1.
        representation: What represents an annotator: ``auto`` the features that the data has of them, or, where there
            are none, an embedding that is learned; ``embedding`` always that; ``both`` the two side by side.
        share_trunk: Whether the difficulty is read off the classifier's hidden layers instead of its own.
        h_weight: Whether the classifier's term of the EM loss counts once ``per_item``, as in the paper's equation 7,
            or once ``per_annotation`` of the item.
        e_step_prior: Whether posteriors in EM heed the classifier. Without, a round may lower the likelihood; for
            comparison only.
        em_steps: Gradient steps in a round of EM.
        em_rounds: Rounds of EM.
        finetune: Which likelihood is maximised after EM: that of each annotation by itself, ``per_annotation``, as in
            the paper, that of all of an item's together, ``joint``, or ``none``.
        finetune_steps: Gradient steps after EM.
        sizes: Set by the data and the backbone, see :class:`lfc.heads.Head`.
    """

    likelihood = "joint"
    targets: Tensor
    profile: Tensor
    seen: Tensor

    def __init__(
        self,
        hidden: list[int] = [16, 16, 16, 16],  # noqa: B006  a list is what a config file holds, and it is not changed
        embedding: int = 16,
        latent: int = 1,
        combine: Literal["lse", "mixture"] = "lse",
        representation: Literal["auto", "embedding", "both"] = "auto",
        share_trunk: bool = False,
        h_weight: Literal["per_item", "per_annotation"] = "per_item",
        e_step_prior: bool = True,
        em_steps: int = 1000,
        em_rounds: int = 10,
        finetune: Literal["per_annotation", "joint", "none"] = "per_annotation",
        finetune_steps: int = 1000,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.combine, self.h_weight, self.e_step_prior, self.finetune = combine, h_weight, e_step_prior, finetune
        self.em_steps, self.em_rounds = em_steps, em_rounds
        self.finetune_steps = 0 if finetune == "none" else finetune_steps
        classes, tasks = self.num_classes, self.num_tasks
        self.width = self.in_features - (tasks if tasks > 1 else 0)
        widths = [self.width, *hidden]

        def trunk() -> nn.Sequential:
            return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (Dense(a, b), nn.SELU())))

        self.trunk = trunk()
        self.difficulty_trunk = self.trunk if share_trunk else trunk()
        self.classifier = Dense(widths[-1], classes, copies=tasks)
        self.difficulty_out = Dense(widths[-1], classes, classes, latent, copies=tasks)

        features = 0 if representation == "embedding" else self.profile_features
        learned = representation == "both" or not features
        self.embedding = RandomTable(embedding, self.num_annotators) if learned else None
        represented = features + (embedding if learned else 0)
        self.competence_out = Dense(represented, classes, classes, latent, copies=tasks)
        self.register_buffer("profile", torch.zeros(self.num_annotators if features else 0, features))
        self.register_buffer("seen", torch.ones(self.num_annotators, dtype=torch.bool))
        self.register_buffer("targets", torch.zeros(self.num_items, classes))

    # EM

    def prepare(self, crowd: CrowdBatch) -> None:
        """The shares of the votes stand for the first E-step; remember who labels, and their features."""
        self.m_step(normalize_rows(crowd.votes(self.num_classes)), crowd)
        seen = torch.bincount(crowd.annotator, minlength=self.num_annotators) > 0
        self.seen.copy_(seen | ~seen.any())
        if self.profile.shape[1]:
            if crowd.profile is None:
                raise ValueError(f"profile: the data promised {self.profile.shape[1]} features of each annotator")
            self.profile.index_copy_(0, crowd.annotator, crowd.profile.to(self.profile))

    def m_step(self, rows: Tensor, crowd: CrowdBatch) -> None:
        """The posteriors are the targets of the gradient steps to come."""
        self.targets.copy_(rows)

    def e_step(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``p(class | input, annotations)``, ``(B, K)``; without ``e_step_prior``, as if all classes were alike."""
        log_h = self(features)
        prior = log_h if self.e_step_prior else torch.zeros_like(log_h)
        return posterior(prior, self.log_obs(features, batch), batch.row)

    def loss(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """In EM, ``-sum_i sum_k q[i, k] (log h_i[k] + sum_{r of i} log Q_ir[k, y_ir]) / len(batch)`` of labelled items.

        After EM, the negative log-likelihood that fine-tuning maximises, over ``len(batch)``.
        """
        log_h, log_obs = self(features), self.log_obs(features, batch)
        if self.finetuning and self.finetune != "none":
            likelihood = annotation_log_likelihood if self.finetune == "per_annotation" else joint_log_likelihood
            return -likelihood(log_h, log_obs, batch.row).sum() / len(batch)
        q = self.targets[batch.items]  # (B, K)
        once = batch.labelled if self.h_weight == "per_item" else torch.bincount(batch.row, minlength=len(batch))
        truth, said = q * once[:, None] * log_h, q.index_select(0, batch.row) * log_obs
        return -(truth.sum() + said.sum()) / len(batch)

    # the three functions

    def _split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the networks read, ``(B, W)``, and the task, ``(B,)``, of each item."""
        if self.num_tasks == 1:
            return features, torch.zeros(len(features), dtype=torch.long, device=features.device)
        return features[:, : self.width], features[:, self.width :].argmax(-1)

    def forward(self, features: Tensor) -> Tensor:
        """``log h``, the log-probability of each class, ``(B, K)``."""
        inputs, task = self._split(features)
        return _of_task(self.classifier(self.trunk(inputs)), task).log_softmax(-1)

    def difficulty(self, features: Tensor) -> Tensor:
        """``D (B, K, K, L)``: how likely an item of class ``k`` is taken for ``j``, before rows are normalised."""
        inputs, task = self._split(features)
        return _of_task(self.difficulty_out(self.difficulty_trunk(inputs)), task)

    def _competences(self, annotator: Tensor, profile: Tensor | None, strangers: bool) -> Tensor:
        """``C (U, T, K, K, L)`` of annotators ``(U,)`` with features ``(U, F)``.

        Args:
            annotator: Who; a number of ``R`` or more is somebody never seen.
            profile: Their features, if not as in training.
            strangers: Whether there may be annotators without a label in training: of what is not known of them, the
                mean over the others is taken.
        """
        known, row = self.seen, annotator
        if strangers:
            row = annotator.clamp_max(self.num_annotators - 1)
            new = (annotator >= self.num_annotators) | ~known[row]
            strangers = bool(new.any())
        parts = []
        if self.profile.shape[1]:
            features = self.profile[row] if profile is None else profile.to(self.profile)
            if strangers and profile is None:
                features = torch.where(new[:, None], self.profile[known].mean(0), features)
            parts.append(features)
        if self.embedding is not None:
            rows = self.embedding(row)
            if strangers:
                rows = torch.where(new[:, None], self.embedding.table[known].mean(0), rows)
            parts.append(rows)
        return self.competence_out(torch.cat(parts, -1))

    def _log_q(self, scores: Tensor) -> Tensor:
        """``log Q (..., K, K)`` of ``D + C``, ``(..., K, K, L)``: rows are true classes, and normalised."""
        if self.combine == "lse":
            return scores.logsumexp(-1).log_softmax(-1)
        return scores.log_softmax(-2).logsumexp(-1) - math.log(scores.shape[-1])

    def log_obs(self, features: Tensor, batch: CrowdBatch) -> Tensor:
        """``log Q[k, label]`` of each annotation's item and annotator, ``(A, K)``."""
        who, inverse = batch.annotator.unique(return_inverse=True)
        profile = batch.profile
        if profile is not None:
            profile = profile.new_zeros(len(who), profile.shape[1]).index_copy_(0, inverse, profile)
        competences = self._competences(who, profile, strangers=not self.training)
        task = self._split(features)[1][batch.row]
        log_q = self._log_q(self.difficulty(features)[batch.row] + competences[inverse, task])  # (A, K, K)
        return log_q.gather(2, batch.label[:, None, None].expand(-1, self.num_classes, 1)).squeeze(2)

    # what can be asked

    def competence(self, features: Tensor, annotator: Tensor | None = None, profile: Tensor | None = None) -> Tensor:
        """Probability that each annotator would label each item right, ``sum_k h[k] Q[k, k]``, ``(B, U)``.

        Without gradients (``torch.no_grad()``) memory is that of the answer.

        Args:
            features: ``(B, D)`` the items.
            annotator: ``(U,)`` the annotators; all by default. One without a label in training, or a number of ``R`` or
                more, is taken for an average one, as far as nothing is known of them.
            profile: ``(U, F)`` the annotators' features, if not as in training; without ``annotator``, those of ``U``
                annotators never seen.
        """
        if annotator is None and profile is None:
            annotator = torch.arange(self.num_annotators, device=features.device)
        elif annotator is None and profile is not None:
            annotator = torch.full((len(profile),), self.num_annotators, device=features.device)
        assert annotator is not None
        log_h, difficulty, task = self(features), self.difficulty(features), self._split(features)[1]
        answers = []
        for part in torch.arange(len(annotator), device=features.device).split(max(1, CHUNK // difficulty.numel())):
            theirs = self._competences(annotator[part], None if profile is None else profile[part], strangers=True)
            log_q = self._log_q(difficulty + theirs[:, task])  # (chunk of U, B, K, K)
            answers.append((log_h + log_q.diagonal(dim1=-2, dim2=-1)).logsumexp(-1).exp())
        return torch.cat(answers).T

    def assign(self, features: Tensor, annotator: Tensor | None = None) -> Tensor:
        """Which of ``annotator (U,)``, by default of all with a label in training, should label each item, ``(B,)``."""
        who = self.seen.nonzero().squeeze(1) if annotator is None else annotator
        return who[self.competence(features, who).argmax(-1)]

    def expected_error(self, features: Tensor) -> Tensor:
        """How hard each item is, ``(B,)``: the probability that an annotator with the mean representation errs."""
        nobody = torch.tensor([self.num_annotators], device=features.device)
        return 1 - self.competence(features, nobody).squeeze(1)

    def annotators(self) -> dict[str, Tensor]:
        """Each annotator's ``embedding``, ``(R, E)``, where one is learned."""
        return {} if self.embedding is None else {"embedding": self.embedding.table}


def _of_task(outputs: Tensor, task: Tensor) -> Tensor:
    """Of each item's outputs for every task, ``(B, T, ...)``, those for its own, ``(B, ...)``."""
    return outputs.squeeze(1) if outputs.shape[1] == 1 else outputs[torch.arange(len(task), device=task.device), task]
