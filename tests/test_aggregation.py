"""Aggregators against loops one can read aloud, published crowds, and a peer."""

import itertools
import math
import resource
from functools import partial

import pytest
import torch

from lfc.aggregation import GLAD, MMCE, Aggregator, DawidSkene, MajorityVote, Votes
from lfc.aggregation import base as base_module
from lfc.aggregation import glad as glad_module
from lfc.aggregation import mmce as mmce_module
from lfc.aggregation.base import Bar, first_greatest, normalize_joint, one_hot
from lfc.annotations import Annotations, Crowd, read_crowd
from lfc.batch import CrowdBatch
from lfc.errors import UserError
from lfc.functional import confusion_counts, matrix_divergence, normalize_rows
from tests.crowds import shared


def draw(seed=0, items=60, annotators=8, labels=4, classes=3, diagonal=0.7):
    """A crowd of annotators with the same diagonal and random errors; votes in no order. And the gold."""
    g = torch.Generator().manual_seed(seed)
    off = torch.rand(annotators, classes, classes, generator=g).double()
    off.diagonal(dim1=1, dim2=2).zero_()
    confusion = (1 - diagonal) * off / off.sum(-1, keepdim=True) + diagonal * torch.eye(classes).double()
    gold = torch.randint(classes, (items,), generator=g)
    item = torch.arange(items).repeat_interleave(labels)
    annotator = torch.rand(items, annotators, generator=g).argsort(1)[:, :labels].reshape(-1)
    label = torch.multinomial(confusion[annotator, gold[item]], 1, generator=g).squeeze(-1)
    order = torch.randperm(len(item), generator=g)
    return Votes(item[order], annotator[order], label[order], items, annotators, classes), gold, confusion


def triples(votes):
    return list(zip(votes.item.tolist(), votes.annotator.tolist(), votes.label.tolist()))


def rising(history, slack=1e-9):
    return all(b >= a - slack * abs(a) for a, b in itertools.pairwise(history))


def accuracy(result, crowd):
    return (result.label == crowd.gold).double().mean().item()


def expected_accuracy(result, gold):
    """With ties broken at random."""
    best = (result.posterior == result.posterior.amax(-1, keepdim=True)).double()
    return (best[torch.arange(len(gold)), gold] / best.sum(-1)).mean().item()


# votes


def test_votes_of_a_crowd_and_of_a_batch():
    table = Annotations.from_long(
        item=torch.tensor([2, 0, 2]), annotator=torch.tensor([1, 0, 0]), label=torch.tensor([1, 0, 1]), num_items=4
    )
    crowd = Crowd(list("abcd"), ["x", "y"], ["no", "yes"], table, torch.zeros(4).long(), torch.zeros(4).long())
    votes = Votes.from_crowd(crowd)
    assert sorted(triples(votes)) == [(0, 0, 0), (2, 0, 1), (2, 1, 1)]
    assert (votes.num_items, votes.num_annotators, votes.num_classes, len(votes)) == (4, 2, 2, 3)
    assert votes.labelled.tolist() == [True, False, True, False] and votes.annotator_counts.tolist() == [2, 1]
    batch = CrowdBatch(None, torch.tensor([7, 5, 3, 1]), table.item, table.annotator, table.label)
    assert triples(Votes.from_batch(batch, num_classes=2, num_annotators=2)) == triples(votes)
    assert MajorityVote().fit(crowd).label.tolist() == [0, -1, 1, -1]


def test_sums_are_those_of_a_loop():
    votes, _, _ = draw(classes=3)
    table = torch.randn(votes.num_annotators, 3, 3, dtype=torch.double)
    rows = torch.rand(votes.num_items, 3, dtype=torch.double)
    by_item, by_cell = torch.zeros(votes.num_items, 3).double(), torch.zeros(votes.num_annotators, 3, 3).double()
    for i, r, l in triples(votes):
        by_item[i] += table[r, l]
        by_cell[r, l] += rows[i]
    torch.testing.assert_close(votes.sum_by_item(table), by_item)
    torch.testing.assert_close(votes.sum_by_cell(rows), by_cell)
    batch = CrowdBatch(None, torch.arange(votes.num_items), votes.item, votes.annotator, votes.label)
    torch.testing.assert_close(
        votes.sum_by_cell(rows).transpose(1, 2), confusion_counts(rows, batch, votes.num_annotators)
    )


@pytest.mark.parametrize(
    ("triple", "message"),
    [
        (([0, 1], [0, 0], [0]), "label is .*one length"),
        (([0, 5], [0, 0], [0, 1]), "item goes from 0 to 5 where .0, 2. was wanted"),
        (([0, 1], [0, -1], [0, 1]), "annotator goes from -1"),
        (([0, 1], [0, 0], [0, 2]), "label goes from 0 to 2"),
    ],
)
def test_bad_votes(triple, message):
    with pytest.raises(UserError, match=message):
        Votes(*(torch.tensor(x) for x in triple), 2, 2, 2)


