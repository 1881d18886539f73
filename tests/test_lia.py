"""LIA against worked examples, exact EM, other heads, and crowds whose best and worst annotators are known."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from pytorch_lightning import seed_everything
from torch import nn

from lfc.annotations import Annotations, Crowd
from lfc.backbones import MLP
from lfc.batch import CrowdBatch
from lfc.datamodules import CrowdDataModule, SimulatedDataModule
from lfc.functional import confusion_counts, joint_log_likelihood, normalize_rows
from lfc.heads import LIA, SpeeLFC
from lfc.heads import lia as module
from lfc.module import CrowdClassifier
from lfc.testing import check_head
from tests.test_cli import ROOT, fit, metrics, rows
from tests.test_heads import SIZES, B, D, K, N, R, close, crowd, one_item, set_table
from tests.test_training import trainer

G1 = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]]], dtype=torch.float64)
ZERO = torch.zeros(1, 1, dtype=torch.float64)


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    return crowd(torch.randperm(N, generator=torch.Generator().manual_seed(2))[:B])


@pytest.fixture
def features():
    return torch.randn(B, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def table_head(log_h, matrices, **options):
    """A head that knows ``log_h (X, K)`` of its ``X`` inputs, and ``matrices (R, K, K)``."""
    annotators, classes = matrices.shape[:2]
    sizes = {"num_classes": classes, "num_annotators": annotators, "num_items": 1} | options.pop("sizes", {})
    head = LIA(hidden=[], embedding=annotators, in_features=len(log_h), **sizes, **options).double().eval()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    set_table(head.embedding, torch.eye(annotators))
    set_log_h(head, log_h)
    set_matrices(head, matrices)
    return head


def set_log_h(head, log_h):
    head.classifier.weight.data[0] = log_h.T


def set_matrices(head, matrices):
    head.competence_out.weight.data[0, :, :, 0] = matrices.clamp_min(1e-300).log().permute(1, 2, 0)


def g1(**options):
    head = table_head(torch.tensor([[0.7, 0.3]], dtype=torch.float64).log(), G1, **options)
    return head, torch.ones_like(ZERO), one_item(0, 1)


def drawn(**options):
    """A head with parameters that are nothing special, in float64."""
    head = LIA(**SIZES | options).double().eval()
    head.prepare(crowd(torch.arange(N), seed=1))
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head


def matrix(head, x, batch):
    """``Q (A, K, K)`` of each annotation's item and annotator, column by column."""
    said = [replace(batch, label=torch.full_like(batch.label, j)) for j in range(head.num_classes)]
    return torch.stack([head.log_obs(x, each).exp() for each in said], -1)


# --- the matrices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["lse", "mixture"])
def test_rows_are_normalised_over_what_is_said(combine):
    sizes = {"in_features": 1, "num_classes": 2, "num_annotators": 1, "num_items": 1}
    head = LIA(hidden=[], embedding=1, combine=combine, **sizes).double().eval()
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    head.difficulty_out.bias.data[0, :, :, 0] = torch.tensor([[1.0, 0.5], [0.1, 1.0]])
    head.competence_out.bias.data[0, :, :, 0] = torch.tensor([[0.5, -0.5], [0.2, 0.2]])
    got = matrix(head, ZERO, one_item(0))
    assert close(got, [[[0.817574476, 0.182425524], [0.289050497, 0.710949503]]])


def test_the_two_ways_with_the_latent_axis(batch, features):
    for latent, same in ((1, True), (2, False)):
        head = drawn(latent=latent)
        lse = matrix(head, features, batch)
        head.combine = "mixture"
        mixture = matrix(head, features, batch)
        for q in (lse, mixture):
            assert close(q.sum(-1), torch.ones(len(batch.row), K))
        assert close(lse, mixture) == same
    scores = (head.difficulty(features)[batch.row] + competences(head)[batch.annotator]).exp()  # (A, K, K, 2)
    assert close(lse, scores.sum(-1) / scores.sum((-1, -2))[..., None])  # the row-normalised inner product
    assert close(mixture, (scores / scores.sum(-2, keepdim=True)).mean(-1))


def competences(head):
    """``C (R, K, K, L)``, written out."""
    weight, bias = head.competence_out.weight[0], head.competence_out.bias[0]
    return torch.einsum("kjle,re->rkjl", weight, head.embedding.table) + bias


