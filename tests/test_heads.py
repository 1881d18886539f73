"""Heads against worked examples, limits that are known, symmetries that every head has, and the price of a step."""

import inspect
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode

from lfc import functional, heads
from lfc.backbones import MLP
from lfc.batch import CrowdBatch
from lfc.heads import AnnotatorTable, CrowdLayer, Gold, Head, MajorityVote, SpeeLFC, SpeeLFCD
from lfc.heads.majority import vote_distribution

# no two alike, so that an axis can be told by its length
K, D, R, B, N = 5, 6, 7, 9, 13
SIZES = {"in_features": D, "num_classes": K, "num_annotators": R, "num_items": N}


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> Iterator[None]:
    """Tensors here are tiny: threads would only wait for each other."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def build_in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(got: Tensor, want: object, atol: float = 1e-9) -> bool:
    return torch.allclose(got, torch.as_tensor(want, dtype=got.dtype), rtol=0, atol=atol)


def crowd(items: Tensor, seed: int = 0) -> CrowdBatch:
    """Three annotations an item, two of them alike so that no vote is tied; none of the third, one of the last."""
    draw = torch.Generator().manual_seed(seed)
    row, annotator, label = [], [], []
    for i in range(len(items)):
        major, minor = torch.randperm(K, generator=draw)[:2].tolist()
        for who, said in zip(torch.randperm(R, generator=draw).tolist(), [major, minor, major]):
            if i != 2 and (i != len(items) - 1 or said == minor):
                row, annotator, label = [*row, i], [*annotator, who], [*label, said]
    gold = torch.randint(-1, K, (len(items),), generator=draw)
    return CrowdBatch(None, items, *torch.tensor([row, annotator, label]), gold=gold)


def select(batch: CrowdBatch, rows: Tensor) -> CrowdBatch:
    """The items at ``rows``, in that order, with their annotations."""
    place = torch.full((len(batch),), -1)
    place[rows] = torch.arange(len(rows))
    kept = place[batch.row] >= 0
    annotations = [column[kept] for column in (place[batch.row], batch.annotator, batch.label)]
    return CrowdBatch(None, batch.items[rows], *annotations, gold=batch.gold[rows])


def one_item(*said: int, gold: int = -1) -> CrowdBatch:
    """An item to which annotator 0, 1, ... gave these labels."""
    count = len(said)
    annotations = torch.zeros(count, dtype=torch.long), torch.arange(count), torch.tensor(said, dtype=torch.long)
    return CrowdBatch(None, torch.zeros(1, dtype=torch.long), *annotations, gold=torch.tensor([gold]))


def constant(make: Callable[..., Head], t: list[float], annotators: int = 1) -> Head:
    """A head whose network says ``t`` of everything, in float64, without dropout."""
    head = make(in_features=1, num_classes=len(t), num_annotators=annotators, num_items=1).double().eval()
    torch.nn.init.zeros_(head.classifier.weight)
    head.classifier.bias.data = torch.tensor(t, dtype=torch.float64).log()
    return head


def set_table(table: AnnotatorTable, rows: object) -> None:
    table.weight.data = torch.as_tensor(rows, dtype=table.weight.dtype).reshape(table.weight.shape)


def probability(head: Head, label: int, annotator: int = 0) -> Tensor:
    """``p(annotator says label)`` of an item with features 0."""
    batch = replace(one_item(label), annotator=torch.tensor([annotator]))
    return head.annotation_log_prob(torch.zeros(1, head.in_features).double(), batch).exp().detach().squeeze()


# --- every head, with every option that is a choice ------------------------------------------------------------------


def variants() -> list[Any]:
    classes = [getattr(heads, name) for name in heads.__all__]
    params = []
    for head in [c for c in classes if isinstance(c, type) and issubclass(c, Head) and not inspect.isabstract(c)]:
        hints = get_type_hints(head.__init__).items()
        choices = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}
        for values in product(*choices.values()):
            params.append(
                pytest.param(partial(head, **dict(zip(choices, values))), id="-".join([head.__name__, *values]))
            )
    return params


every_head = pytest.mark.parametrize("make", variants())


def trained(make: Callable[..., Head]) -> Head:
    """A head with parameters that are nothing special, in float64, without dropout."""
    torch.manual_seed(1)
    head = make(**SIZES).double().eval()
    head.prepare(crowd(torch.arange(N), seed=1))
    for parameter in head.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return head


@pytest.fixture
def batch() -> CrowdBatch:
    return crowd(torch.randperm(N, generator=torch.Generator().manual_seed(2))[:B])


@pytest.fixture
def features() -> Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def reordered(tensor: Tensor, order: Tensor) -> Tensor:
    """Every axis as long as ``order`` in that order."""
    for axis, length in enumerate(tensor.shape):
        tensor = tensor.index_select(axis, order) if length == len(order) else tensor
    return tensor


def reordered_head(head: Head, order: Tensor) -> Head:
    """A copy with all its state in another order of the classes, or annotators: whichever there are as many of."""
    head = deepcopy(head)
    for module in head.modules():
        for state in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            shape = (-1, *module.shape) if isinstance(module, AnnotatorTable) else state.shape
            state.data.copy_(reordered(state.data.view(shape), order).reshape(state.shape))
    return head


def same_reports(head: Head, other: Head, order: Tensor) -> bool:
    return all(close(other.annotators()[name], reordered(value, order)) for name, value in head.annotators().items())


@every_head
def test_order_of_the_classes_does_not_matter(make, batch, features):
    order = torch.tensor([3, 0, 4, 1, 2])  # class c is now what class order[c] was
    renamed = order.argsort()
    gold = torch.where(batch.gold >= 0, renamed[batch.gold], -1)
    other_batch = replace(batch, label=renamed[batch.label], gold=gold)
    head = trained(make)
    other = reordered_head(head, order)
    assert close(other.loss(features, other_batch), head.loss(features, batch))
    assert close(other(features), head(features)[:, order])
    assert close(other.posterior(features, other_batch), head.posterior(features, batch)[:, order])
    assert close(other.annotation_log_prob(features, other_batch), head.annotation_log_prob(features, batch))
    assert same_reports(head, other, order)


@every_head
def test_order_of_the_annotators_does_not_matter(make, batch, features):
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    other_batch = replace(batch, annotator=order.argsort()[batch.annotator])
    head = trained(make)
    other = reordered_head(head, order)
    assert close(other.loss(features, other_batch), head.loss(features, batch))
    assert close(other.posterior(features, other_batch), head.posterior(features, batch))
    assert same_reports(head, other, order)


@every_head
def test_order_of_the_items_does_not_matter(make, batch, features):
    head, order = trained(make), torch.randperm(B)
    assert close(head.loss(features[order], select(batch, order)), head.loss(features, batch))
    assert close(head.posterior(features[order], select(batch, order)), head.posterior(features, batch)[order])


@every_head
def test_order_of_the_annotations_does_not_matter(make, batch, features):
    head, order = trained(make), torch.randperm(len(batch.row))
    other = replace(batch, row=batch.row[order], annotator=batch.annotator[order], label=batch.label[order])
    assert close(head.loss(features, other), head.loss(features, batch))
    assert close(head.posterior(features, other), head.posterior(features, batch))
    assert close(head.annotation_log_prob(features, other), head.annotation_log_prob(features, batch)[order])


@every_head
@pytest.mark.parametrize("sizes", [[4, 5], [1] * B], ids=["two-parts", "one-by-one"])
def test_a_batch_is_the_sum_of_its_parts(make, batch, features, sizes):
    head = trained(make)
    parts = [(features[rows], select(batch, rows)) for rows in torch.arange(B).split(sizes)]
    total = sum(head.loss(x, part) * len(part) for x, part in parts)
    assert close(total, head.loss(features, batch) * B)
    assert close(torch.cat([head.posterior(x, part) for x, part in parts]), head.posterior(features, batch))


@every_head
def test_items_nobody_labelled_do_not_matter(make, batch, features):
    head, extra = trained(make), torch.tensor([-1, -1])
    spare = torch.tensor([i for i in range(N) if i not in batch.items])[:2]
    longer = replace(batch, items=torch.cat([batch.items, spare]), gold=torch.cat([batch.gold, extra]))
    loss = head.loss(torch.cat([features, torch.randn(2, D).double()]), longer)
    assert close(loss * len(longer), head.loss(features, batch) * B)


@every_head
def test_a_batch_without_annotations_has_no_loss_and_no_gradient(make, batch, features):
    none = torch.empty(0, dtype=torch.long)
    head, empty = trained(make), replace(batch, row=none, annotator=none, label=none, gold=torch.full((B,), -1))
    features.requires_grad_()
    loss = head.loss(features, empty)
    loss.backward()
    assert loss.item() == 0
    gradients = [tensor.grad for tensor in (features, *head.parameters()) if tensor.grad is not None]
    assert gradients and all(close(gradient, torch.zeros_like(gradient), atol=0) for gradient in gradients)
    assert close(head.posterior(features, empty), head(features).exp())


@every_head
def test_posterior_and_forward_are_distributions(make, batch, features):
    head = trained(make)
    for probabilities in (head.posterior(features, batch), head(features).exp()):
        assert probabilities.shape == (B, K) and (probabilities >= 0).all()
        assert close(probabilities.sum(-1), torch.ones(B), atol=1e-6)  # votes are counted in float32


@every_head
def test_annotation_probabilities_sum_to_one_over_labels(make, batch, features):
    head = trained(make)
    each = [head.annotation_log_prob(features, replace(batch, label=torch.full_like(batch.label, k))) for k in range(K)]
    assert close(torch.stack(each).logsumexp(0), torch.zeros(len(batch.row)))


@every_head
def test_gold_is_read_only_by_a_head_that_says_so(make, batch, features):
    head = trained(make)
    with_gold, without = head.loss(features, batch), head.loss(features, replace(batch, gold=None))
    assert close(with_gold, without) != head.needs_gold


@every_head
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_float32_agrees_with_float64(make, batch, features, scale):
    results = []
    for dtype in (torch.float32, torch.float64):
        head, x = trained(make).to(dtype), (scale * features).float().to(dtype).requires_grad_()
        for parameter in head.parameters():
            parameter.data = parameter.data.float().to(dtype)
        loss = head.loss(x, batch)
        gradients = torch.autograd.grad(loss, [x, *head.parameters()], allow_unused=True)
        results.append([loss, *[gradient for gradient in gradients if gradient is not None]])
    for single, double in zip(*results):
        assert torch.isfinite(single).all()
        assert close(single.double(), double.detach(), atol=1e-4 * (1e-3 + double.abs().max().item()))


# --- majority vote and gold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said", "want"),
    [
        ("soft", [2, 2, 0, 1], [0.25, 0.25, 0.5]),
        ("hard", [2, 2, 0, 1], [0.0, 0.0, 1.0]),
        ("soft", [2, 1, 1, 2], [0.0, 0.5, 0.5]),
        ("hard", [2, 1, 1, 2], [0.0, 1.0, 0.0]),  # a tie goes to the first class
        ("hard", [2, 1, 0], [1.0, 0.0, 0.0]),
    ],
)
def test_majority_vote_targets(kind, said, want):
    t, x = [0.5, 0.3, 0.2], torch.zeros(1, 1).double()
    head = constant(partial(MajorityVote, kind=kind), t, annotators=4)
    assert close(head.posterior(x, one_item(*said)), [want])
    assert close(head.loss(x, one_item(*said)), -sum(w * math.log(p) for w, p in zip(want, t)))


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_majority_vote_of_nobody_is_the_networks_opinion(kind):
    head = constant(partial(MajorityVote, kind=kind), [0.5, 0.3, 0.2])
    assert close(head.posterior(torch.zeros(1, 1).double(), one_item()), [[0.5, 0.3, 0.2]])
    assert vote_distribution(torch.zeros(1, 3), kind).tolist() == [[0.0, 0.0, 0.0]]


def test_gold_is_cross_entropy_on_the_gold_that_is_known():
    head, x = constant(Gold, [0.5, 0.3, 0.2]), torch.zeros(4, 1).double()
    none = torch.empty(0, dtype=torch.long)
    batch = CrowdBatch(None, torch.arange(4), none, none, none, gold=torch.tensor([1, -1, 0, -1]))
    assert close(head.loss(x, batch), -(math.log(0.3) + math.log(0.5)) / 4)


# --- crowd layer -----------------------------------------------------------------------------------------------------

KINDS = ["MW", "VW", "VB", "VW+B", "SW"]


def plain_cross_entropy(head: Head, features: Tensor, batch: CrowdBatch) -> Tensor:
    return head(features)[batch.row, batch.label]


@pytest.mark.parametrize("kind", KINDS)
def test_crowd_layer_starts_at_the_softmax_of_the_probabilities(kind):
    head, x = constant(partial(CrowdLayer, kind=kind), [0.7, 0.3]), torch.zeros(1, 1).double()
    assert close(torch.stack([probability(head, 0), probability(head, 1)]), [0.598687660, 0.401312340])
    assert close(head.loss(x, one_item(0)), 0.5130152524)
    assert close(-plain_cross_entropy(head, x, one_item(0)), 0.3566749439)  # which it is not


def test_crowd_layer_matrix_has_the_label_in_rows_and_the_true_class_in_columns():
    head = constant(CrowdLayer, [0.7, 0.3])
    set_table(head.weight, [[2, -1], [0.5, 1]])  # z = W p = (1.1, .65); the transpose would give (1.55, -.4)
    assert close(torch.stack([probability(head, 0), probability(head, 1)]), [0.610639234, 0.389360766])
    columns = torch.tensor([[2, 0.5], [-1, 1]], dtype=torch.float64)
    assert close(head.annotators()["confusion"], columns.softmax(-1)[None])


@pytest.mark.parametrize("kind", KINDS)
def test_crowd_layer_on_log_probabilities_starts_at_plain_cross_entropy(kind, batch, features):
    head = CrowdLayer(kind=kind, input="log_prob", **SIZES).double()
    assert close(head.annotation_log_prob(features, batch), plain_cross_entropy(head, features, batch))
    diagonal = head.annotators()["confusion"].diagonal(dim1=1, dim2=2)
    assert close(diagonal, torch.full((R, K), 0.99), atol=1e-6)


@pytest.mark.parametrize("input", ["prob", "log_prob"])
def test_crowd_layer_kinds_are_special_cases_of_the_matrix(input, batch, features):
    torch.manual_seed(0)
    weight, bias, scale = torch.randn(R, K), torch.randn(R, K), torch.randn(R, 1)

    def log_prob(kind: str, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        torch.manual_seed(1)  # the same classifier
        head = CrowdLayer(kind=kind, input=input, **SIZES).double()
        for table, rows in ((head.weight, weight), (head.bias, bias)):
            if rows is not None:
                set_table(table, rows)
        return head.annotation_log_prob(features, batch)

    assert close(log_prob("VW", weight), log_prob("MW", torch.diag_embed(weight)))
    assert close(log_prob("SW", scale), log_prob("VW", scale.expand(R, K)))
    assert close(log_prob("VW+B", weight), log_prob("VW", weight))
    assert close(log_prob("VW+B", bias=bias), log_prob("VB", bias=bias))
    assert not close(log_prob("VB", bias=bias), log_prob("VB"), atol=1e-2)
    if input == "prob":  # p sums to one, so a bias is a column added to all columns
        matrix = torch.diag_embed(weight) + bias[:, :, None]
        assert close(log_prob("VW+B", weight, bias), log_prob("MW", matrix), atol=1e-6)


def test_crowd_layer_does_not_see_a_constant_added_to_a_column(batch, features):
    head = trained(CrowdLayer)
    before = head.annotation_log_prob(features, batch)
    shift = torch.randn(R, 1, K).double()  # of each true class its own, the same for every label
    set_table(head.weight, head.weight.table + shift)
    assert close(head.annotation_log_prob(features, batch), before)
    set_table(head.weight, head.weight.table + shift.mT)
    assert not close(head.annotation_log_prob(features, batch), before, atol=1e-2)


def test_crowd_layer_is_the_loop(batch, features):
    head = trained(CrowdLayer)
    p, weight = head(features).exp(), head.weight.table
    total = sum((weight[r] @ p[i]).log_softmax(-1)[y] for i, r, y in zip(batch.row, batch.annotator, batch.label))
    assert close(head.loss(features, batch), -total / B)


# --- SpeeLFC ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "diagonal", "want"), [(2, 1.4, 0.598687660), (10, 4.7, 0.817988056)])
def test_spee_lfc_starts_as_published(build_in_float64, classes, diagonal, want):
    confusion = constant(partial(SpeeLFC, diagonal=diagonal), [1 / classes] * classes).annotators()["confusion"]
    assert close(confusion[0], torch.full((classes, classes), (1 - want) / (classes - 1)).fill_diagonal_(want))


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_spee_lfc_starts_with_four_of_five_labels_right(build_in_float64, classes):
    confusion = constant(SpeeLFC, [1 / classes] * classes, annotators=2).annotators()["confusion"]
    assert close(confusion.diagonal(dim1=1, dim2=2), torch.full((2, classes), 0.8))


def test_spee_lfc_worked_example():
    confusion = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]]], dtype=torch.float64)
    head, x = constant(SpeeLFC, [0.7, 0.3], annotators=2), torch.zeros(1, 1).double()
    set_table(head.ancestral, confusion.log())
    assert close(head.annotation_log_prob(x, one_item(0, 1)).exp(), [0.69, 0.49])
    assert close(head.loss(x, one_item(0, 1)), 1.0844135692682968)
    assert close(head.posterior(x, one_item(0, 1)), [[6 / 7, 1 / 7]])
    head.likelihood = "joint"
    assert close(head.loss(x, one_item(0, 1)), 1.2241755116434554)


def test_spee_lfc_is_the_loop(batch, features):
    head = trained(SpeeLFC)
    t, confusion = head(features).exp(), head.annotators()["confusion"]
    annotations = list(zip(batch.row, batch.annotator, batch.label))
    total = sum(torch.log(sum(t[i, k] * confusion[r, k, y] for k in range(K))) for i, r, y in annotations)
    assert close(head.loss(features, batch), -total / B)
    for a, (_, r, y) in enumerate(annotations):
        assert close(head.log_obs(features, batch)[a].exp(), confusion[r, :, y])


def test_spee_lfc_gradient_of_its_matrices_is_that_of_em(batch, features):
    head = trained(SpeeLFC)
    head.loss(features, batch).backward()
    log_t, confusion = head(features).detach(), head.annotators()["confusion"]
    want = torch.zeros(R, K, K, dtype=torch.float64)
    for i, r, y in zip(batch.row, batch.annotator, batch.label):
        responsibility = (log_t[i].exp() * confusion[r, :, y]) / (log_t[i].exp() @ confusion[r, :, y])
        for k in range(K):
            want[r, k] -= responsibility[k] * (torch.eye(K)[y] - confusion[r, k]) / B
    assert close(head.ancestral.weight.grad.view(R, K, K), want)


def test_spee_lfc_of_perfect_annotators_is_plain_cross_entropy(batch, features):
    head = SpeeLFC(diagonal=1e3, **SIZES).double()
    assert close(head.annotation_log_prob(features, batch), plain_cross_entropy(head, features, batch))


def test_spee_lfc_of_uniform_annotators_teaches_nothing(batch, features):
    head = SpeeLFC(diagonal=1.0, **SIZES).double()
    features.requires_grad_()
    loss = head.loss(features, batch)
    loss.backward()
    assert close(loss, len(batch.row) / B * math.log(K))
    assert all(close(tensor.grad, torch.zeros_like(tensor)) for tensor in (features, *head.classifier.parameters()))
    assert close(head.posterior(features, batch), head(features).exp())


# --- SpeeLFC-D -------------------------------------------------------------------------------------------------------


def with_strength(strength: float, t: list[float]) -> Head:
    """A head whose ability times easiness is ``strength`` for everyone and everything."""
    return constant(partial(SpeeLFCD, ability=strength, smallest=1.0, range=0.0), t)


def test_spee_lfc_d_worked_example():
    head, s = with_strength(2.0, [0.5, 0.3, 0.2]), 0.8807970779778823
    each = torch.stack([probability(head, label) for label in range(3)])
    assert close(each, [0.470199269, 0.305960146, 0.223840584])
    log_obs = head.log_obs(torch.zeros(1, 1).double(), one_item(1))
    assert close(log_obs.exp(), [[(1 - s) / 2, s, (1 - s) / 2]])


def test_spee_lfc_d_starts_as_published(build_in_float64):
    head, x = constant(SpeeLFCD, [0.25] * 4), torch.zeros(1, 1).double()
    assert close(head.easiness(x), [50.001])
    assert close(head.log_obs(x, one_item(2)).exp()[0, 2], 0.802188332)
    assert close(head.annotators()["ability"], [0.028])


def test_spee_lfc_d_easiness_stays_in_its_range():
    head, x = SpeeLFCD(**SIZES).eval(), 1e4 * torch.randn(200, D)
    easiness = head.easiness(x)
    assert easiness.shape == (200,) and easiness.min() >= 0.001 and easiness.max() <= 100.0011
    assert easiness.max() - easiness.min() > 99


def test_spee_lfc_d_closed_form_is_the_sum_over_classes(batch, features):
    head = trained(SpeeLFCD)
    summed = functional.annotation_log_likelihood(head(features), head.log_obs(features, batch), batch.row)
    assert close(head.annotation_log_prob(features, batch), summed)
    assert close(head.loss(features, batch), -summed.sum() / B)


def test_spee_lfc_d_of_constant_easiness_is_one_coin(batch, features):
    head = trained(partial(SpeeLFCD, smallest=3.0, range=0.0))
    t, right = head(features).exp(), torch.sigmoid(3 * head.annotators()["ability"])
    coin = torch.stack([torch.full((K, K), (1 - s) / (K - 1)).double().fill_diagonal_(s) for s in right.tolist()])
    want = [torch.log(t[i] @ coin[r, :, y]) for i, r, y in zip(batch.row, batch.annotator, batch.label)]
    assert close(head.annotation_log_prob(features, batch), torch.stack(want), atol=1e-7)


def test_spee_lfc_d_without_ability_is_right_half_the_time():
    t = [0.5, 0.3, 0.2]
    each = torch.stack([probability(with_strength(0.0, t), label) for label in range(3)])
    assert close(each, [0.5 * p + 0.5 * (1 - p) / 2 for p in t])  # which is uniform only of two classes
    assert close(probability(with_strength(0.0, [0.9, 0.1]), 0), 0.5)


def test_spee_lfc_d_of_endless_ability_is_plain_cross_entropy(batch, features):
    head = SpeeLFCD(ability=1e3, **SIZES).double().eval()
    assert close(head.annotation_log_prob(features, batch), plain_cross_entropy(head, features, batch))


@pytest.mark.parametrize("ability", [-50.0, -0.5, 0.02, 50.0])
@pytest.mark.parametrize("margin", [0.0, 10.0, 20.0, 60.0, 1e4])
@pytest.mark.parametrize("label", [0, 1])
def test_spee_lfc_d_is_exact_where_the_network_and_the_annotators_are_sure(ability, margin, label):
    """Also where a probability rounds to 1: that of the label given, or that of another."""
    results = []
    for dtype in (torch.float32, torch.float64):
        head = SpeeLFCD(ability=ability, smallest=100.0, range=0.0, **SIZES | {"in_features": K}).to(dtype).eval()
        head.classifier.weight.data = torch.eye(K, dtype=dtype)
        head.classifier.bias.data.zero_()
        x = (margin * torch.eye(K, dtype=dtype)[:1]).requires_grad_()
        loss = head.loss(x, one_item(label))
        results.append([loss, *torch.autograd.grad(loss, [x, head.ability.weight])])
    logits, strength = margin * torch.eye(K).double()[0], torch.tensor(100 * ability).double()
    others = torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0) - math.log(K - 1)
    want = logits.logsumexp(0) - torch.logaddexp(logsigmoid(strength) + logits[label], logsigmoid(-strength) + others)
    assert results[1][0].item() == pytest.approx(want.item(), rel=1e-6, abs=1e-9)
    for single, double in zip(*results):
        assert torch.isfinite(single).all()
        assert torch.allclose(single.double(), double, rtol=1e-4, atol=1e-5)


# --- what a step costs -----------------------------------------------------------------------------------------------


class WatchSizes(TorchDispatchMode):
    """Remembers the longest dense tensor that an operation made."""

    longest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        views = func.is_view or func._schema.name in ("aten::detach", "aten::alias")
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not views:
                self.longest = max(self.longest, tensor.numel())
        return out


@every_head
def test_a_step_costs_what_its_batch_does_however_large_the_crowd(make, batch, features):
    annotators = 50_000
    head = make(**SIZES | {"num_annotators": annotators})
    tables = [module for module in head.modules() if isinstance(module, AnnotatorTable)]
    for table in tables:
        table.sparse = True
    with WatchSizes() as watch:
        head.loss(features.float(), replace(batch, annotator=batch.annotator * 7001)).backward()
    assert 0 < watch.longest < annotators
    for table in tables:
        assert table.weight.grad.is_sparse and table.weight.grad._nnz() <= len(batch.row)


def test_the_watch_sees_a_step_over_all_annotators(batch, features):
    head = SpeeLFC(**SIZES | {"num_annotators": 50_000})
    with WatchSizes() as watch:
        head.loss(features.float(), batch).backward()  # a dense gradient
    assert watch.longest >= 50_000


@pytest.mark.parametrize("make", [SpeeLFC, CrowdLayer, SpeeLFCD])
def test_sparse_gradients_are_the_dense_ones(make, batch, features):
    dense, sparse = trained(make), trained(make)
    for module in sparse.modules():
        module.sparse = True
    for head in (dense, sparse):
        head.loss(features, batch).backward()
    for mine, other in zip(dense.parameters(), sparse.parameters()):
        assert close(other.grad.to_dense(), mine.grad)


# --- MLP -------------------------------------------------------------------------------------------------------------


def test_mlp_without_hidden_layers_lets_features_through():
    backbone, x = MLP(D, hidden=[]), torch.randn(4, D)
    assert backbone.out_features == D and backbone(x).equal(x) and not list(backbone.parameters())


def test_mlp_has_the_layers_it_was_asked_for():
    backbone = MLP(D, hidden=[8, 3], dropout=0.5, activation="tanh").eval()
    first, second = (layer for layer in backbone.layers if isinstance(layer, torch.nn.Linear))
    x = torch.randn(4, D)
    assert backbone.out_features == 3
    assert close(backbone(x), second(first(x).tanh()).tanh(), atol=1e-6)


def test_mlp_standardizes_over_batches():
    torch.manual_seed(0)
    noise = torch.randn(1000, 5)
    offset, scale = torch.tensor([0.0, -3.0, 1e6, 0.1, 0.0]), torch.tensor([1.0, 1e-3, 1.0, 0.0, 0.0])
    x = offset + scale * noise  # the last two are constant
    backbone = MLP(5, hidden=[], standardize=True)
    backbone.prepare(x.split([1, 700, 99, 200]))
    out = backbone(x).double()
    assert close(out[:, :2].mean(0), [0.0, 0.0], atol=1e-3)
    assert out[:, 2].mean().abs() < 0.04  # float32 has sixteenths at a million, and the mean is kept in it
    assert close(out[:, :3].std(0, correction=0), [1.0, 1.0, 1.0], atol=1e-3)
    assert close(out[:, 3:], torch.zeros(1000, 2))
    assert close(backbone.mean.double(), x.double().mean(0), atol=0.04)


def test_mlp_standardization_survives_a_checkpoint():
    x = 3 + 2 * torch.randn(50, D)
    backbone, loaded = MLP(D, standardize=True), MLP(D, standardize=True)
    backbone.prepare([x])
    assert {"mean", "scale"} <= backbone.state_dict().keys()
    loaded.load_state_dict(backbone.state_dict())
    assert loaded(x).equal(backbone(x))


def test_mlp_that_does_not_standardize_does_not_look():
    backbone = MLP(D, hidden=[])
    backbone.prepare(iter([torch.full((3, D), 9.0)]))
    assert backbone(torch.ones(1, D)).equal(torch.ones(1, D)) and not backbone.state_dict()