def test_votes_must_be_whole_numbers():
    with pytest.raises(UserError, match="float32"):
        Votes(torch.zeros(2), torch.zeros(2).long(), torch.zeros(2).long(), 2, 2, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(MajorityVote, kind="loud"), "kind: 'loud' where one of soft, hard"),
        (partial(DawidSkene, kind="two_coin"), "kind"),
        (partial(DawidSkene, pseudo_count=-1), "pseudo_count"),
        (partial(DawidSkene, max_iter=0), "max_iter"),
        (partial(DawidSkene, tol=-1e-3), "tol"),
        (partial(DawidSkene, restarts=0), "restarts"),
        (partial(DawidSkene, criterion="gold"), "criterion"),
        (partial(GLAD, sweeps=0), "sweeps"),
        (partial(MMCE, gamma=0), "gamma"),
        (partial(MMCE, folds=1), "folds"),
        (partial(MMCE, steps=0), "steps"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UserError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("build", [MajorityVote, DawidSkene, GLAD, MMCE])
def test_nothing_to_aggregate(build):
    empty = torch.zeros(0).long()
    with pytest.raises(UserError, match="no annotations"):
        build().fit(Votes(empty, empty, empty, 3, 2, 2))
    with pytest.raises(UserError, match="at least two"):
        build().fit(Votes(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), 1, 1, 1))


@pytest.mark.parametrize("build", [MajorityVote, DawidSkene, GLAD, partial(MMCE, gamma=1.0)])
def test_the_order_of_votes_does_not_matter(build):
    votes, _, _ = draw(seed=3)
    order = torch.randperm(len(votes), generator=torch.Generator().manual_seed(0))
    other = Votes(votes.item[order], votes.annotator[order], votes.label[order], 60, 8, 3)
    torch.testing.assert_close(build().fit(other).posterior, build().fit(votes).posterior, atol=1e-6, rtol=0)


# majority vote


def test_majority_vote():
    votes = Votes(
        torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        torch.tensor([0, 1, 2, 0, 1, 1, 2]),
        torch.tensor([2, 2, 1, 0, 2, 1, 1]),
        3,
        4,
        3,
    )
    soft, hard = MajorityVote().fit(votes), MajorityVote(kind="hard").fit(votes)
    third = 1 / 3
    want = torch.tensor([[0, third, 2 * third], [0.25, 0.5, 0.25], [third] * 3]).double()
    torch.testing.assert_close(soft.posterior, want, atol=1e-7, rtol=0)
    assert hard.posterior[:2].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert soft.label.tolist() == hard.label.tolist() == [2, 1, -1]
    assert hard.annotators["confusion"][1].tolist() == [[third] * 3, [0, 0.5, 0.5], [0, 0, 1]]
    assert hard.annotators["ability"].tolist() == pytest.approx([1 / 2, 2 / 3, 1 / 2, 1 / 3])
    assert soft.annotators["ability"].tolist() == pytest.approx(
        [(2 / 3 + 1 / 4) / 2, (2 / 3 + 3 / 4) / 3, (1 / 3 + 1 / 2) / 2, 1 / 3]
    )
    counts = torch.tensor([[0.25, 0, 0], [0.5, 0, third], [0.25, 0, 2 * third]]).double()  # annotator 0: class by label
    torch.testing.assert_close(soft.annotators["confusion"][0], normalize_rows(counts), atol=1e-7, rtol=0)
    assert soft.history == [] and soft.converged


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_tie_goes_to_the_first_class(kind):
    votes = Votes(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([2, 1]), 1, 2, 3)
    assert MajorityVote(kind=kind).fit(votes).label.tolist() == [1]
    assert first_greatest(torch.tensor([[0.0, 0.0], [1.0, 2.0]])).tolist() == [0, 1]


# Dawid-Skene


def dawid_skene_by_hand(votes, q, pseudo_count=0.0):
    """One M-step and one E-step in plain Python: prior, matrices, posterior, log-likelihood."""
    n, r, k = votes.num_items, votes.num_annotators, votes.num_classes
    said = triples(votes)
    seen = sorted({i for i, _, _ in said})
    prior = [sum(q[i][c] for i in seen) / len(seen) for c in range(k)]
    confusion = [[[pseudo_count] * k for _ in range(k)] for _ in range(r)]
    for i, who, l in said:
        for c in range(k):
            confusion[who][c][l] += q[i][c]
    for who, c in itertools.product(range(r), range(k)):
        total = sum(confusion[who][c])
        confusion[who][c] = [x / total if total else 1 / k for x in confusion[who][c]]
    posterior, likelihood = [[1 / k] * k for _ in range(n)], 0.0
    for i in seen:
        joint = list(prior)
        for item, who, l in said:
            if item == i:
                joint = [p * confusion[who][c][l] for c, p in enumerate(joint)]
        likelihood += math.log(sum(joint))
        posterior[i] = [p / sum(joint) for p in joint]
    return prior, confusion, posterior, likelihood