def test_networks_are_selu_on_glorot_weights():
    torch.manual_seed(0)
    head, x = LIA(hidden=[300, 200], **SIZES), torch.randn(4, D)
    first, _, second, _ = head.trunk
    for layer, bound in ((first, (6 / (D + 300)) ** 0.5), (second, (6 / 500) ** 0.5)):
        assert 0.98 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    bound = (6 / (200 + K * K)) ** 0.5  # of each task by itself
    assert 0.98 * bound < LIA(hidden=[200], num_tasks=3, **SIZES).difficulty_out.weight.abs().max() <= bound
    hidden = torch.selu(torch.selu(x @ first.weight.T) @ second.weight.T)
    assert close(head(x), (hidden @ head.classifier.weight[0].T).log_softmax(-1), atol=1e-5)


def test_a_shared_trunk_serves_both():
    apart, shared = LIA(**SIZES), LIA(share_trunk=True, **SIZES)
    size = [sum(p.numel() for p in head.parameters()) for head in (apart, shared)]
    assert size[0] - size[1] == sum(p.numel() for p in apart.trunk.parameters()) > 0
    assert deepcopy(shared).difficulty_trunk is not shared.trunk
    x = torch.randn(3, D)
    for head, same in ((apart, True), (shared, False)):
        before = head.difficulty(x)
        head.trunk[0].bias.data += 1
        assert torch.equal(head.difficulty(x), before) == same


# --- likelihoods and EM ----------------------------------------------------------------------------------------------


def test_worked_example():
    head, x, batch = g1()
    assert close(head(x).exp(), [[0.7, 0.3]]) and close(matrix(head, x, batch), G1)
    assert close(head.annotation_log_prob(x, batch).exp(), [0.69, 0.49])
    assert close(head.log_likelihood(x, batch).exp(), [0.294])
    for q in (head.posterior(x, batch), head.e_step(x, batch)):
        assert close(q, [[6 / 7, 1 / 7]])
    head.finetuning = True
    assert close(head.loss(x, batch), 1.0844135692682968)
    head.finetune = "joint"
    assert close(head.loss(x, batch), 1.2241755116434554)


def test_worked_example_without_the_prior():
    head, x, batch = g1(e_step_prior=False)
    assert close(head.e_step(x, batch), [[0.72, 0.28]])
    assert close(head.posterior(x, batch), [[6 / 7, 1 / 7]])


def test_the_first_targets_are_the_shares_of_the_votes_and_the_next_the_posteriors():
    head = LIA(**SIZES)
    everyone = crowd(torch.arange(N))
    head.prepare(everyone)
    votes = everyone.votes(K)
    shares = torch.where(votes.sum(-1, keepdim=True) > 0, votes / votes.sum(-1, keepdim=True), 1 / K)
    assert close(head.targets, shares) and (head.targets[0] > 0).sum() == 2  # two of three agreed
    assert head.m_step(torch.eye(K)[torch.arange(N) % K], everyone) is None
    assert close(head.targets, torch.eye(K)[torch.arange(N) % K])


@pytest.mark.parametrize("h_weight", ["per_item", "per_annotation"])
def test_em_loss_is_the_loop(h_weight, batch, features):
    head = drawn(h_weight=h_weight, latent=2)
    head.targets.copy_(torch.rand(N, K).softmax(-1))
    log_h, log_obs, total = head(features), head.log_obs(features, batch), 0
    for i in range(B):
        q, mine = head.targets[batch.items[i]], (batch.row == i).nonzero().squeeze(1)
        if len(mine):
            total += (q @ log_h[i]) * (len(mine) if h_weight == "per_annotation" else 1)
        total += sum(q @ log_obs[a] for a in mine)
    assert close(head.loss(features, batch), -total / B)


