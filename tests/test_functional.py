"""Crowd arithmetic against loops that can be read aloud, worked examples, and finite differences."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from lfc import functional
from lfc.batch import CrowdBatch

LIKELIHOODS = [functional.annotation_log_likelihood, functional.joint_log_likelihood]
SEEDS = range(5)
NOBODY = 2  # the item of every random crowd that has no annotations


def close(got: Tensor, want: object, atol: float = 1e-9) -> bool:
    return torch.allclose(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=atol)


def random_crowd(seed: int, items: int = 6, annotations: int = 11, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(B, K)``, ``log_obs (A, K)`` and ``row (A,)``, in float64."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(items, classes, generator=draw, dtype=torch.float64)
    log_obs = torch.rand(annotations, classes, generator=draw, dtype=torch.float64).log()
    row = torch.randint(items - 1, (annotations,), generator=draw)
    return logits, log_obs, row + (row >= NOBODY)


def annotations_of(item: int, row: Tensor) -> list[int]:
    return [a for a in range(len(row)) if row[a] == item]


# --- the two likelihoods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_annotation_log_likelihood_is_the_loop(seed):
    logits, log_obs, row = random_crowd(seed)
    t, obs = logits.softmax(-1), log_obs.exp()
    want = [math.log(sum(t[row[a], k] * obs[a, k] for k in range(3))) for a in range(len(row))]
    assert close(functional.annotation_log_likelihood(t.log(), log_obs, row), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_joint_quantities_are_the_loop(seed):
    logits, log_obs, row = random_crowd(seed)
    t, obs = logits.softmax(-1), log_obs.exp()
    joint = torch.empty_like(t)
    for item in range(len(t)):
        for k in range(3):
            joint[item, k] = t[item, k] * math.prod(obs[a, k].item() for a in annotations_of(item, row))
    assert close(functional.log_joint(t.log(), log_obs, row), joint.log())
    assert close(functional.joint_log_likelihood(t.log(), log_obs, row), joint.sum(-1).log())
    assert close(functional.posterior(t.log(), log_obs, row), joint / joint.sum(-1, keepdim=True))


def test_item_without_annotations_adds_nothing_and_keeps_its_prior():
    logits, log_obs, row = random_crowd(0)
    log_t = logits.log_softmax(-1)
    assert NOBODY not in row
    assert close(functional.joint_log_likelihood(log_t, log_obs, row)[NOBODY], 0.0)
    assert close(functional.posterior(log_t, log_obs, row)[NOBODY], log_t[NOBODY].exp())


def test_no_annotations_at_all():
    log_t, nothing, row = torch.rand(4, 3).log_softmax(-1), torch.empty(0, 3), torch.empty(0, dtype=torch.long)
    assert functional.annotation_log_likelihood(log_t, nothing, row).shape == (0,)
    assert close(functional.joint_log_likelihood(log_t, nothing, row), [0.0] * 4, atol=1e-6)
    assert close(functional.posterior(log_t, nothing, row), log_t.exp(), atol=1e-6)


def test_many_annotations_of_one_item_do_not_underflow():
    log_t, log_obs = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1e-4, 2e-4]]).log().expand(2000, 2)
    row = torch.zeros(2000, dtype=torch.long)
    assert torch.isfinite(functional.joint_log_likelihood(log_t, log_obs, row)).all()
    assert close(functional.posterior(log_t, log_obs, row), [[0.0, 1.0]])


# --- a worked example: t = (.7, .3); one annotator says 0, another says 1 --------------------------------------------

CONFUSION = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]]], dtype=torch.float64)
SAID = torch.stack([CONFUSION[0, :, 0], CONFUSION[1, :, 1]]).log()  # (A, K)
BOTH_ON_ONE = torch.tensor([0, 0])


@pytest.fixture
def logits() -> Tensor:
    return torch.tensor([[0.7, 0.3]], dtype=torch.float64).log().requires_grad_()


def test_worked_example_per_annotation(logits):
    log_t = logits.log_softmax(-1)
    likelihood = functional.annotation_log_likelihood(log_t, SAID, BOTH_ON_ONE)
    assert close(likelihood.exp(), [0.69, 0.49])
    assert close(likelihood.sum(), -1.0844135692682968)
    assert close((log_t + SAID).softmax(-1), [[0.63 / 0.69, 0.06 / 0.69], [0.28 / 0.49, 0.21 / 0.49]])
    (gradient,) = torch.autograd.grad(likelihood.sum(), logits)
    assert close(gradient, [[0.63 / 0.69 + 0.28 / 0.49 - 1.4, 0.06 / 0.69 + 0.21 / 0.49 - 0.6]])
    assert close(gradient, [[0.08447205, -0.08447205]], atol=5e-9)


def test_worked_example_joint(logits):
    log_t = logits.log_softmax(-1)
    likelihood = functional.joint_log_likelihood(log_t, SAID, BOTH_ON_ONE)
    assert close(likelihood, [-1.2241755116434554])
    assert close(functional.posterior(log_t, SAID, BOTH_ON_ONE), [[6 / 7, 1 / 7]])
    (gradient,) = torch.autograd.grad(likelihood.sum(), logits)
    assert close(gradient, [[6 / 7 - 0.7, 1 / 7 - 0.3]])
    assert close(functional.posterior(torch.zeros(1, 2).double(), SAID, BOTH_ON_ONE), [[0.72, 0.28]])  # flat prior


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_per_annotation_is_that_of_em(seed):
    logits, log_obs, row = random_crowd(seed)
    logits.requires_grad_(), log_obs.requires_grad_()
    log_t = logits.log_softmax(-1)
    functional.annotation_log_likelihood(log_t, log_obs, row).sum().backward()
    want = torch.zeros_like(logits)
    for a, item in enumerate(row):
        responsibility = (log_t[item] + log_obs[a]).softmax(-1).detach()
        want[item] += responsibility - log_t[item].exp().detach()
        assert close(log_obs.grad[a], responsibility)
    assert close(logits.grad, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_of_the_joint_is_that_of_em(seed):
    logits, log_obs, row = random_crowd(seed)
    logits.requires_grad_(), log_obs.requires_grad_()
    log_t = logits.log_softmax(-1)
    functional.joint_log_likelihood(log_t, log_obs, row).sum().backward()
    posterior = functional.posterior(log_t, log_obs, row).detach()
    assert close(logits.grad, posterior - log_t.exp().detach())
    assert close(log_obs.grad, posterior[row])


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_gradient_is_the_finite_difference(likelihood):
    logits, log_obs, row = random_crowd(1)
    logits.requires_grad_(), log_obs.requires_grad_()
    assert gradcheck(lambda logits, obs: likelihood(logits.log_softmax(-1), obs, row), (logits, log_obs))


def test_likelihoods_agree_where_no_item_has_two_annotations():
    logits, log_obs, _ = random_crowd(2)
    log_t, row = logits.log_softmax(-1), torch.tensor([4, 0, 3, 1])
    alone, joint = (likelihood(log_t, log_obs[:4], row) for likelihood in LIKELIHOODS)
    assert close(joint[row], alone)
    assert close(joint.sum(), alone.sum())


def test_likelihoods_differ_where_an_annotation_is_said_twice():
    logits, log_obs, _ = random_crowd(2)
    log_t, row, twice = logits.log_softmax(-1), torch.tensor([4, 0, 3, 1]), torch.tensor([0, 1, 2, 3] * 2)
    once = functional.annotation_log_likelihood(log_t, log_obs[:4], row).sum()
    joint = functional.joint_log_likelihood(log_t, log_obs[twice], row[twice]).sum()
    assert joint - 2 * once > 1e-2  # E[x^2] > E[x]^2: a true class that is shared makes repetition likelier


# --- confusion matrices and their distance ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_confusion_counts_are_the_loop(seed):
    logits, _, row = random_crowd(seed)
    draw = torch.Generator().manual_seed(seed)
    annotator, label = torch.randint(4, row.shape, generator=draw), torch.randint(3, row.shape, generator=draw)
    batch, posterior = CrowdBatch(None, torch.arange(len(logits)), row, annotator, label), logits.softmax(-1)
    want = torch.zeros(5, 3, 3, dtype=torch.float64)  # the fifth annotator said nothing
    for item, who, said in zip(row, annotator, label):
        for true in range(3):
            want[who, true, said] += posterior[item, true]
    assert close(functional.confusion_counts(posterior, batch, num_annotators=5), want)


def test_confusion_counts_of_known_classes_have_the_truth_in_rows():
    batch = CrowdBatch(None, torch.arange(2), *torch.tensor([[0, 1, 0], [0, 0, 1], [1, 1, 0]]))
    counts = functional.confusion_counts(torch.eye(2), batch, num_annotators=2)
    assert counts.tolist() == [[[0, 1], [0, 1]], [[1, 0], [0, 0]]]


def test_normalize_rows_sum_to_one_and_empty_rows_are_uniform():
    counts = torch.tensor([[[2.0, 6.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 0.0, 1e-30]]]).requires_grad_()
    rows = functional.normalize_rows(counts)
    assert close(rows, [[[0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.0, 0.5]]], atol=1e-7)
    rows[0, :2].square().sum().backward()
    assert torch.isfinite(counts.grad).all()


def test_jensen_shannon_of_known_pairs():
    certain, flat = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()
    assert close(functional.jensen_shannon(certain, flat, floor=1e-15), 0.311278124)
    assert close(functional.jensen_shannon(certain, flat), 0.311278124, atol=3e-6)  # the floor costs a millionth
    assert close(functional.jensen_shannon(certain, certain), 0.0)
    assert close(functional.jensen_shannon(certain, certain.flip(0)), 1.0, atol=5e-6)
    assert close(functional.jensen_shannon(flat, certain), functional.jensen_shannon(certain, flat))


@pytest.mark.parametrize(("classes", "want"), [(3, 0.459147917), (8, 0.716917187)])
def test_matrix_divergence_of_the_identity_and_the_uniform(classes, want):
    identity, uniform = torch.eye(classes).double(), torch.full((classes, classes), 1 / classes, dtype=torch.float64)
    assert close(functional.jensen_shannon(identity, uniform, floor=1e-15).mean(), want)
    assert close(functional.matrix_divergence(identity, uniform), want, atol=2e-5)


def test_matrix_divergence_is_the_mean_over_rows_of_each_matrix():
    predicted, true = torch.rand(2, 4, 3, 3).softmax(-1)
    rows = [[functional.jensen_shannon(p, q) for p, q in zip(*matrices)] for matrices in zip(predicted, true)]
    assert close(functional.matrix_divergence(predicted, true), torch.tensor(rows).mean(1), atol=1e-6)