@pytest.mark.parametrize("pseudo_count", [0.0, 0.3])
def test_iterations_are_those_of_plain_python(pseudo_count):
    votes, _, _ = draw(items=12, annotators=5, labels=3)
    votes = Votes(votes.item, votes.annotator, votes.label, 13, 6, 3)  # one item and one annotator without votes
    q = MajorityVote().fit(votes).posterior.tolist()
    history = []
    for _ in range(3):
        prior, confusion, q, likelihood = dawid_skene_by_hand(votes, q, pseudo_count)
        history.append(
            likelihood + (pseudo_count and pseudo_count * torch.tensor(confusion).double().log().sum().item())
        )
    result = DawidSkene(pseudo_count=pseudo_count, max_iter=3, tol=0).fit(votes)
    torch.testing.assert_close(result.posterior, torch.tensor(q).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.annotators["confusion"], torch.tensor(confusion).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.options["prior"], torch.tensor(prior).double(), atol=1e-6, rtol=0)
    assert result.history == pytest.approx(history, rel=1e-6)
    accuracy = [sum(prior[c] * confusion[r][c][c] for c in range(3)) for r in range(6)]
    assert result.annotators["ability"].tolist() == pytest.approx(accuracy, rel=1e-6)


def test_posterior_is_that_of_all_ways_to_label_the_items():
    """The E-step is the marginal of the joint distribution over every assignment of classes to items."""
    votes, _, _ = draw(items=4, annotators=3, labels=2)
    result = DawidSkene(max_iter=2, tol=0, pseudo_count=0.5).fit(votes)
    prior, confusion = result.options["prior"], result.annotators["confusion"]
    marginal, total = torch.zeros(4, 3).double(), 0.0
    for assignment in itertools.product(range(3), repeat=4):
        p = math.prod(prior[k].item() for k in assignment)
        p *= math.prod(confusion[r, assignment[i], l].item() for i, r, l in triples(votes))
        total += p
        for i, k in enumerate(assignment):
            marginal[i, k] += p
    torch.testing.assert_close(result.posterior, marginal / total, atol=1e-9, rtol=0)
    assert result.history[-1] == pytest.approx(math.log(total) + 0.5 * confusion.log().sum().item())


@pytest.mark.parametrize("kind", ["classic", "one_coin"])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("pseudo_count", [0.0, 0.1, 1.0])
def test_the_objective_never_decreases(kind, hard, pseudo_count):
    for seed in range(10):
        for classes in (2, 4):
            votes, _, _ = draw(seed, items=25, labels=3, classes=classes, diagonal=0.5)
            result = DawidSkene(kind, hard, pseudo_count, max_iter=30, tol=0, restarts=2, seed=seed).fit(votes)
            assert rising(result.history), (seed, classes)


def test_the_likelihood_alone_may_decrease_under_pseudo_counts():
    crowd = read_crowd(shared("rte"))
    plain = []
    for n in range(1, 15):
        result = DawidSkene(pseudo_count=1.0, max_iter=n, tol=0).fit(crowd)
        plain.append(result.history[-1] - result.annotators["confusion"].log().sum().item())
    assert not rising(plain) and rising(result.history)


def test_one_coin_is_dawid_skene_with_tied_parameters():
    votes, _, _ = draw(classes=3)
    q = MajorityVote().fit(votes).posterior
    for c in (0.0, 0.5):
        right = torch.zeros(8).double()
        for i, r, l in triples(votes):
            right[r] += q[i, l]
        skill = (3 * c + right) / (9 * c + votes.annotator_counts)
        result = DawidSkene("one_coin", pseudo_count=c, max_iter=1).fit(votes)
        want = ((1 - skill) / 2)[:, None, None].expand(8, 3, 3).clone()
        want.diagonal(dim1=1, dim2=2).copy_(skill[:, None])
        torch.testing.assert_close(result.annotators["confusion"], want)
        torch.testing.assert_close(result.annotators["ability"], skill)
    # no tied parameters do better: the M-step is a maximum in every annotator's skill
    coin = DawidSkene("one_coin", max_iter=500, tol=1e-12).fit(votes)
    best = coin.history[-1]
    for step in (-0.01, 0.01):
        moved = coin.annotators["ability"] + step
        log_p = torch.full((60, 3), 0.0).double() + coin.options["prior"].log()
        for i, r, l in triples(votes):
            log_p[i] += ((1 - moved[r]) / 2).log()
            log_p[i, l] += moved[r].log() - ((1 - moved[r]) / 2).log()
        assert log_p.logsumexp(-1).sum() < best
    assert DawidSkene(max_iter=500).fit(votes).history[-1] > best  # more parameters fit better