def test_the_em_loss_has_the_gradient_of_the_joint_likelihood_after_an_e_step(batch, features):
    head = drawn(latent=2)
    with torch.no_grad():
        head.targets[batch.items] = head.e_step(features, batch)
    gradients = [torch.autograd.grad(head.loss(features, batch), list(head.parameters()))]
    likelihood = joint_log_likelihood(head(features), head.log_obs(features, batch), batch.row)
    gradients.append(torch.autograd.grad(-likelihood.sum() / B, list(head.parameters())))
    assert all(mine.any() for mine in gradients[0])
    for mine, other in zip(*gradients, strict=True):
        assert close(mine, other)
    head.e_step_prior = False
    with torch.no_grad():
        head.targets[batch.items] = head.e_step(features, batch)
    other = torch.autograd.grad(head.loss(features, batch), list(head.parameters()))
    assert not close(other[0], gradients[1][0], atol=1e-3)


def falls(prior, trials=120, rounds=12):
    """Of random crowds with classes unequally frequent, in how many a round of exact EM lowered the likelihood."""
    draw, fallen = torch.Generator().manual_seed(0), 0
    items, inputs, annotators, classes = 20, 3, 5, 2
    for _ in range(trials):
        features = torch.eye(inputs, dtype=torch.float64)[torch.randint(inputs, (items,), generator=draw)]
        item = torch.arange(items).repeat_interleave(3)
        who = torch.stack([torch.randperm(annotators, generator=draw)[:3] for _ in range(items)]).flatten()
        said = torch.multinomial(torch.rand(classes, generator=draw) ** 2, len(item), True, generator=draw)
        batch = CrowdBatch(None, torch.arange(items), item, who, said)
        q = normalize_rows(batch.votes(classes).double())
        start = torch.zeros(inputs, classes).double(), torch.ones(annotators, classes, classes).double()
        head = table_head(*start, e_step_prior=prior, sizes={"num_items": items})
        found = []
        with torch.no_grad():
            for _ in range(rounds):
                set_log_h(head, normalize_rows(features.T @ q).clamp_min(1e-300).log())  # mean q of each input
                set_matrices(head, normalize_rows(confusion_counts(q, batch, annotators)))
                found.append(head.log_likelihood(features, batch).sum().item())
                q = head.e_step(features, batch)
        fallen += any(later < now - 1e-9 for now, later in pairwise(found))
    return fallen


def test_em_never_lowers_the_likelihood_unless_the_prior_is_left_out():
    assert falls(prior=True) == 0
    assert falls(prior=False) >= 20


def test_without_difficulty_fine_tuning_is_spee_lfc(batch, features):
    other = SpeeLFC(**SIZES).double()
    set_table(other.ancestral, torch.randn(R, K, K))
    head = table_head(torch.zeros(D, K).double(), other.annotators()["confusion"], sizes={"num_items": N})
    head.difficulty_out.bias.data += torch.randn(1, K, 1, 1)  # the same of everything that may be said
    head.classifier.weight.data[0], head.classifier.bias.data[0] = (
        other.classifier.weight.data,
        other.classifier.bias.data,
    )
    head.finetuning = True
    for each in (head, other):
        each.loss(features, batch).backward()
    assert close(head.loss(features, batch), other.loss(features, batch))
    assert close(head.annotation_log_prob(features, batch), other.annotation_log_prob(features, batch))
    assert close(
        head.competence_out.weight.grad[0, :, :, 0].permute(2, 0, 1), other.ancestral.weight.grad.view(R, K, K)
    )
    assert close(head.classifier.weight.grad[0], other.classifier.weight.grad)
    assert close(head.competence_out.weight.grad[0, :, :, 0].sum(-1), head.difficulty_out.bias.grad[0, :, :, 0])


# --- the contract, in both phases and with every option --------------------------------------------------------------


def tuning(**options):
    head = LIA(**options)
    head.finetuning = True
    return head


@pytest.mark.parametrize("build", [LIA, tuning], ids=["em", "finetuning"])
@pytest.mark.parametrize(
    "options",
    [{"share_trunk": True}, {"latent": 3, "combine": "mixture"}, {"hidden": []}, {"finetune": "joint"}],
    ids=str,
)
def test_contract(build, options):
    check_head(partial(build, **options))


def test_no_fine_tuning_takes_no_steps(batch, features):
    assert LIA(**SIZES).finetune_steps == 1000 and LIA(finetune="none", **SIZES).finetune_steps == 0
    head = drawn(finetune="none")
    before = head.loss(features, batch)
    head.finetuning = True
    assert close(head.loss(features, batch), before)


