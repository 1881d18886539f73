"""The crowd mixture model against worked examples, its limits, and crowds whose groups are known."""

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer, seed_everything
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from lfc.backbones import MLP
from lfc.batch import CrowdBatch
from lfc.cli import main
from lfc.datamodules import SimulatedDataModule
from lfc.errors import UserError
from lfc.functional import normalize_rows
from lfc.heads import CMM, Head, MajorityVote, SpeeLFC
from lfc.heads.cmm import switched
from lfc.module import CrowdClassifier
from lfc.testing import check_head
from tests.test_heads import close, one_item

ROOT = Path(__file__).resolve().parents[1]
KINDS = ["global", "individual", "gated"]
N, R, K, M = 40, 8, 4, 3


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def simplex(*shape: int) -> Tensor:
    return normalize_rows(torch.rand(*shape, dtype=torch.float64) + 0.05)


def random_crowd(items: int = N, annotators: int = R, classes: int = K, each: int = 4) -> CrowdBatch:
    """Items with up to ``each`` annotations, the first without any and the last annotator silent."""
    row = torch.arange(items).repeat_interleave(each)[torch.rand(items * each) < 0.8]
    row = row[row > 0]
    size = len(row)
    return CrowdBatch(
        None, torch.arange(items), row, torch.randint(annotators - 1, (size,)), torch.randint(classes, (size,))
    )


def tabular(crowd: CrowdBatch, classes: int = K, annotators: int = R, **options) -> CMM:
    """A head in float64 whose features are the log-probabilities of the classes."""
    sizes = {"num_classes": classes, "num_annotators": annotators, "num_items": len(crowd)}
    head = CMM(in_features=classes, **sizes, **options).double().eval()
    torch.nn.init.eye_(head.classifier.weight)
    torch.nn.init.zeros_(head.classifier.bias)
    return head


def set_groups(head: CMM, alpha: Tensor, beta: Tensor, membership: Tensor | None = None) -> CMM:
    head.alpha, head.beta = alpha.clone(), beta.clone()
    if membership is not None:
        head.membership = membership.clone()
    return head


def randomized(crowd: CrowdBatch, groups: int = M, **options) -> CMM:
    head = tabular(crowd, groups=groups, **options)
    head.prepare(crowd)
    set_groups(head, simplex(groups), simplex(groups, K, K), simplex(R, groups))
    if head.gate is not None:
        head.gate.weight.data.normal_()
    return head


def objective(head: CMM, features: Tensor, crowd: CrowdBatch) -> float:
    with torch.no_grad():
        return (head.log_likelihood(features, crowd).sum() + head.log_prior()).item()


# --- worked example --------------------------------------------------------------------------------------------------