def test_hard_is_dawid_skene_on_labels_taken_as_true():
    votes, _, _ = draw(seed=5, diagonal=0.6)
    result = DawidSkene(hard=True, max_iter=50, tol=0).fit(votes)
    assert ((result.posterior == 0) | (result.posterior == 1)).all()
    prior, confusion, _, _ = dawid_skene_by_hand(votes, result.posterior.tolist())
    torch.testing.assert_close(result.annotators["confusion"], torch.tensor(confusion).double(), atol=1e-6, rtol=0)
    label = result.label.tolist()
    likelihood = sum(math.log(prior[k]) for k in label) + sum(
        math.log(confusion[r][label[i]][l]) for i, r, l in triples(votes)
    )
    assert result.history[-1] == pytest.approx(likelihood)


def test_an_impossible_item_keeps_its_posterior():
    joint = torch.tensor([[-torch.inf, -torch.inf], [-1000.0, -torch.inf]]).double()
    before = torch.tensor([[0.3, 0.7], [0.5, 0.5]]).double()
    hard, top = DawidSkene(hard=True)._normalize(joint.clone(), before)
    assert hard.tolist() == [[0, 1], [1, 0]] and top.tolist() == [-math.inf, -1000]
    soft, likelihood = normalize_joint(joint, before)
    torch.testing.assert_close(soft, torch.tensor([[0.3, 0.7], [1, 0]]).double(), atol=1e-7, rtol=0)
    assert likelihood.tolist() == [-math.inf, -1000]


def test_many_votes_do_not_underflow():
    votes = Votes(torch.zeros(5000).long(), torch.arange(5000) % 50, (torch.arange(5000) % 3 == 0).long(), 1, 50, 2)
    for build in (DawidSkene, partial(DawidSkene, pseudo_count=1.0), GLAD, partial(MMCE, gamma=1.0)):
        result = build().fit(votes)
        assert result.posterior.isfinite().all() and result.label.tolist() == [0]
        assert all(map(math.isfinite, result.history))


def test_confusion_matrices_are_recovered():
    votes, gold, confusion = draw(items=2000, annotators=20, labels=5, classes=3, diagonal=0.8)
    result = DawidSkene().fit(votes)
    assert matrix_divergence(result.annotators["confusion"], confusion).mean() < 0.02
    assert (result.label == gold).double().mean() > (MajorityVote().fit(votes).label == gold).double().mean()


# restarts and stopping


def test_restarts_keep_the_greatest_objective():
    votes, _, _ = draw(seed=1, items=40, labels=3, diagonal=0.45)
    finals = [DawidSkene(restarts=n, tol=1e-9, max_iter=300).fit(votes).history[-1] for n in range(1, 12)]
    assert finals == sorted(finals) and finals[-1] > finals[0] + 0.01
    again = DawidSkene(restarts=11, tol=1e-9, max_iter=300).fit(votes)
    assert again.history[-1] == finals[-1]
    seeds = {
        DawidSkene(restarts=2, max_iter=2, tol=0, seed=s)._random_start(votes, 1).sum(0)[0].item() for s in range(3)
    }
    assert len(seeds) == 3


def test_random_starts_are_distributions_near_the_vote():
    votes, _, _ = draw()
    votes = Votes(votes.item, votes.annotator, votes.label, 61, 8, 3)
    start = DawidSkene()._random_start(votes, 1)
    torch.testing.assert_close(start[:60].sum(-1), torch.ones(60).double())
    assert not start[60].any() and (start[:60] >= votes.shares()[:60] / 2).all()
    assert (start[:60] - votes.shares()[:60]).abs().mean() > 0.05


def test_restarts_may_be_chosen_by_majority():
    votes, _, _ = draw(seed=1, items=40, labels=3, diagonal=0.45)
    majority = first_greatest(votes.tally)
    options = {"restarts": 11, "tol": 1e-9, "max_iter": 300}
    by_vote = DawidSkene(criterion="majority", **options).fit(votes)
    by_fit = DawidSkene(**options).fit(votes)
    assert (by_vote.label == majority).sum() > (by_fit.label == majority).sum()
    starts = [DawidSkene(**{**options, "restarts": 1})._run(votes, votes.shares(), Bar("", 1, wanted=False))[0]]
    starts += [
        DawidSkene(**options)._run(votes, DawidSkene()._random_start(votes, n), Bar("", 1, wanted=False))[0]
        for n in range(1, 11)
    ]
    agreement = [(start.label == majority).sum().item() for start in starts]
    assert by_vote.history == starts[agreement.index(max(agreement))].history
    assert by_vote.history[-1] < by_fit.history[-1]