def test_a_restart_draws_everything_anew():
    head, everyone = LIA(**SIZES), crowd(torch.arange(N))
    head.prepare(everyone)
    before = deepcopy(head.state_dict())
    head.m_step(torch.eye(K)[torch.arange(N) % K], everyone)
    head.restart(everyone)
    for name, value in head.state_dict().items():
        same = "bias" in name or name in ("targets", "profile", "seen")
        assert torch.equal(value, before[name]) == same, name


def test_sparse_gradients_are_the_dense_ones(batch, features):
    dense, sparse = drawn(), drawn()
    sparse.load_state_dict(dense.state_dict())
    sparse.embedding.sparse = True
    for head in (dense, sparse):
        head.loss(features, batch).backward()
    assert sparse.embedding.weight.grad.is_sparse
    assert close(sparse.embedding.weight.grad.to_dense(), dense.embedding.weight.grad)


# --- difficulty and competence ---------------------------------------------------------------------------------------


def test_competence_by_hand():
    head, x, _ = g1()
    right = [0.7 * 0.9 + 0.3 * 0.8, 0.7 * 0.6 + 0.3 * 0.7]
    assert close(head.competence(x), [right])
    assert close(head.competence(x, torch.tensor([1])), [right[1:]])
    assert head.assign(x).tolist() == [0] and head.assign(x, torch.tensor([1])).tolist() == [1]
    mean = G1.log().mean(0).softmax(-1)  # competences are linear in what represents the annotator
    assert close(head.expected_error(x), [1 - 0.7 * mean[0, 0] - 0.3 * mean[1, 1]])


def test_competence_of_pairs_is_the_matrices_diagonal(batch, features, monkeypatch):
    head = drawn(latent=2)
    pairs = CrowdBatch(
        None, torch.arange(B), *(t.flatten() for t in torch.meshgrid(torch.arange(B), torch.arange(R), indexing="ij")),
        label=torch.zeros(B * R, dtype=torch.long),
    )  # fmt: skip
    q = matrix(head, features, pairs).diagonal(dim1=1, dim2=2).view(B, R, K)
    want = (head(features).exp()[:, None] * q).sum(-1)
    assert close(head.competence(features), want)
    monkeypatch.setattr(module, "CHUNK", 2 * B * K * K * 2)  # two annotators at a time, of seven
    assert close(head.competence(features), want)
    some = torch.tensor([5, 0, 2])
    assert close(head.competence(features, some), want[:, some])
    assert torch.equal(head.assign(features), want.argmax(-1)) and want.argmax(-1).unique().numel() > 1
    assert torch.equal(head.assign(features, some), some[want[:, some].argmax(-1)])


def test_shapes(features):
    head = drawn(latent=2)
    assert head.difficulty(features).shape == (B, K, K, 2)
    error = head.expected_error(features)
    assert error.shape == (B,) and (error > 0).all() and (error < 1).all()
    assert head.annotators()["embedding"].shape == (R, 16)


# --- annotators never seen, and their features -----------------------------------------------------------------------


def test_who_never_labelled_is_an_average_annotator(features):
    head, everyone = LIA(**SIZES).double().eval(), crowd(torch.arange(N))
    head.prepare(everyone)
    assert head.seen.all()
    kept = everyone.annotator != 3
    some = replace(everyone, row=everyone.row[kept], annotator=everyone.annotator[kept], label=everyone.label[kept])
    head.prepare(some)
    assert head.seen.tolist() == [r != 3 for r in range(R)]
    mean = head.embedding.table[head.seen].mean(0)
    batch, other = replace(one_item(1), annotator=torch.tensor([3])), replace(one_item(1), annotator=torch.tensor([R]))
    got = head.log_obs(features[:1], batch)
    assert close(head.log_obs(features[:1], other), got)
    assert close(head.competence(features, torch.tensor([3])), 1 - head.expected_error(features)[:, None])
    assert 3 not in head.assign(features)
    head.embedding.weight.data[3] = 9
    assert close(head.log_obs(features[:1], batch), got)
    head.embedding.weight.data[4] = mean
    head.embedding.weight.data[[0, 1, 2, 5, 6]] = mean
    assert close(head.log_obs(features[:1], replace(batch, annotator=torch.tensor([4]))), got)
    head.train()  # in training everyone is who they are
    assert not close(head.log_obs(features[:1], batch), got, atol=1e-3)