def example(kind: str = "global", **options) -> tuple[CMM, Tensor, CrowdBatch]:
    """Three who say 0 and one who says 1, in groups of .25 and .75."""
    crowd = one_item(0, 0, 0, 1)
    head = tabular(crowd, 2, annotators=4, groups=2, kind=kind, alpha_prior=0.0, beta_prior=0.0, **options)
    alpha = torch.tensor([0.25, 0.75], dtype=torch.float64)
    beta = torch.tensor([[[0.9, 0.1], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    set_groups(head, alpha, beta, alpha.expand(4, 2))
    head.annotations.fill_(1)
    if head.gate is not None:
        head.gate.bias.data = alpha.log()
    return head, torch.tensor([[0.8, 0.2]], dtype=torch.float64).log(), crowd


@pytest.mark.parametrize("kind", KINDS)
def test_worked_example(kind):
    head, x, crowd = example(kind)
    assert close(head.annotation_log_prob(x, crowd).exp(), [0.56, 0.56, 0.56, 0.44])
    assert close(head.log_likelihood(x, crowd), [-2.560436037828656])
    q = head.responsibilities(x, crowd)  # summed over classes
    assert close(q[0], [0.321428571 + 0.008928571, 0.535714286 + 0.133928571], atol=2e-9)
    assert close(q[3], [0.045454545 + 0.102272727, 0.681818182 + 0.170454545], atol=2e-9)
    head.m_step(head.e_step(x, crowd), crowd)
    assert close(head.targets, [[3.298701299, 0.701298701]])
    assert close(head.alpha, [0.284699675, 0.715300325])
    first = [[0.954983923, 0.045016077], [0.207547170, 0.792452830]]
    assert close(head.beta, [first, [[0.702127660, 0.297872340]] * 2])
    assert head.log_prior() == 0


def test_posteriors_of_the_worked_example_class_by_class():
    """``q[j](m, k)`` as the share of the targets that each cell explains."""
    head, x, _ = example()
    zero = [[0.321428571, 0.008928571], [0.535714286, 0.133928571]]
    one = [[0.045454545, 0.102272727], [0.681818182, 0.170454545]]
    for label, q in enumerate(torch.tensor([zero, one], dtype=torch.float64)):
        counts, targets, groups = head._global(x.exp(), one_item(label))
        assert close(counts[:, :, label], q, atol=2e-9) and close(counts[:, :, 1 - label], torch.zeros(2, 2))
        assert close(targets, q.sum(0)[None], atol=2e-9) and close(groups, q.sum(1)[None], atol=2e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_an_annotator_who_said_0_twice(kind):
    head, x, _ = example(kind)
    stranger = replace(one_item(0, 0), annotator=torch.tensor([77, 77]))
    who, posterior = head.group_posterior(x, stranger)
    assert who.tolist() == [77] and close(posterior, [[0.422009864, 0.577990136]])
    apart = replace(one_item(0, 0), annotator=torch.tensor([900, 5]))
    who, posterior = head.group_posterior(x, apart)
    assert who.tolist() == [5, 900] and close(posterior, head.responsibilities(x, one_item(0, 0)))


@pytest.mark.parametrize("kind", ["global", "gated"])
def test_annotators_are_of_the_groups_that_their_training_annotations_say(kind):
    crowd = random_crowd()
    head, x = randomized(crowd, kind=kind), simplex(N, K).log()
    head.m_step(head.e_step(x, crowd), crowd)
    who, posterior = head.group_posterior(x, crowd)
    found = head.annotators()
    assert close(found["embedding"][who], posterior) and close(found["embedding"][R - 1], head.alpha)
    assert found["group"].equal(found["embedding"].argmax(-1))
    want = [sum(found["embedding"][r, m] * head.beta[m] for m in range(M)) for r in range(R)]
    assert close(found["confusion"], torch.stack(want))


# --- limits and symmetries -------------------------------------------------------------------------------------------


def test_individual_with_a_group_an_annotator_is_spee_lfc():
    crowd, x = random_crowd(), simplex(N, K).log()
    confusion = simplex(R, K, K)
    head = set_groups(randomized(crowd, R, kind="individual"), simplex(R), confusion, torch.eye(R).double())
    other = SpeeLFC(in_features=K, num_classes=K, num_annotators=R, num_items=N).double()
    other.load_state_dict({"ancestral.weight": confusion.log().flatten(1)}, strict=False)
    other.classifier = head.classifier
    assert close(head.annotation_log_prob(x, crowd), other.annotation_log_prob(x, crowd))
    assert close(head.posterior(x, crowd), other.posterior(x, crowd))
    assert close(head.annotators()["confusion"], other.annotators()["confusion"])


def same_step(head: CMM, other: CMM, x: Tensor, crowd: CrowdBatch, merge: Tensor | None = None) -> None:
    """Both say the same, and a round of EM makes the same of them; ``merge (M, M')`` adds groups up."""
    for name in ("annotation_log_prob", "posterior", "log_likelihood"):
        assert close(getattr(head, name)(x, crowd), getattr(other, name)(x, crowd)), name
    for one in (head, other):
        one.m_step(one.e_step(x, crowd), crowd)
    merge = torch.eye(other.groups).double() if merge is None else merge
    assert close(head.targets, other.targets)
    assert close(head.alpha @ merge, other.alpha)
    joint = torch.einsum("m,mkj,mn->nkj", head.alpha, head.beta, merge)
    assert close(joint, other.alpha[:, None, None] * other.beta)


@pytest.mark.parametrize("kind", ["individual", "gated"])
def test_shares_that_are_equal_for_all_make_the_global_model(kind):
    crowd, x = random_crowd(), simplex(N, K).log()
    head, other = randomized(crowd, kind=kind, alpha_prior=0.0), randomized(crowd, alpha_prior=0.0)
    set_groups(head, other.alpha, other.beta, other.alpha.expand(R, M))
    if head.gate is not None:
        head.gate.weight.data.zero_()
        head.gate.bias.data = other.alpha.log()
    same_step(head, other, x, crowd)


def test_a_gate_of_zeros_is_the_global_model_with_equal_shares():
    crowd, x = random_crowd(), simplex(N, K).log()
    head, other = randomized(crowd, kind="gated"), randomized(crowd)
    head.gate.reset_parameters()
    set_groups(other, torch.full((M,), 1 / M, dtype=torch.float64), head.beta)
    same_step(head, other, x, crowd)


def test_global_likelihood_knows_only_the_crowds_matrix():
    crowd, x = random_crowd(), simplex(N, K).log()
    for groups in (2, 5):
        head = randomized(crowd, groups, alpha_prior=0.0, beta_prior=0.0)
        other = randomized(crowd, 1, alpha_prior=0.0, beta_prior=0.0)
        set_groups(other, torch.ones(1).double(), head.matrix[None])
        want = sum(head.alpha[m] * head.beta[m] for m in range(groups))
        assert close(head.matrix, want)
        for name in ("annotation_log_prob", "posterior", "log_likelihood"):
            assert close(getattr(head, name)(x, crowd), getattr(other, name)(x, crowd)), name
        for one in (head, other):
            one.m_step(one.e_step(x, crowd), crowd)
        assert close(head.targets, other.targets)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_groups_are_one_group(kind):
    crowd, x = random_crowd(), simplex(N, K).log()
    head, other = randomized(crowd, 3, kind=kind), randomized(crowd, 2, kind=kind)
    for one in (head, other):
        one.alpha_prior = one.beta_prior = 0.0
    merge = torch.tensor([[1, 0], [0, 1], [0, 1]], dtype=torch.float64)
    head.beta[2] = head.beta[1]
    head.membership = normalize_rows(torch.cat([head.membership[:, :2], 2 * head.membership[:, 1:2]], 1))
    set_groups(other, head.alpha @ merge, head.beta[:2], head.membership @ merge)
    if head.gate is not None:
        head.gate.weight.data[2] = head.gate.weight[1]
        head.gate.bias.data.copy_(torch.tensor([0.3, -0.7, -0.7], dtype=torch.float64))
        other.gate.weight.data = head.gate.weight[:2]
        other.gate.bias.data = torch.tensor([0.3, -0.7 + math.log(2)], dtype=torch.float64)
    same_step(head, other, x, crowd, merge)
    assert close(head.annotators()["embedding"] @ merge, other.annotators()["embedding"])
    assert close(head.beta[1], head.beta[2])  # and they stay so


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_the_groups_does_not_matter(kind):
    crowd, x, order = random_crowd(), simplex(N, K).log(), torch.tensor([2, 0, 1])
    head = randomized(crowd, kind=kind)
    other = set_groups(deepcopy(head), head.alpha[order], head.beta[order], head.membership[:, order])
    if head.gate is not None:
        other.gate.weight.data, other.gate.bias.data = head.gate.weight[order], head.gate.bias[order]
    assert close(other.responsibilities(x, crowd), head.responsibilities(x, crowd)[:, order])
    assert close(other.group_posterior(x, crowd)[1], head.group_posterior(x, crowd)[1][:, order])
    same_step(head, other, x, crowd, torch.eye(M).double()[:, order])
    assert close(other.annotators()["embedding"], head.annotators()["embedding"][:, order])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [0.0, 1.0])
def test_a_round_is_the_loop_over_annotations(kind, prior, monkeypatch):
    monkeypatch.setattr("lfc.heads.cmm.CHUNK", 7)
    crowd, x = random_crowd(), simplex(N, K).log()
    head = randomized(crowd, kind=kind, alpha_prior=prior, beta_prior=prior)
    f, gate = x.exp(), head.e_step(x, crowd)[:, K:]
    counts, targets = torch.zeros(M, K, K).double(), torch.zeros(N, K).double()
    by_annotator, by_item = torch.zeros(R, M).double(), torch.zeros(N, M).double()
    old = deepcopy(head)
    for i, r, y in zip(crowd.row.tolist(), crowd.annotator.tolist(), crowd.label.tolist()):
        g = {"global": old.alpha, "individual": old.membership[r], "gated": gate[i] if gate.numel() else None}[kind]
        q = g[:, None] * old.beta[:, :, y] * f[i]  # (M, K)
        q = q / q.sum()
        counts[:, :, y] += q
        targets[i] += q.sum(0)
        by_annotator[r] += q.sum(1)
        by_item[i] += q.sum(1)
    head.m_step(head.e_step(x, crowd), crowd)
    alpha = (counts.sum((1, 2)) + prior) / (counts.sum() + M * prior)
    assert close(head.alpha, alpha) and close(head.targets, targets)
    assert close(head.beta, (counts + prior) / (counts + prior).sum(-1, keepdim=True))
    if kind == "individual":
        given = by_annotator.sum(1, keepdim=True)
        assert close(head.membership[:-1], ((by_annotator + prior / M) / (given + prior))[:-1])
        assert close(head.membership[-1], alpha)  # who said nothing
    if kind == "gated":
        assert close(head.gate_targets, by_item)


def test_cheap_statistics_are_those_of_the_whole_tensor():
    crowd, x = random_crowd(), simplex(N, K).log()
    head = randomized(crowd)
    votes = crowd.votes(K).double()
    q = torch.einsum("ik,m,mkj->ijmk", x.exp(), head.alpha, head.beta)
    q = votes[:, :, None, None] * q / q.sum((2, 3), keepdim=True)
    counts, targets, groups = head._global(x.exp(), crowd)
    assert close(counts, q.sum(0).permute(1, 2, 0)) and close(targets, q.sum((1, 2)))
    assert close(groups[0], q.sum((0, 1, 3)))


# --- EM --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["global", "individual"])
@pytest.mark.parametrize("alpha_prior", [0.0, 1.0])
@pytest.mark.parametrize("beta_prior", [0.0, 1.0])
@pytest.mark.parametrize("start", ["shares", "random"])
def test_exact_rounds_never_lower_the_objective(kind, alpha_prior, beta_prior, start):
    for seed in range(3):
        torch.manual_seed(seed)
        crowd = random_crowd()
        head = tabular(crowd, kind=kind, alpha_prior=alpha_prior, beta_prior=beta_prior, start=start)
        head.prepare(crowd)
        x = normalize_rows(head.targets).log().clamp_min(-700)
        values = []
        for _ in range(40):
            values.append(objective(head, x, crowd))
            head.m_step(head.e_step(x, crowd), crowd)
            x = normalize_rows(head.targets).log().clamp_min(-700)  # what a network without limits would say
        rises = torch.tensor(values).double().diff()
        assert rises.min() > -1e-8 * abs(values[0]) and rises.max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_log_prior(kind):
    crowd = random_crowd()
    head = randomized(crowd, kind=kind, alpha_prior=2.0, beta_prior=3.0)
    want = 3 * head.beta.log().sum()
    if kind == "global":
        want += 2 * head.alpha.log().sum()
    if kind == "individual":
        want += 2 / M * head.membership[:-1].log().sum()  # the last annotator said nothing
    assert close(head.log_prior(), want)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_after_an_e_step_is_that_of_the_likelihood(kind):
    crowd, x = random_crowd(), torch.randn(N, K).double().requires_grad_()
    head = randomized(crowd, kind=kind)
    parameters = [x, *head.parameters()]
    want = torch.autograd.grad(-head.log_likelihood(x, crowd).sum() / N, parameters)
    head.m_step(head.e_step(x, crowd).detach(), crowd)
    for got, expected in zip(torch.autograd.grad(head.loss(x, crowd), parameters), want):
        assert close(got, expected)


def test_log_likelihood_is_the_sum_over_votes():
    crowd, x = random_crowd(), simplex(N, K).log()
    head = randomized(crowd)
    p = torch.stack([sum(f[k] * head.matrix[k] for k in range(K)) for f in x.exp()])
    assert close(head.log_likelihood(x, crowd), (crowd.votes(K) * p.log()).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_differ_at_first(kind):
    crowd = random_crowd()
    head = tabular(crowd, kind=kind)
    head.prepare(crowd)
    gaps = [(head.beta[a] - head.beta[b]).abs().max() for a in range(M) for b in range(a)]
    assert min(gaps) > 0.02 and head.targets.sum() == pytest.approx(len(crowd.row))
    assert close(head.targets, normalize_rows(crowd.votes(K).double()) * crowd.votes(K).sum(-1, keepdim=True), 1e-6)


def test_first_groups_are_by_what_the_others_said():
    """Those who agree with all, who are alone against all, and who are one of two camps."""
    said = [[0, 0, 0, 0]] * 3 + [[1, 1, 1, 1]] * 3 + [[0, 0, 1, 1]] * 3
    row = torch.arange(9).repeat_interleave(4)
    crowd = CrowdBatch(None, torch.arange(9), row, torch.zeros(36, dtype=torch.long), torch.tensor(said).flatten())
    head = tabular(crowd, 2, 1, groups=3)
    group = head._first_groups(normalize_rows(crowd.votes(2).double()), crowd)
    assert len(set(group[:24].tolist())) == 1 and len(set(group[[24, 26]].tolist())) == 2
    assert len(group.unique()) == 3


def test_nobody_is_wholly_of_a_group_at_first():
    crowd = random_crowd()
    head = tabular(crowd, kind="individual", alpha_prior=0.0)
    head.prepare(crowd)
    ranked = head.membership[:-1].sort(-1).values
    assert close(ranked, torch.tensor([1 / 6, 1 / 6, 2 / 3]).double().expand(R - 1, 3), atol=1e-6)
    assert close(head.membership[-1], head.alpha)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["shares", "random"])
def test_starts_differ_from_one_another_and_not_from_themselves(kind, start):
    crowd = random_crowd()
    head = tabular(crowd, kind=kind, start=start)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        head.restart(crowd)
        found.append(head.beta.clone())
    assert found[0].equal(found[1]) and not close(found[0], found[2], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_random_start_is_a_mean_of_the_shares_and_what_was_said(kind):
    crowd = random_crowd()
    head = tabular(crowd, start="random", kind=kind, beta_prior=0.0)
    shares = normalize_rows(crowd.votes(K).double())
    torch.manual_seed(3)
    group, rest = head._first_groups(shares, crowd), torch.rand(M, dtype=torch.float64)
    torch.manual_seed(3)
    head.prepare(crowd)
    counts = torch.zeros(M, K, K).double()
    for i, j, m in zip(crowd.row, crowd.label, group):
        counts[m, :, j] += (1 - rest[m]) * shares[i] + rest[m] * torch.eye(K).double()[j]
    assert close(head.beta, normalize_rows(counts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["shares", "random"])
@pytest.mark.parametrize("groups", [1, 3, 20])
@pytest.mark.filterwarnings("error")
def test_small_crowds(kind, start, groups):
    none = torch.empty(0, dtype=torch.long)
    long = torch.tensor
    crowds = [
        CrowdBatch(None, torch.arange(3), none, none, none),
        CrowdBatch(None, torch.arange(1), long([0]), long([0]), long([1])),
        CrowdBatch(None, torch.arange(4), torch.arange(4), torch.arange(4) % 2, long([0, 1, 1, 0])),
        CrowdBatch(None, torch.arange(3), long([0, 0, 0, 1]), long([0, 1, 1, 2]), long([1, 1, 1, 1])),
    ]
    for crowd in crowds:
        for prior in (0.0, 1.0):
            options = {"groups": groups, "alpha_prior": prior, "beta_prior": prior, "start": start}
            head = tabular(crowd, 2, 5, kind="global" if groups == 1 and kind == "gated" else kind, **options)
            assert close(
                head.annotators()["confusion"].sum(-1), torch.ones(5, 2), atol=1e-6
            )  # before anything is known
            head.prepare(crowd)
            x = torch.tensor([[800.0, 0.0]]).double().expand(len(crowd), 2)  # a network that is wholly sure
            for _ in range(3):
                head.m_step(head.e_step(x, crowd), crowd)
                state = [*head.buffers(), head.log_likelihood(x, crowd), head.posterior(x, crowd), head.loss(x, crowd)]
                assert all(tensor.isfinite().all() for tensor in state)
                assert close(head.beta.sum(-1), torch.ones(groups, 2)) and close(head.alpha.sum(), 1.0)
                assert close(head.membership.sum(-1), torch.ones(5))
                assert close(head.targets.sum(), float(len(crowd.row)), atol=1e-6) or prior == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["shares", "random"])
@pytest.mark.parametrize("groups", [2, 4])
def test_contract(kind, start, groups):
    check_head(partial(CMM, kind=kind, start=start, groups=groups))


@pytest.mark.parametrize(
    "options", [{"groups": 0}, {"groups": 1, "kind": "gated"}, {"alpha_prior": -1.0}, {"beta_prior": -0.5}], ids=str
)
def test_bad_options_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        CMM(in_features=1, num_classes=2, num_annotators=1, num_items=1, **options)


# --- warnings --------------------------------------------------------------------------------------------------------


def test_switched_classes_are_noticed():
    crowd = random_crowd()
    head = randomized(crowd, 1)
    right = torch.full((K, K), 0.1).double().fill_diagonal_(0.7)
    head.beta = right[None]
    assert head.warnings() == []
    head.beta = right[[0, 2, 1, 3]][None]
    (message,) = head.warnings()
    assert "1 as 2, 2 as 1)" in message and "restart_criterion" in message
    assert switched(head.beta[0]).tolist() == [0, 2, 1, 3] and switched(right) is None


def test_too_few_annotations_are_noticed():
    crowd = random_crowd()
    for kind, count in (("individual", 1), ("global", 0)):
        head = randomized(crowd, kind=kind)
        head.beta = torch.eye(K).double().expand(M, K, K)
        assert head.warnings() == []
        head.annotations = torch.tensor([2, 2, 3, 3, 3, 50, 60, 0])
        assert len(head.warnings()) == count


# --- crowds whose groups are known -----------------------------------------------------------------------------------


def fit(data: SimulatedDataModule, head: type[Head], epochs: int, seed: int = 0, **options) -> CrowdClassifier:
    seed_everything(seed)
    backbone = MLP(data.in_features, hidden=[16], standardize=True)
    sizes = {name: getattr(data, name) for name in ("num_classes", "num_annotators", "num_items")}
    model = CrowdClassifier(backbone, head(in_features=16, **sizes, **options), partial(torch.optim.Adam, lr=0.01))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, limit_val_batches=0, **quiet)
    trainer.fit(model, datamodule=data)
    return model.eval()


def accuracy(data: SimulatedDataModule, model: CrowdClassifier) -> float:
    with torch.no_grad():
        right = [(model(batch.inputs).argmax(-1) == batch.gold).float() for batch in data.loader("test")]
    return torch.cat(right).mean().item()


def test_global_groups_beat_the_majority_vote():
    data = SimulatedDataModule(num_annotators=1000, seed=1, batch_size=128)
    model = fit(data, CMM, 20)
    assert accuracy(data, model) > 0.88
    assert accuracy(data, fit(data, MajorityVote, 8)) < 0.8
    assert model.head.warnings() == []


def test_individual_groups_are_those_of_the_annotators():
    data = SimulatedDataModule(num_annotators=60, num_items=1500, labels_per_item=8, seed=2, batch_size=128)
    model = fit(data, CMM, 20, kind="individual")
    group = model.head.annotators()["group"]
    assert adjusted_rand_score(data.groups, group) > 0.8
    spammers = data.groups == 2
    (found,) = group[spammers].mode().values[None].tolist()
    assert (group[spammers] == found).float().mean() > 0.9 and (group[~spammers] != found).float().mean() > 0.9
    assert accuracy(data, model) > 0.9
    # annotators that training never saw are told by what they say
    crowd = next(iter(data.loader("train")))
    strangers = replace(crowd, annotator=crowd.annotator + 1000)
    with torch.no_grad():
        features = model.features(crowd.inputs)
        who, posterior = model.head.group_posterior(features, strangers)
    assert who.min() >= 1000
    assert (posterior.argmax(-1) == group[who - 1000]).float().mean() > 0.7


def test_global_needs_nobodys_name():
    settings = {"num_annotators": 50, "num_items": 300, "seed": 3, "batch_size": 64}
    data, nameless = SimulatedDataModule(**settings), SimulatedDataModule(**settings)
    nameless.table.annotations.annotator.zero_()
    models = [fit(each, CMM, 3) for each in (data, nameless)]
    states = [model.head.state_dict() for model in models]
    for name in ("alpha", "beta", "targets", "classifier.weight"):
        assert states[0][name].equal(states[1][name]), name
    assert states[0]["annotations"].count_nonzero() > 1 and states[1]["annotations"].count_nonzero() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_command_line(kind, tmp_path, capsys):
    small = ["--data.num_items=120", "--data.num_annotators=20", "--trainer.max_epochs=2", "--run.wandb=off"]
    head = ["--model.head=CMM", f"--model.head.kind={kind}", "--model.head.groups=2", "--model.restarts=2"]
    quiet = ["--trainer.enable_progress_bar=false", f"--run.root={tmp_path}"]
    main(["fit", f"--config={ROOT}/configs/quickstart.yaml", *small, *head, *quiet])
    (table,) = tmp_path.rglob("annotators.csv")
    lines = table.read_text().splitlines()
    column = lines[0].split(",").index("group")
    assert {line.split(",")[column] for line in lines[1:]} <= {"0", "1"}