def test_stopping():
    votes, _, _ = draw()
    short, full = DawidSkene(tol=1e-3).fit(votes), DawidSkene(tol=0, max_iter=40).fit(votes)
    assert len(full.history) == 40 and not full.converged
    assert short.converged and short.history == full.history[: len(short.history)]
    changes = [abs(b - a) / len(votes) for a, b in itertools.pairwise(full.history)]
    assert len(short.history) == 2 + next(n for n, change in enumerate(changes) if change < 1e-3)


# GLAD


def glad_objective(votes, ability, easiness):
    """Penalised log-likelihood, item by item."""
    n, k = votes.num_items, votes.num_classes
    joint = torch.full((n, k), -math.log(k)).double()
    for i, r, l in triples(votes):
        right = torch.sigmoid(ability[r] * easiness[i].exp())
        row = ((1 - right) / (k - 1)).log().repeat(k)
        row[l] = right.log()
        joint[i] = joint[i] + row
    penalty = ((ability - 1) ** 2).sum() / 2 + ((easiness - 1) ** 2).sum() / 2
    return joint.logsumexp(-1).sum() - penalty, joint.softmax(-1)


@pytest.mark.parametrize("classes", [2, 4])
def test_glad_objective_and_posterior(classes):
    votes, _, _ = draw(items=15, classes=classes)
    result = GLAD(max_iter=4, tol=0).fit(votes)
    value, posterior = glad_objective(votes, result.annotators["ability"], result.items["easiness"])
    assert result.history[-1] == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(result.posterior, posterior)


def test_glad_gradients_are_those_of_finite_differences():
    votes, _, _ = draw(items=10)
    g = torch.Generator().manual_seed(0)
    ability, easiness = (torch.randn(n, generator=g).double() for n in (8, 10))
    right = torch.rand(len(votes), generator=g).double()

    def expected(ability, easiness):
        x = ability[votes.annotator] * easiness.exp()[votes.item]
        data = right * x.sigmoid().log() + (1 - right) * (1 - x.sigmoid()).log()
        return data.sum() - ((ability - 1) ** 2).sum() / 2 - ((easiness - 1) ** 2).sum() / 2

    by_ability, curvature = glad_module.derivatives(ability, votes.annotator, right, scale=easiness.exp()[votes.item])
    by_easiness, _ = glad_module.derivatives(easiness, votes.item, right, factor=ability[votes.annotator])
    h = 1e-5
    for r in range(8):
        e = h * torch.eye(8).double()[r]
        up, at, down = (expected(ability + s * e, easiness) for s in (1, 0, -1))
        assert by_ability[r].item() == pytest.approx(((up - down) / (2 * h)).item(), abs=1e-6)
        assert curvature[r].item() == pytest.approx((-(up - 2 * at + down) / h**2).item(), rel=1e-3, abs=1e-3)
    for i in range(10):
        e = h * torch.eye(10).double()[i]
        difference = (expected(ability, easiness + e) - expected(ability, easiness - e)) / (2 * h)
        assert by_easiness[i].item() == pytest.approx(difference.item(), abs=1e-6)


def test_glad_ends_where_no_step_helps():
    votes, _, _ = draw(items=20)
    result = GLAD(max_iter=2000, tol=1e-13).fit(votes)
    ability = result.annotators["ability"].clone().requires_grad_()
    easiness = result.items["easiness"].clone().requires_grad_()
    value, _ = glad_objective(votes, ability, easiness)
    value.backward()
    assert ability.grad.abs().max() < 1e-3 and easiness.grad.abs().max() < 1e-3


@pytest.mark.parametrize("sweeps", [1, 5])
def test_glad_never_decreases(sweeps):
    for seed in range(8):
        votes, _, _ = draw(seed, items=30, classes=2 + seed % 3, diagonal=0.3 + 0.08 * seed)
        assert rising(GLAD(sweeps, max_iter=30, tol=0, restarts=2, seed=seed).fit(votes).history)