F = 4
PROFILES = torch.randn(R, F, generator=torch.Generator().manual_seed(4))


def described(**options):
    everyone = crowd(torch.arange(N))
    head = LIA(**SIZES, profile_features=F, **options).double().eval()
    head.prepare(replace(everyone, profile=PROFILES[everyone.annotator]))
    return head


def test_features_stand_for_annotators(batch, features):
    head = described()
    assert head.embedding is None and head.annotators() == {}
    assert close(head.profile, PROFILES.double())
    got = head.log_obs(features, batch)
    assert close(head.log_obs(features, replace(batch, profile=PROFILES[batch.annotator])), got)
    twin = head.profile.clone()
    twin[5] = twin[1]
    head.profile.copy_(twin)
    assert close(head.competence(features)[:, 5], head.competence(features)[:, 1])
    stranger = replace(one_item(2), annotator=torch.tensor([R + 40]), profile=PROFILES[1:2])
    known = replace(one_item(2), annotator=torch.tensor([1]))
    assert close(head.log_obs(features[:1], stranger), head.log_obs(features[:1], known))
    assert close(head.competence(features, profile=PROFILES[1:2]), head.competence(features, torch.tensor([1])))


def test_features_beside_embeddings(batch, features):
    head = described(representation="both")
    assert head.competence_out.weight.shape == (1, K, K, 1, F + 16)
    mean = torch.cat([head.profile.mean(0), head.embedding.table.mean(0)])
    want = (head.competence_out(mean[None])[0, 0] + head.difficulty(features)).squeeze(-1).softmax(-1)
    error = 1 - (head(features).exp() * want.diagonal(dim1=1, dim2=2)).sum(-1)
    assert close(head.expected_error(features), error)
    own = torch.cat([PROFILES[1].double(), head.embedding.table.mean(0)])
    q = (head.competence_out(own[None])[0, 0] + head.difficulty(features)).squeeze(-1).softmax(-1)
    want = (head(features).exp() * q.diagonal(dim1=1, dim2=2)).sum(-1, keepdim=True)
    assert close(head.competence(features, profile=PROFILES[1:2]), want)
    head.loss(features, replace(batch, profile=PROFILES[batch.annotator])).backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


def test_features_can_be_left_alone(batch, features):
    head = described(representation="embedding")
    assert head.profile.numel() == 0 and head.embedding is not None
    assert close(
        head.log_obs(features, replace(batch, profile=PROFILES[batch.annotator])), head.log_obs(features, batch)
    )


def test_features_that_never_come():
    with pytest.raises(ValueError, match="profile"):
        LIA(**SIZES, profile_features=F).prepare(crowd(torch.arange(N)))


# --- several tasks ---------------------------------------------------------------------------------------------------

T = 3


def with_tasks(features):
    task = torch.arange(len(features)) % T
    return torch.cat([features, torch.eye(T)[task].to(features)], -1), task


def test_the_task_chooses_the_output_layers(batch, features):
    head = drawn(in_features=D + T, num_tasks=T, latent=2)
    x, task = with_tasks(features)

    def answers():
        return head(x), head.difficulty(x), head.competence(x), head.posterior(x, batch)

    before = answers()
    for layer in (head.classifier, head.difficulty_out, head.competence_out):
        layer.weight.data[1] += 1
        layer.bias.data[1] += torch.randn_like(layer.bias[1])
    for now, then in zip(answers(), before):
        changed = (now - then).flatten(1).abs().amax(1) > 1e-9
        assert torch.equal(changed, task == 1)


def test_one_task_of_several_is_the_head_of_that_task(batch, features):
    head = drawn(in_features=D + T, num_tasks=T)
    head.targets.copy_(torch.rand(N, K).softmax(-1))
    x, task = with_tasks(features)
    total = 0
    for t in range(T):
        single = LIA(**SIZES).double().eval()
        state = head.state_dict()
        outputs = ("classifier", "difficulty_out", "competence_out")
        single.load_state_dict({k: v[t : t + 1] if k.startswith(outputs) else v for k, v in state.items()})
        kept = (task == t)[batch.row]
        part = replace(batch, row=batch.row[kept], annotator=batch.annotator[kept], label=batch.label[kept])
        total += single.loss(features, part)
        mine = task == t
        assert close(single(features)[mine], head(x)[mine])
        assert close(single.competence(features)[mine], head.competence(x)[mine])
        assert close(single.posterior(features, part)[mine], head.posterior(x, batch)[mine])
    assert close(head.loss(x, batch), total)


