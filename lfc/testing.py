"""The contracts as functions: what any head, backbone or datamodule must keep, ours or a third party's.

Each check raises ``AssertionError`` at the first broken promise, in words that say which. In a test of your own::

    from lfc.testing import check_head


    def test_my_head():
        check_head(MyHead)
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lfc.aggregation.base import Aggregation, Aggregator, Votes
from lfc.backbones.base import Backbone
from lfc.backbones.mlp import MLP
from lfc.batch import CrowdBatch
from lfc.datamodules.base import CrowdDataModule
from lfc.heads.base import Head
from lfc.module import CrowdClassifier, split_task

SIZES = {"in_features": 6, "num_classes": 3, "num_annotators": 4, "num_items": 10}
"""Sizes of the head that :func:`check_head` builds first."""


def crowd_batch(num_classes: int = 3) -> CrowdBatch:
    """Five of ten items, one of them unlabelled, annotated by three of four annotators."""
    return CrowdBatch(
        inputs=None,
        items=torch.tensor([8, 1, 4, 0, 6]),
        row=torch.tensor([0, 0, 1, 2, 2, 2, 4]),
        annotator=torch.tensor([0, 2, 1, 0, 1, 2, 2]),
        label=torch.tensor([2, 2, 0, 1, 1, 0, 2]) % num_classes,
        gold=torch.tensor([2, 0, 1, -1, 2]).clamp_max(num_classes - 1),
    )


def whole_crowd(batch: CrowdBatch, num_items: int) -> CrowdBatch:
    """The annotations of a batch as those of the whole training set."""
    return CrowdBatch(None, torch.arange(num_items), batch.items[batch.row], batch.annotator, batch.label)


def take(batch: CrowdBatch, rows: list[int]) -> CrowdBatch:
    """Some items of a batch, in that order, with their annotations."""
    place = {row: position for position, row in enumerate(rows)}
    kept = [a for a, row in enumerate(batch.row.tolist()) if row in place]
    index = torch.tensor(kept, dtype=torch.long)
    return CrowdBatch(
        inputs=None,
        items=batch.items[rows],
        row=torch.tensor([place[int(batch.row[a])] for a in kept], dtype=torch.long),
        annotator=batch.annotator[index],
        label=batch.label[index],
        gold=None if batch.gold is None else batch.gold[rows],
    )


class _Watch(TorchDispatchMode):
    """Records operations whose result has at least ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.seen = rows, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.dim() and len(leaf) >= self.rows:
                inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided]
                if not any(leaf.data_ptr() == x.data_ptr() for x in inputs):  # a view is free
                    self.seen.add(str(func))
        return result


def check_head(build: Callable[..., Head]) -> None:
    """Check the promises of :class:`lfc.heads.Head`.

    Args:
        build: The class, or a function that takes the sizes and returns a head.
    """
    for classes in (3, 2, 5):
        _check_head(build, {**SIZES, "num_classes": classes})
    _check_cost(build)