def test_a_step_that_overshoots_is_halved():
    owner, right = torch.zeros(3).long(), torch.tensor([0.9, 0.8, 1.0]).double()
    scale = torch.tensor([20.0, 20.0, 0.1]).double()

    def share(value):
        x = value * scale
        return (right * x + torch.nn.functional.logsigmoid(-x)).sum() - (value - 1) ** 2 / 2

    for start in (-3.0, 0.05, 2.0, 8.0):
        value = torch.tensor([start]).double()
        moved = glad_module._improve(value, owner, right, scale=scale)
        assert share(moved) >= share(value)
    value = torch.tensor([0.5]).double()
    assert share(value - 1) < share(value) < share(glad_module._improve(value, owner, right, scale=scale))
    scale = torch.full((3,), 1e4).double()  # so steep that not even a sixty-fourth of the step helps
    value = torch.tensor([0.002]).double()
    assert share(value - 1 / 64) < share(value)
    assert torch.equal(glad_module._improve(value, owner, right, scale=scale), value)
    for start in (-2.0, 1.0, 3.0):  # easiness of an item whose annotators are of either kind
        value, factor = torch.tensor([start]).double(), torch.tensor([3.0, -2.0, 0.5]).double()
        x = [factor * v.exp() for v in (value, glad_module._improve(value, owner, right, factor=factor))]
        before, after = (
            (right * z + torch.nn.functional.logsigmoid(-z)).sum() - ((z[0] / 3).log() - 1) ** 2 / 2 for z in x
        )
        assert after >= before


def test_glad_of_those_without_votes():
    votes, _, _ = draw(classes=4)
    wider = Votes(votes.item, votes.annotator, votes.label, 61, 9, 4)
    result = GLAD().fit(wider)
    confusion = result.annotators["confusion"]
    torch.testing.assert_close(confusion.sum(-1), torch.ones(9, 4).double())
    assert result.annotators["ability"][8] == result.items["easiness"][60] == 1 and (confusion[8] == 0.25).all()
    assert result.history == pytest.approx(GLAD().fit(votes).history)


def test_glad_finds_adversaries_and_hard_items():
    g = torch.Generator().manual_seed(0)
    items, annotators = 300, 12
    gold = torch.randint(2, (items,), generator=g)
    easy = torch.arange(items) < 200
    chance = torch.where(easy, 0.95, 0.6)[:, None].expand(items, annotators).clone()
    chance[:, 0] = 1 - chance[:, 0]  # says the opposite
    said = torch.where(torch.rand(items, annotators, generator=g) < chance, gold[:, None], 1 - gold[:, None])
    item, annotator = torch.meshgrid(torch.arange(items), torch.arange(annotators), indexing="ij")
    votes = Votes(item.reshape(-1), annotator.reshape(-1), said.reshape(-1), items, annotators, 2)
    result = GLAD().fit(votes)
    ability, easiness = result.annotators["ability"], result.items["easiness"]
    assert ability[0] < 0 < ability[1:].min()
    assert easiness[easy].mean() > easiness[~easy].mean() + 0.5
    confusion = result.annotators["confusion"]
    assert confusion[0, 0, 0] < 0.3 and (confusion[1:, 0, 0] > 0.7).all()
    x = ability[annotator] * easiness.exp()[item]
    torch.testing.assert_close(confusion[:, 1, 1], x.sigmoid().mean(0))
    assert (result.label == gold).double().mean() >= (MajorityVote().fit(votes).label == gold).double().mean()


# minimax conditional entropy


def mmce_objective(votes, sigma, tau, alpha, beta, q=None):
    """The dual, item by item; with ``q`` the function that the M-step improves."""
    k = votes.num_classes
    joint = torch.zeros(votes.num_items, k).double()
    for i, r, l in triples(votes):
        joint[i] = joint[i] + (sigma[r] + tau[i]).log_softmax(-1)[:, l]
    penalty = alpha / 2 * (sigma**2).sum() + beta / 2 * (tau**2).sum()
    if q is not None:
        return (q * joint).sum() - penalty
    return (joint - math.log(k)).logsumexp(-1).sum() - penalty, joint.softmax(-1)


def mmce_model(votes, **options):
    aggregator = MMCE(**options)
    result, model, _ = aggregator._run(votes, votes.shares(), Bar("", 1, wanted=False))
    return result, model.scores[: votes.num_annotators], model.scores[votes.num_annotators :]


@pytest.mark.parametrize("classes", [2, 3])
def test_mmce_objective_and_posterior(classes):
    votes, _, _ = draw(items=20, annotators=6, labels=3, classes=classes)
    result, sigma, tau = mmce_model(votes, gamma=0.5, max_iter=3, tol=0)
    alpha = 0.5 * classes**2
    beta = alpha * (60 / 6) / (60 / 20)
    value, posterior = mmce_objective(votes, sigma, tau, alpha, beta)
    assert result.history[-1] == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(result.posterior, posterior)
    torch.testing.assert_close(MMCE(0.5, max_iter=3, tol=0).fit(votes).annotators["confusion"], sigma.softmax(-1))