# --- training --------------------------------------------------------------------------------------------------------


class WithOracles(CrowdDataModule):
    """A simulated crowd, and two annotators who label everything: one always right, one always wrong."""

    def __init__(self, **loading):
        base = SimulatedDataModule(num_items=300, num_annotators=20, labels_per_item=5, crowd="mixed", seed=1)
        old, train = base.table, torch.arange(300)
        gold, said = old.gold[:300], old.annotations
        right, wrong = (torch.full_like(train, len(old.annotators) + extra) for extra in (0, 1))
        table = Crowd(
            items=old.items,
            annotators=[*old.annotators, "right", "wrong"],
            classes=old.classes,
            annotations=Annotations.from_long(
                torch.cat([said.item, train, train]),
                torch.cat([said.annotator, right, wrong]),
                torch.cat([said.label, gold, (gold + 1) % 3]),
                len(old.items),
            ),
            split=old.split,
            gold=old.gold,
        )
        super().__init__(crowd=table, **loading)
        self.features, self.in_features = base.features, base.in_features

    def load_inputs(self):
        return self.features


def train(data, epochs, lr=0.01, **options):
    seed_everything(0, verbose=False)
    backbone = MLP(data.in_features, hidden=[], standardize=True)
    sizes = {"num_classes": data.num_classes, "num_annotators": data.num_annotators, "num_items": data.num_items}
    head = LIA(in_features=backbone.out_features, **sizes, **options)
    model, lightning = CrowdClassifier(backbone, head, partial(torch.optim.Adam, lr=lr)), trainer(epochs)
    lightning.fit(model, datamodule=data)
    lightning.test(model, datamodule=data, verbose=False)
    return model.eval(), {key: value.item() for key, value in lightning.callback_metrics.items()}


SHORT = {"em_steps": 50, "em_rounds": 4, "finetune_steps": 50}


def test_an_annotator_who_is_always_right_comes_first_and_one_always_wrong_last():
    data = WithOracles(batch_size=64)
    model, scores = train(data, epochs=60, **SHORT)
    assert model.em.finetuning and model.em.done
    with torch.no_grad():
        competence = model.head.competence(model.features(data.features[:300])).mean(0)
    assert competence.argmax() == data.num_annotators - 2 and competence.argmin() == data.num_annotators - 1
    assert competence[-2] > 0.9 and competence[-1] < 0.1
    assert scores["labels/acc"] > 0.97


def test_inferred_labels_are_better_than_majority_vote():
    data = SimulatedDataModule(
        num_items=400, num_annotators=30, labels_per_item=3, crowd="mixed", adversaries=0.1, spammers=0.2, batch_size=64
    )
    _, scores = train(data, epochs=60, **SHORT)
    assert scores["labels/acc"] > scores["labels/majority_acc"] + 0.05
    assert scores["test/acc"] > 0.9


def test_fit_has_rounds_of_em_and_then_fine_tuning(tmp_path):
    optimizer = ["--model.optimizer=Adam", "--model.optimizer.amsgrad=true", "--model.optimizer.betas=[0.9,0.99]"]
    fit(tmp_path, "--data.num_items=120", "--data.num_annotators=20", "--data.batch_size=30",
        f"--model.head={ROOT}/configs/head/lia.yaml", "--model.head.em_steps=8", "--model.head.em_rounds=3",
        "--model.head.finetune_steps=9", "--model.head.latent=2", "--trainer.max_epochs=20", *optimizer)  # fmt: skip
    run = tmp_path / "quickstart" / "LIA-seed0"
    history = rows(run / "history.csv")
    assert metrics(run)["epochs"] == len(history) == 3 * 2 + 3
    found = [row["train/em_round"] for row in history]
    assert [float(value) if value else None for value in found] == [None, 1, None, 2, None, 3, None, None, None]
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["em"]["finetuning"] and saved["em"]["done"] and saved["em"]["round"] == 3
    group = saved["optimizer_states"][0]["param_groups"][0]
    assert group["amsgrad"] and list(group["betas"]) == [0.9, 0.99]