def _check_head(build: Callable[..., Head], sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    classes, batch = sizes["num_classes"], crowd_batch(sizes["num_classes"])
    head = build(**sizes)
    features = torch.randn(5, sizes["in_features"], requires_grad=True)
    crowd = whole_crowd(batch, sizes["num_items"])
    head.prepare(crowd)
    if head.em_every or head.em_steps:
        _em_round(head, features, batch, crowd)

    # one loss, with a gradient for everything that is learned
    loss = head.loss(features, batch)
    assert loss.shape == () and loss.isfinite(), f"loss must be one finite number, got {loss}"
    leaves = _leaves(loss)
    known = {id(p) for p in head.parameters()} | {id(features)}
    assert all(id(leaf) in known for leaf in leaves), (
        "something is learned that is no nn.Parameter: no optimiser has it"
    )
    loss.backward()
    assert features.grad is not None and features.grad.any(), "no gradient reaches the backbone"
    assert features.grad.isfinite().all(), "the gradient of the features is not finite"
    idle = [name for name, p in head.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle, f"parameters without gradient, which breaks DDP: {idle}"
    bad = [name for name, p in head.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not bad, f"parameters with a gradient that is not finite: {bad}"

    _check_learning(build, sizes)

    head.eval()
    with torch.no_grad():
        _check_outputs(head, features, batch, classes)
        _check_invariances(head, features, batch)
        _check_annotators(head, sizes["num_annotators"], classes)
        _check_state(build, head, sizes, features, batch)


def _em_round(head: Head, features: Tensor, batch: CrowdBatch, crowd: CrowdBatch) -> None:
    with torch.no_grad():
        rows = head.e_step(features, batch)
        table = rows.new_full((head.num_items, *rows.shape[1:]), 1 / rows[0].numel())
        table[batch.items] = rows
        head.m_step(table, crowd)


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that ``backward`` would give a gradient to."""
    found, seen, queue = [], set(), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            queue += [following for following, _ in node.next_functions]
    return found


def _check_learning(build: Callable[..., Head], sizes: dict[str, int]) -> None:
    """Every parameter moves under the optimiser that ``lfc fit`` builds, whichever way annotators are updated."""
    for update in ("dense", "rows"):
        torch.manual_seed(0)
        batch = crowd_batch(sizes["num_classes"])
        model = CrowdClassifier(MLP(4, [sizes["in_features"]]), build(**sizes), annotator_update=update)
        model.head.prepare(whole_crowd(batch, sizes["num_items"]))
        optimizer = model.configure_optimizers()
        before = deepcopy(dict(model.head.named_parameters()))
        inputs = torch.randn(5, 4)
        for _ in range(5):
            optimizer.zero_grad()
            model.head.loss(model.backbone(inputs), batch).backward()
            optimizer.step()
        still = [name for name, p in model.head.named_parameters() if p.requires_grad and torch.equal(p, before[name])]
        assert not still, f"parameters that never move under annotator_update={update}: {still}"


def _check_outputs(head: Head, features: Tensor, batch: CrowdBatch, classes: int) -> None:
    size, annotations = len(batch), len(batch.label)
    log_probs, posterior = head(features), head.posterior(features, batch)
    assert log_probs.shape == (size, classes), f"forward must return (B, K), got {tuple(log_probs.shape)}"
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(size), atol=1e-5), "forward must return log-probabilities"
    assert posterior.shape == (size, classes), f"posterior must return (B, K), got {tuple(posterior.shape)}"
    assert posterior.isfinite().all(), "posterior is not finite; an item without annotations has one too"
    assert torch.allclose(posterior.sum(-1), torch.ones(size), atol=1e-5), "posterior must return probabilities"
    scores = head.annotation_log_prob(features, batch)
    assert scores.shape == (annotations,), f"annotation_log_prob must return (A,), got {tuple(scores.shape)}"
    assert scores.isfinite().all() and (scores <= 1e-6).all(), "annotation_log_prob must return log-probabilities"
    for rows, name in (([0], "a batch of one"), ([3], "a batch without annotations")):
        small, x = take(batch, rows), features[rows]
        assert head.loss(x, small).isfinite(), f"loss is not finite on {name}"
        assert head.posterior(x, small).shape == (1, classes), f"posterior loses its shape on {name}"
        assert head.posterior(x, small).isfinite().all(), f"posterior is not finite on {name}"
        assert head.annotation_log_prob(x, small).shape == (len(small.label),), f"annotation_log_prob fails on {name}"


def _check_invariances(head: Head, features: Tensor, batch: CrowdBatch) -> None:
    loss, posterior = head.loss(features, batch), head.posterior(features, batch)
    assert torch.equal(head.loss(features, batch), loss), "in eval mode the loss must be the same twice"

    order = torch.tensor([6, 2, 4, 0, 5, 1, 3])
    shuffled = deepcopy(batch)
    shuffled.row, shuffled.annotator, shuffled.label = batch.row[order], batch.annotator[order], batch.label[order]
    assert torch.allclose(head.loss(features, shuffled), loss, atol=1e-5), "loss depends on the order of annotations"
    assert torch.allclose(head.posterior(features, shuffled), posterior, atol=1e-5), (
        "posterior depends on the order of annotations"
    )
    rows = [3, 0, 4, 2, 1]
    moved = take(batch, rows)
    assert torch.allclose(head.loss(features[rows], moved), loss, atol=1e-5), "loss depends on the order of items"
    assert torch.allclose(head.posterior(features[rows], moved), posterior[rows], atol=1e-5), (
        "posterior does not follow the order of items"
    )
    parts = [take(batch, part) for part in ([0, 1], [2, 3, 4])]
    split = sum(head.loss(features[x], p) * len(p) for x, p in zip((slice(0, 2), slice(2, 5)), parts, strict=True))
    assert torch.allclose(torch.as_tensor(split), loss * len(batch), atol=1e-4), (
        "loss must be a sum over items or annotations, divided by len(batch): two batches must add up to one"
    )
    if not head.needs_gold:
        assert batch.gold is not None
        for gold in (torch.zeros_like(batch.gold), None):
            blind = deepcopy(batch)
            blind.gold = gold
            assert torch.equal(head.loss(features, blind), loss), "loss reads the gold labels"
            assert torch.equal(head.posterior(features, blind), posterior), "posterior reads the gold labels"


def _check_annotators(head: Head, annotators: int, classes: int) -> None:
    with torch.enable_grad():
        known = head.annotators()
    for name, value in known.items():
        assert len(value) == annotators, f"annotators()[{name!r}] must have a row an annotator"
        assert not value.requires_grad, f"annotators()[{name!r}] must be detached"
        assert value.isfinite().all(), f"annotators()[{name!r}] is not finite"
    if "confusion" in known:
        confusion = known["confusion"]
        assert confusion.shape == (annotators, classes, classes), "annotators()['confusion'] must be (R, K, K)"
        assert torch.allclose(confusion.sum(-1), torch.ones(annotators, classes), atol=1e-5), (
            "rows of annotators()['confusion'] must sum to one: true classes are rows"
        )


def _check_state(
    build: Callable[..., Head], head: Head, sizes: dict[str, int], features: Tensor, batch: CrowdBatch
) -> None:
    torch.manual_seed(1)
    clone = build(**sizes)
    clone.load_state_dict(head.state_dict())
    clone.eval()
    for name in ("loss", "posterior"):
        same = torch.equal(getattr(clone, name)(features, batch), getattr(head, name)(features, batch))
        assert same, f"the state_dict does not restore the {name}: keep state in parameters and persistent buffers"


def _check_cost(build: Callable[..., Head], annotators: int = 50_000) -> None:
    """A step reads and moves only the annotators of its batch."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_annotators": annotators}
    model = CrowdClassifier(MLP(4, [6]), build(**sizes), annotator_update="rows")
    optimizer = model.configure_optimizers()
    batch, inputs = crowd_batch(), torch.randn(5, 4)

    def step() -> None:
        optimizer.zero_grad()
        model.head.loss(model.backbone(inputs), batch).backward()
        optimizer.step()

    step()  # the optimiser makes its state, once
    with _Watch(annotators) as watch:
        step()
    assert not watch.seen, (
        f"a step makes tensors as long as the crowd ({', '.join(sorted(watch.seen))}): "
        "keep annotators' parameters in an AnnotatorTable and gather the batch's rows"
    )


def check_backbone(build: Callable[..., Backbone], inputs: Any, in_features: int | None) -> None:
    """Check the promises of :class:`lfc.backbones.Backbone`.

    Args:
        build: The class, or a function that takes ``in_features`` and returns a backbone.
        inputs: A batch of at least three inputs, as its datamodule would serve them.
        in_features: Width of the inputs, the number of items where inputs are items, or ``None``.
    """
    torch.manual_seed(0)
    backbone = build(in_features=in_features)
    width = getattr(backbone, "out_features", None)
    assert isinstance(width, int) and width > 0, "out_features must be known as soon as the backbone is built"
    backbone.prepare([inputs])
    features = backbone(inputs)
    assert features.dim() == 2 and features.shape[1] == width, f"forward must return (B, {width}), got {features.shape}"
    assert features.isfinite().all(), "features are not finite"
    if parameters := [p for p in backbone.parameters() if p.requires_grad]:
        features.sum().backward()
        assert all(p.grad is not None for p in parameters), "a parameter has no gradient, which breaks DDP"
    backbone.eval()
    with torch.no_grad():
        features = backbone(inputs)
        assert torch.equal(backbone(inputs), features), "in eval mode the features must be the same twice"
        one = backbone(inputs[:1])
        assert one.shape == (1, width), "a batch of one loses its shape"
        assert torch.allclose(one[0], features[0], atol=1e-4), "an item's features depend on the rest of the batch"
        clone = build(in_features=in_features)
        clone.load_state_dict(backbone.state_dict())
        clone.eval()
        assert torch.equal(clone(inputs), features), "the state_dict does not restore the features"


def check_datamodule(build: Callable[[], CrowdDataModule]) -> None:
    """Check the promises of :class:`lfc.datamodules.CrowdDataModule`.

    Args:
        build: Makes the datamodule; called twice, to see that it serves the same both times.
    """
    data, again = build(), build()
    sizes = data.num_classes, data.num_annotators, data.num_items  # known before setup, or no model could be built
    assert all(size > 0 for size in sizes), f"sizes must be positive before setup, got {sizes}"
    data.setup("fit")
    data.setup("fit")
    again.setup("fit")
    batches = list(data.train_dataloader())
    for batch, other in zip(batches, again.train_dataloader(), strict=True):
        assert torch.equal(batch.items, other.items), "the same datamodule must serve the same batches"
        _check_batch(batch, data)
        for one, two in zip(tree_leaves(batch.inputs), tree_leaves(other.inputs), strict=True):
            same = torch.equal(one, two) if isinstance(one, Tensor) else one == two
            assert same, "the same datamodule must serve the same inputs"
    seen = torch.cat([batch.items for batch in batches])
    assert torch.equal(seen.sort().values, torch.arange(data.num_items)), "an epoch must see every training item once"
    crowd = data.crowd()
    assert len(crowd) == data.num_items and crowd.inputs is None, (
        "crowd() must hold every training item, without inputs"
    )
    _check_profile(crowd, data)
    served = Counter(triple for batch in batches for triple in _triples(batch))
    assert served == Counter(_triples(crowd)), "batches must hold exactly the training annotations, once each"
    shares = [batch.items for rank in range(2) for batch in data.loader("train", rank=rank, world=2)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(data.num_items)), (
        "two ranks' shares must be all items, once each"
    )
    for batch in (batch for loader in (*data.val_dataloader(), *data.test_dataloader()) for batch in loader):
        _check_batch(batch, data)
    if "heldout" in data.datasets:
        held = Counter(triple for batch in data.loader("heldout") for triple in _triples(batch))
        everything = data.table.annotations.select(data.index["train"])
        total = Counter(
            zip(everything.item.tolist(), everything.annotator.tolist(), everything.label.tolist(), strict=True)
        )
        assert held + served == total, "held-out and training annotations must be all there are, each in one of them"


def _triples(batch: CrowdBatch) -> list[tuple[int, int, int]]:
    items = batch.items[batch.row]
    return list(zip(items.tolist(), batch.annotator.tolist(), batch.label.tolist(), strict=True))


def _check_batch(batch: CrowdBatch, data: CrowdDataModule) -> None:
    assert isinstance(batch, CrowdBatch) and len(batch) > 0, "a loader must serve CrowdBatch"
    assert len(batch.row) == len(batch.annotator) == len(batch.label), "row, annotator and label must be equally long"
    for name, limit in (("row", len(batch)), ("annotator", data.num_annotators), ("label", data.num_classes)):
        value = getattr(batch, name)
        assert value.dtype == torch.long, f"{name} must be of int64"
        assert not len(value) or (value.min() >= 0 and value.max() < limit), f"{name} must be in [0, {limit})"
    if batch.gold is not None:
        assert batch.gold.shape == (len(batch),), "gold must be (B,)"
        assert batch.gold.min() >= -1 and batch.gold.max() < data.num_classes, "gold must be a class or -1"
    inputs, task = split_task(batch.inputs)
    assert (task is not None) == (data.num_tasks > 1), "inputs must name the task where there are many, and only there"
    if task is not None:
        assert task.shape == (len(batch),) and task.dtype == torch.long, "task must be (B,) of int64"
        assert task.min() >= 0 and task.max() < data.num_tasks, "task must be in [0, num_tasks)"
    if data.in_features is not None and inputs.is_floating_point():
        assert inputs.shape == (len(batch), data.in_features), "inputs must be (B, in_features)"
    elif data.in_features is not None:
        assert inputs.shape == (len(batch),) and inputs.dtype == torch.long, (
            "inputs must be floats (B, in_features), or item numbers (B,) of int64"
        )
        assert inputs.min() >= 0 and inputs.max() < data.in_features, "item numbers must be in [0, in_features)"
    _check_profile(batch, data)


def _check_profile(batch: CrowdBatch, data: CrowdDataModule) -> None:
    if not data.profile_features:
        assert batch.profile is None, "profile must be None where profile_features is 0"
        return
    assert batch.profile is not None, "profile must be there where profile_features is not 0"
    shape = len(batch.annotator), data.profile_features
    assert batch.profile.shape == shape and batch.profile.dtype == torch.float32, "profile must be float32 (A, F)"
    assert batch.profile.isfinite().all(), "profile is not finite"
    who, place = batch.annotator.unique(return_inverse=True)
    own = batch.profile.new_zeros(len(who), data.profile_features).index_copy_(0, place, batch.profile)
    assert torch.equal(own[place], batch.profile), "an annotator's profile must be the same in every annotation"


def check_aggregator(build: Callable[[], Aggregator]) -> None:
    """Check the promises of :class:`lfc.aggregation.Aggregator`.

    Args:
        build: The class, or a function that returns an aggregator; called for every fit.
    """
    for classes in (3, 2, 5):
        votes = _random_votes(classes)
        result = _aggregate(build, votes)
        if classes == 3:
            again = _aggregate(build, votes)
            assert torch.equal(result.posterior, again.posterior), "the same votes must give the same posterior twice"
        _check_aggregation(result, votes)
        _check_relabelling(build, votes, result)
        _check_strangers(build, votes, result)
    _check_small_crowds(build)


def _random_votes(classes: int, items: int = 40, annotators: int = 6) -> Votes:
    """Four votes an item, 70 % of them right but for one annotator who guesses; no item has a tie."""
    generator = torch.Generator().manual_seed(classes)
    item = torch.arange(items).repeat_interleave(4)
    annotator = torch.rand(items, annotators, generator=generator).argsort(1)[:, :4].reshape(-1)
    truth = torch.randint(classes, (items,), generator=generator)[item]
    guess = torch.randint(classes, item.shape, generator=generator)
    right = (torch.rand(item.shape, generator=generator) < 0.7) & (annotator > 0)
    label = truth.where(right, guess)
    tally = Votes(item, annotator, label, items, annotators, classes).tally
    tied = ((tally == tally.amax(-1, keepdim=True)).sum(-1) > 1)[item]  # (A,)
    label = label.view(items, 4)[:, :1].expand(-1, 4).reshape(-1).where(tied, label)  # there all say what one said
    return Votes(item, annotator, label, items, annotators, classes)


def _aggregate(build: Callable[[], Aggregator], votes: Votes) -> Aggregation:
    before = deepcopy((votes.item, votes.annotator, votes.label))
    result = build().fit(votes)
    kept = all(torch.equal(a, b) for a, b in zip(before, (votes.item, votes.annotator, votes.label), strict=True))
    assert kept, "fit changes the votes it was given"
    return result


def _check_aggregation(result: Aggregation, votes: Votes) -> None:
    items, annotators, classes = votes.num_items, votes.num_annotators, votes.num_classes
    posterior = result.posterior
    assert posterior.shape == (items, classes), f"posterior must be (N, K), got {tuple(posterior.shape)}"
    assert posterior.dtype == torch.double, f"posterior must be of float64, got {posterior.dtype}"
    assert posterior.isfinite().all() and (posterior >= 0).all(), "posterior must be finite and nonnegative"
    assert torch.allclose(posterior.sum(-1), torch.ones(items).double(), atol=1e-9), "posterior must sum to one"
    empty = ~votes.labelled
    assert torch.allclose(posterior[empty], torch.tensor(1 / classes).double()), (
        "posterior of an unlabelled item must be uniform"
    )
    label = result.label
    assert label.shape == (items,) and label.dtype == torch.long, "label must be (N,) of int64"
    assert (label[empty] == -1).all() and (label[~empty] >= 0).all(), "label must be -1 where there are no votes alone"
    assert all(later >= now - 1e-8 * abs(now) for now, later in pairwise(result.history)), (
        "history decreases; it must hold the quantity that the method maximises"
    )
    for name, rows, table in (("annotators", annotators, result.annotators), ("items", items, result.items)):
        for key, value in table.items():
            assert len(value) == rows, f"{name}[{key!r}] must have {rows} rows, got {len(value)}"
            assert value.isfinite().all(), f"{name}[{key!r}] is not finite"
            assert value.dtype == torch.double, f"{name}[{key!r}] must be of float64"
    if "confusion" in result.annotators:
        confusion = result.annotators["confusion"]
        assert confusion.shape == (annotators, classes, classes), "annotators['confusion'] must be (R, K, K)"
        assert torch.allclose(confusion.sum(-1), torch.ones(annotators, classes).double(), atol=1e-9), (
            "rows of annotators['confusion'] must sum to one: true classes are rows"
        )


def _check_relabelling(build: Callable[[], Aggregator], votes: Votes, result: Aggregation) -> None:
    """New numbers for items, annotators or classes give the same result under these numbers."""
    sizes = votes.num_items, votes.num_annotators, votes.num_classes
    for axis, what in enumerate(("items", "annotators", "classes")):
        new = torch.randperm(sizes[axis], generator=torch.Generator().manual_seed(1))  # (M,) the new number of each
        if torch.equal(new, torch.arange(len(new))):
            new = new.flip(0)
        item, annotator, label = (
            new[old] if place == axis else old for place, old in enumerate((votes.item, votes.annotator, votes.label))
        )
        moved = build().fit(Votes(item, annotator, label, *sizes))
        posterior = moved.posterior[new] if axis == 0 else moved.posterior[:, new] if axis == 2 else moved.posterior
        assert torch.allclose(posterior, result.posterior, atol=1e-6), f"posterior depends on the order of {what}"
        for key, value in result.annotators.items():
            other = moved.annotators[key]
            other = other[new] if axis == 1 else other[:, new][:, :, new] if axis == 2 and other.dim() == 3 else other
            assert torch.allclose(other, value, atol=1e-5), f"annotators[{key!r}] does not follow the order of {what}"
        if axis == 0:
            for key, value in result.items.items():
                assert torch.allclose(moved.items[key][new], value, atol=1e-5), f"items[{key!r}] does not follow items"


def _check_strangers(build: Callable[[], Aggregator], votes: Votes, result: Aggregation) -> None:
    """Items and annotators without votes change nothing for the others."""
    items, annotators = votes.num_items, votes.num_annotators
    # a new first and a new last of each, neither with a vote
    wider = Votes(votes.item + 1, votes.annotator + 1, votes.label, items + 2, annotators + 2, votes.num_classes)
    found = _aggregate(build, wider)
    _check_aggregation(found, wider)
    assert torch.allclose(found.posterior[1:-1], result.posterior, atol=1e-6), (
        "items or annotators without votes change the posterior of the others"
    )
    for key, value in result.annotators.items():
        assert torch.allclose(found.annotators[key][1:-1], value, atol=1e-5), (
            f"items or annotators without votes change annotators[{key!r}] of the others"
        )


def _check_small_crowds(build: Callable[[], Aggregator]) -> None:
    one = torch.tensor([0])
    votes = Votes(one, one, one + 1, 1, 1, 3)
    single = _aggregate(build, votes)
    _check_aggregation(single, votes)
    assert single.label.tolist() == [1], "an item with one vote, the only one, must get the class said"

    votes = _random_votes(3)
    first = torch.arange(0, len(votes), 4)  # one vote an item
    votes = Votes(votes.item[first], votes.annotator[first], votes.label[first], votes.num_items, 6, 3)
    _check_aggregation(_aggregate(build, votes), votes)

    # two agree on every item against the first annotator, who then says everything ten times
    item = torch.arange(8).repeat_interleave(3)
    who, said = torch.tensor([0, 1, 2]).repeat(8), torch.tensor([0, 1, 1, 1, 0, 0]).repeat(4)
    plain = _aggregate(build, Votes(item, who, said, 8, 3, 2))
    often = (who == 0).nonzero().squeeze(-1).repeat(9)
    louder = Votes(
        torch.cat([item, item[often]]), torch.cat([who, who[often]]), torch.cat([said, said[often]]), 8, 3, 2
    )
    shouted = _aggregate(build, louder)
    _check_aggregation(shouted, louder)
    assert plain.label.tolist() == [1, 0] * 4, "two who agree on everything must prevail over one"
    assert not torch.allclose(plain.posterior, shouted.posterior, atol=1e-3) or not torch.allclose(
        plain.annotators.get("ability", torch.zeros(3)), shouted.annotators.get("ability", torch.zeros(3)), atol=1e-3
    ), "a vote that is repeated must count again"