def test_mmce_gradient_is_that_of_finite_differences(monkeypatch):
    votes, _, _ = draw(items=5, annotators=4, labels=3)
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 3, 3, generator=g).double()
    weight = torch.tensor([2.0] * 4 + [5.0] * 5).double().view(-1, 1, 1)
    q = torch.rand(5, 3, generator=g).double().softmax(-1)
    value, slope = mmce_module.objective(scores, weight, votes, q)
    assert value == pytest.approx(mmce_objective(votes, scores[:4], scores[4:], 2, 5, q).item())
    for place in range(81):
        e = 1e-5 * one_hot(torch.tensor([place]), 81).view(9, 3, 3)
        up, down = (mmce_module.objective(scores + s * e, weight, votes, q)[0] for s in (1, -1))
        assert slope.view(-1)[place].item() == pytest.approx((up - down) / 2e-5, abs=1e-6)
    monkeypatch.setattr(mmce_module, "CHUNK", 27)  # three votes at a time
    in_parts = mmce_module.objective(scores, weight, votes, q)
    assert in_parts[0] == pytest.approx(value)
    torch.testing.assert_close(in_parts[1], slope)


def test_mmce_ends_where_no_step_helps():
    votes, _, _ = draw(items=20)
    _, sigma, tau = mmce_model(votes, gamma=0.5, max_iter=500, steps=50, tol=1e-13)
    sigma, tau = sigma.clone().requires_grad_(), tau.clone().requires_grad_()
    value, _ = mmce_objective(votes, sigma, tau, 4.5, 4.5 * 20 / 8)
    value.backward()
    assert sigma.grad.abs().max() < 1e-3 and tau.grad.abs().max() < 1e-3


def test_mmce_never_decreases():
    for seed in range(6):
        votes, _, _ = draw(seed, items=25, classes=2 + seed % 2, diagonal=0.4 + 0.1 * seed)
        result = MMCE(gamma=0.25 * 2**seed, steps=1 + seed, max_iter=25, tol=0, restarts=2, seed=seed).fit(votes)
        assert rising(result.history)


def test_mmce_of_those_without_votes():
    votes, _, _ = draw()
    wider = Votes(votes.item, votes.annotator, votes.label, 70, 9, 3)
    assert MMCE(1.0).fit(wider).history == pytest.approx(MMCE(1.0).fit(votes).history, rel=1e-6)


def test_mmce_refuses_a_step_that_makes_it_worse(monkeypatch):
    votes, _, _ = draw(items=10)
    q = votes.shares()
    good = MMCE(1.0)._m_step(votes, q, None)
    search = mmce_module.minimize

    def astray(*args, **options):
        found = search(*args, **options)
        found.x = found.x + 1.0
        found.fun = args[0](found.x)[0]
        return found

    monkeypatch.setattr(mmce_module, "minimize", astray)
    assert MMCE(1.0)._m_step(votes, q, good) is good


def test_mmce_is_chosen_by_held_out_votes():
    votes, _, _ = draw(items=30, annotators=6)
    result = MMCE(folds=3, max_iter=10).fit(votes)
    scores = result.options["scores"]
    assert set(scores) == {0.25, 0.5, 1, 2, 4} and result.options["gamma"] == max(scores, key=scores.get)
    fold = torch.randperm(len(votes), generator=torch.Generator().manual_seed(0)) % 3
    want = 0.0
    for number in range(3):
        keep = fold != number
        rest = Votes(votes.item[keep], votes.annotator[keep], votes.label[keep], 30, 6, 3)
        found, sigma, tau = mmce_model(rest, gamma=2.0, max_iter=10)
        for a in (~keep).nonzero().squeeze(-1).tolist():
            i, r, l = triples(votes)[a]
            q = found.posterior[i] if rest.labelled[i] else torch.full((3,), 1 / 3)
            want += (q * (sigma[r] + tau[i]).softmax(-1)[:, l]).sum().log().item()
    assert scores[2.0] == pytest.approx(want / len(votes), rel=1e-9)
    torch.testing.assert_close(result.posterior, MMCE(result.options["gamma"], max_iter=10).fit(votes).posterior)
    one = torch.tensor([0])
    assert MMCE().fit(Votes(one, one, one, 1, 1, 2)).options == {"gamma": 1.0, "scores": {}}


# published crowds


def test_bluebirds():
    crowd = read_crowd(shared("bluebirds"))
    assert (len(crowd.items), len(crowd.annotators)) == (108, 39)
    vote = MajorityVote().fit(crowd)
    assert accuracy(vote, crowd) == expected_accuracy(vote, crowd.gold) == pytest.approx(0.759259, abs=1e-6)
    result = DawidSkene(max_iter=200, tol=0).fit(crowd)
    assert accuracy(result, crowd) == pytest.approx(0.898148, abs=1e-6)
    assert result.history[0] == pytest.approx(-2107.861970, abs=1e-5)  # after the first M-step
    assert result.history[-1] == pytest.approx(-1888.116755, abs=1e-5)
    for gamma in (0.25, 0.5, 1.0):
        assert accuracy(MMCE(gamma).fit(crowd), crowd) == pytest.approx(0.916667, abs=1e-6)


def test_rte():
    crowd = read_crowd(shared("rte"))
    vote = MajorityVote().fit(crowd)
    assert (len(crowd.items), len(crowd.annotators), len(crowd.annotations.label)) == (800, 164, 8000)
    assert (vote.posterior[:, 0] == 0.5).sum() == 65
    assert expected_accuracy(vote, crowd.gold) == pytest.approx(0.896875)
    assert accuracy(DawidSkene(max_iter=200, tol=0).fit(crowd), crowd) == pytest.approx(0.9275)
    assert accuracy(DawidSkene(max_iter=200, tol=0, pseudo_count=1.0).fit(crowd), crowd) == pytest.approx(0.930)
    assert accuracy(MMCE(0.25, steps=500, max_iter=30, tol=0).fit(crowd), crowd) == pytest.approx(0.924, abs=5e-4)
    for aggregator in (DawidSkene(pseudo_count=0.1, max_iter=50, tol=0), GLAD(max_iter=30, tol=0)):
        assert rising(aggregator.fit(crowd).history)


# a peer


def peers():
    pytest.importorskip("crowdkit.aggregation")
    import crowdkit.aggregation
    import pandas

    def frame(votes):
        return pandas.DataFrame({"task": votes.item, "worker": votes.annotator, "label": votes.label})

    return crowdkit.aggregation, frame


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated")
@pytest.mark.parametrize("name", ["DawidSkene", "OneCoinDawidSkene", "MajorityVote"])
def test_crowdkit_agrees(name):
    peer, frame = peers()
    votes, _, _ = draw(seed=2, items=50)
    options = {} if name == "MajorityVote" else {"n_iter": 6, "tol": -1e9}
    theirs = getattr(peer, name)(**options).fit(frame(votes)).probas_.sort_index()
    ours = {
        "DawidSkene": DawidSkene(max_iter=6, tol=0),
        "OneCoinDawidSkene": DawidSkene("one_coin", max_iter=6, tol=0),
        "MajorityVote": MajorityVote(),
    }[name]
    want = torch.from_numpy(theirs[[0, 1, 2]].to_numpy().copy())
    torch.testing.assert_close(ours.fit(votes).posterior, want, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated")
def test_glad_is_no_worse_than_crowdkits():
    peer, frame = peers()
    votes, _, _ = draw(seed=4, items=40)
    theirs = peer.GLAD().fit(frame(votes))
    ability, easiness = (torch.tensor(x.sort_index().to_numpy()) for x in (theirs.alphas_, theirs.betas_))
    result = GLAD().fit(votes)
    assert result.history[-1] > glad_objective(votes, ability, easiness)[0].item() - 1e-3
    torch.testing.assert_close(result.annotators["ability"], ability, atol=0.1, rtol=0)


# size, and the bar


def test_memory_grows_with_annotations_alone():
    """1e5 items x 1e5 annotators would be 1e10 cells."""
    g = torch.Generator().manual_seed(0)
    item, annotator = (torch.randint(100_000, (200_000,), generator=g) for _ in range(2))
    label = torch.randint(2, (200_000,), generator=g)
    votes = Votes(item, annotator, label, 100_000, 100_000, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for aggregator in (MajorityVote(), DawidSkene(max_iter=3), GLAD(max_iter=2), MMCE(1.0, steps=3, max_iter=2)):
        assert aggregator.fit(votes).posterior.shape == (100_000, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


def test_a_fit_uses_one_thread_and_gives_the_others_back(monkeypatch):
    votes, _, _ = draw()
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(MajorityVote, "_steps", lambda self: seen.append(torch.get_num_threads()) or 1)
    torch.set_num_threads(2)
    try:
        MajorityVote().fit(votes)
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_bar_waits_and_needs_a_terminal(monkeypatch, capsys):
    votes, _, _ = draw()
    DawidSkene().fit(votes)
    monkeypatch.setattr(Bar, "patience", -1.0)
    DawidSkene(max_iter=5).fit(votes)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(base_module, "Console", partial(base_module.Console, force_terminal=True))
    DawidSkene(max_iter=5, progress=False).fit(votes)
    assert capsys.readouterr().err == ""
    DawidSkene(max_iter=5).fit(votes)
    assert "DawidSkene" in capsys.readouterr().err


@pytest.mark.parametrize(
    "aggregator",
    [MajorityVote(), DawidSkene(restarts=2, max_iter=7), GLAD(max_iter=4), MMCE(folds=2, max_iter=3, restarts=2)],
)
def test_the_bar_ends_at_its_total(aggregator: Aggregator):
    votes, _, _ = draw()
    with Bar("", aggregator._steps(), wanted=False) as bar:
        aggregator._fit(votes, bar)
    assert bar.done <= bar.total and (bar.done == bar.total or isinstance(aggregator, MajorityVote))
