"""Batches, samplers, what is held out, and the simulated crowd."""

import time
import tracemalloc
import warnings
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lfc.annotations import Annotations, Crowd, read_crowd
from lfc.batch import CrowdBatch
from lfc.datamodules import (
    CrowdDataModule,
    FeatureDataModule,
    ItemDataModule,
    MultiTaskDataModule,
    SimulatedDataModule,
)
from lfc.datamodules.base import CrowdDataset, IndexSampler, at_most, hold_out
from lfc.errors import UserError


def random_annotations(items: int = 40, annotators: int = 9, size: int = 200, seed: int = 0) -> Annotations:
    generator = torch.Generator().manual_seed(seed)
    item, annotator, label = (torch.randint(n, (size,), generator=generator) for n in (items, annotators, 4))
    return Annotations.from_long(item, annotator, label, items)


def triples(table: Annotations) -> list[tuple[int, int, int]]:
    return list(zip(table.item.tolist(), table.annotator.tolist(), table.label.tolist()))


def same(one: CrowdBatch, other: CrowdBatch) -> bool:
    names = ("inputs", "items", "row", "annotator", "label", "gold")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


# Batches


def test_a_batch_holds_the_annotations_of_its_items():
    table = random_annotations()
    index, gold, soft = torch.arange(40) + 5, torch.arange(40) % 4, torch.rand(40, 4)
    inputs = torch.rand(45, 3)
    dataset = CrowdDataset(inputs, index, table, gold, soft)
    for rows in torch.randperm(40).split(7):
        batch = dataset[rows]
        want = [(row, r, k) for row, i in enumerate(rows.tolist()) for j, r, k in triples(table) if i == j]
        assert list(zip(batch.row.tolist(), batch.annotator.tolist(), batch.label.tolist())) == want
        assert torch.equal(batch.items, rows)
        assert torch.equal(batch.inputs, inputs[rows + 5])
        assert torch.equal(batch.gold, gold[rows])
        assert torch.equal(batch.soft, soft[rows])
    assert len(dataset) == 40


def test_a_batch_without_gold_and_annotations():
    nothing = torch.zeros(0, dtype=torch.long)
    dataset = CrowdDataset(torch.rand(3, 2), torch.arange(3), Annotations.from_long(nothing, nothing, nothing, 3), None)
    batch = dataset[torch.tensor([2, 0])]
    assert batch.gold is None and batch.soft is None
    assert len(batch) == 2 and len(batch.row) == len(batch.annotator) == len(batch.label) == 0


# Order of items

SIZES, WORLDS = (1, 2, 7, 64, 65), (1, 2, 3)


def samplers(size: int, world: int, **options) -> list[IndexSampler]:
    return [IndexSampler(size, 8, rank=rank, world=world, **options) for rank in range(world)]


def drawn(sampler: IndexSampler) -> list[int]:
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert all(len(batch) == sampler.batch_size for batch in batches[:-1])
    assert all(0 < len(batch) <= sampler.batch_size for batch in batches)
    return torch.cat(batches).tolist() if batches else []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_sees_every_item_once(size, world):
    seen = [drawn(sampler) for sampler in samplers(size, world)]
    if size >= world:
        assert sorted(chain(*seen)) == list(range(size))
    else:  # every rank needs a batch
        assert all(len(items) == 1 for items in seen)
        assert set(chain(*seen)) == set(range(size))
    assert all(items == sorted(items) for items in seen)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_training_ranks_make_equally_many_steps(size, world):
    ranks = samplers(size, world, train=True, seed=3)
    seen = [drawn(sampler) for sampler in ranks]
    assert len({len(items) for items in seen}) == 1
    assert len({len(sampler) for sampler in ranks}) == 1
    assert set(chain(*seen)) == set(range(size))
    assert len(list(chain(*seen))) < size + world


@pytest.mark.parametrize("train", [True, False])
def test_a_split_without_items(train):
    for sampler in samplers(0, 2, train=train):
        assert list(sampler) == [] and len(sampler) == 0


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        sampler = IndexSampler(64, 8, train=True, seed=seed)
        sampler.set_epoch(epoch)
        return drawn(sampler)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6
    assert sorted(order(1, 2)) == list(range(64))


def test_the_seed_of_the_run_is_the_default(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert drawn(IndexSampler(64, 8, train=True)) == drawn(IndexSampler(64, 8, train=True, seed=5))
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert drawn(IndexSampler(64, 8, train=True)) == drawn(IndexSampler(64, 8, train=True, seed=0))


# What is held out


def lost(key: Tensor, mask: Tensor) -> set[int]:
    return set(key.tolist()) - set(key[~mask].tolist())


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.37])
def test_hold_out_takes_the_share_asked_for(fraction):
    table = random_annotations(size=500)
    mask = hold_out(table, fraction, seed=0)
    assert int(mask.sum()) == round(fraction * 500)
    assert torch.equal(mask, hold_out(table, fraction, seed=0))
    assert fraction == 0 or not torch.equal(mask, hold_out(table, fraction, seed=1))


@pytest.mark.parametrize("seed", range(20))
def test_hold_out_leaves_everyone_a_label(seed):
    table = random_annotations(items=40, annotators=30, size=120, seed=seed)
    for fraction in (0.1, 0.3, 0.9):
        mask = hold_out(table, fraction, seed)
        assert not lost(table.annotator, mask)
        if fraction < 0.9:
            assert not lost(table.item, mask)


def test_hold_out_takes_an_items_only_label_last():
    # Items 0 to 9 have one label each, of annotator 0. Item 10 has one of annotator 0 and one of annotator 1, who has
    # no other: the former must go before an item is lost, unless it is the one label that annotator 0 keeps.
    item, annotator = torch.tensor([*range(11), 10]), torch.tensor([0] * 11 + [1])
    table = Annotations.from_long(item, annotator, torch.zeros(12, dtype=torch.long), 11)
    for seed in range(50):
        mask = hold_out(table, 1 / 12, seed)
        assert int(mask.sum()) == 1
        assert not lost(table.annotator, mask)
        assert mask[10] or not hold_out(table, 1.0, seed)[10]


def test_hold_out_of_items_with_a_label_each():
    size = 60
    table = Annotations.from_long(torch.arange(size), torch.arange(size) % 5, torch.zeros(size, dtype=torch.long), size)
    mask = hold_out(table, 0.25, seed=0)
    assert int(mask.sum()) == 15
    assert not lost(table.annotator, mask)


def test_hold_out_of_annotators_with_a_label_each_takes_none():
    size = 20
    table = Annotations.from_long(torch.arange(size) % 4, torch.arange(size), torch.zeros(size, dtype=torch.long), 4)
    assert not hold_out(table, 0.5, seed=0).any()


def test_hold_out_of_nothing():
    nothing = torch.zeros(0, dtype=torch.long)
    assert hold_out(Annotations.from_long(nothing, nothing, nothing, 3), 0.1, seed=0).shape == (0,)


def test_train_and_heldout_share_the_annotations():
    data = SimulatedDataModule(num_items=300, num_annotators=20, holdout=0.2, split_seed=4)
    data.setup("fit")
    train, heldout = data.datasets["train"], data.datasets["heldout"]
    rows = heldout.index.tolist()  # training items come first in the table
    held = [(rows[i], r, k) for i, r, k in triples(heldout.annotations)]
    everything = triples(data.table.annotations)
    assert sorted(triples(train.annotations) + held) == sorted(everything)
    assert len(held) == round(0.2 * len(everything))
    assert heldout.annotations.counts.all()
    assert heldout.gold is None and train.gold is not None
    assert len(train) == data.num_items
    assert [len(loader.dataset) for loader in data.val_dataloader()] == [819, len(heldout)]
    assert triples_of(data.crowd()) == triples(train.annotations)
    batch = next(iter(data.loader("heldout")))
    assert batch.gold is None
    assert torch.equal(batch.inputs, data.features[batch.items])  # rows of the training split, as everywhere


def triples_of(batch: CrowdBatch) -> list[tuple[int, int, int]]:
    return list(zip(batch.items[batch.row].tolist(), batch.annotator.tolist(), batch.label.tolist()))


# Folders

SAID = "item,annotator,label\n" + "".join(f"x{i},{who},{i % 2}\n" for i in range(10) for who in ("ann", "bob"))
TRAINING = "item,split,gold\n" + "".join(f"x{i},train,\n" for i in range(10))


def folder(path: Path, said: str = SAID, items: str = TRAINING) -> Path:
    (path / "annotations.csv").write_text(said)
    (path / "items.csv").write_text(items)
    size = len(items.splitlines()) - 1
    np.save(path / "features.npy", np.arange(3 * size, dtype=np.float64).reshape(size, 3))
    return path


@pytest.mark.parametrize(
    ("said", "items", "want"),
    [
        pytest.param(SAID, TRAINING + "y,valid,1\nz,test,0\n", 0.0, id="gold on valid"),
        pytest.param(SAID, TRAINING, 0.1, id="no valid"),
        pytest.param(SAID, TRAINING + "z,test,1\n", 0.1, id="gold on test only"),
        pytest.param(SAID, TRAINING + "y,valid,\n", 0.1, id="valid without anything"),
        pytest.param(SAID + "y,ann,1\n", TRAINING + "y,valid,\n", 0.0, id="annotations on valid"),
    ],
)
def test_holdout_by_default(tmp_path, said, items, want):
    data = FeatureDataModule(str(folder(tmp_path, said, items)))
    assert data.holdout == want
    data.setup("fit")
    assert ("heldout" in data.datasets) == (want > 0)
    assert FeatureDataModule(str(tmp_path), holdout=0.3).holdout == 0.3
    assert FeatureDataModule(str(tmp_path), holdout=0.0).holdout == 0.0


def test_features_of_a_folder(tmp_path):
    path = folder(tmp_path, items=TRAINING + "y,valid,1\nz,test,0\n")
    data = FeatureDataModule(str(path), batch_size=4)
    assert (data.num_items, data.num_annotators, data.num_classes, data.in_features) == (10, 2, 2, 3)
    assert data.has_gold("valid") and data.has_gold("test") and not data.has_gold("train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as numpy's of an array that is not writable
        data.setup("fit")
    inputs = data.datasets["train"].inputs
    assert inputs.dtype == torch.float32
    inputs[0] = -1  # a copy of its own, so the file stays as it was
    assert np.load(path / "features.npy")[0].tolist() == [0, 1, 2]
    seen = {i: row for batch in data.train_dataloader() for i, row in zip(batch.items.tolist(), batch.inputs.tolist())}
    assert seen == {0: [-1, -1, -1], **{i: [3 * i, 3 * i + 1, 3 * i + 2] for i in range(1, 10)}}
    assert data.test_splits == ["test", "annotated"]
    (test,), annotated = data.test_dataloader()
    assert len(annotated.dataset) == 10
    assert test.inputs.tolist() == [[33, 34, 35]] and test.gold.tolist() == [0]
    assert data.predict_split == "test"


def test_folders_that_cannot_be_trained_on(tmp_path):
    data = FeatureDataModule(str(folder(tmp_path, items="item,split\n" + "".join(f"x{i},valid\n" for i in range(10)))))
    with pytest.raises(UserError, match="no item is in the train split"):
        data.setup("fit")
    data = FeatureDataModule(
        str(folder(tmp_path, said="item,annotator,label\nx9,ann,0\n", items=TRAINING + "y,test,1\n"))
    )
    data.index["train"] = data.index["train"][:5]
    with pytest.raises(UserError, match="no item of the train split has an annotation"):
        data.setup("fit")


def test_a_folder_without_a_test_split(tmp_path):
    data = FeatureDataModule(str(folder(tmp_path)))
    data.setup("test")
    assert data.test_splits == ["annotated"]
    assert data.predict_split == "all" and len(data.predict_dataloader().dataset) == 10


def test_workers_load_the_same_batches():
    one, other = (SimulatedDataModule(num_items=200, batch_size=64, num_workers=n) for n in (0, 2))
    one.setup("fit")
    other.setup("fit")
    batches = list(zip(one.train_dataloader(), other.train_dataloader(), strict=True))
    assert len(batches) == 4
    assert all(same(a, b) for a, b in batches)


# Fewer labels an item


def kept(table: Annotations, mask: Tensor) -> set[tuple[int, int]]:
    """Which annotations of which item, by place."""
    return set(zip(table.item[mask].tolist(), mask.nonzero().squeeze(-1).tolist()))


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_at_most_so_many_of_each_item(most):
    table = random_annotations(items=60, size=200)
    mask = at_most(table, most, seed=0)
    counts = [min(most, n) for n in table.counts.tolist()]
    assert table.where(mask).counts.tolist() == counts and 0 in counts
    assert torch.equal(mask, at_most(table, most, seed=0))
    assert most == 100 or not torch.equal(mask, at_most(table, most, seed=1))


@pytest.mark.parametrize("seed", range(5))
def test_fewer_are_some_of_more(seed):
    table = random_annotations(items=30, size=300, seed=seed)
    chosen = [kept(table, at_most(table, most, seed)) for most in range(1, 12)]
    assert all(few <= more for few, more in pairwise(chosen))
    assert len({len(some) for some in chosen}) > 8


def test_every_choice_is_as_likely():
    # 6000 items of 4 annotations, 2 to be kept: 6 choices; and the choice of one item says nothing of the next's
    size = 6000
    item = torch.arange(size).repeat_interleave(4)
    table = Annotations.from_long(item, torch.arange(4).repeat(size), torch.zeros(4 * size, dtype=torch.long), size)
    mask = at_most(table, 2, seed=3).view(size, 4)
    pairs = Counter(map(tuple, mask.tolist()))
    assert len(pairs) == 6 and all(sum(pair) == 2 for pair in pairs)
    chi = sum((n - size / 6) ** 2 / (size / 6) for n in pairs.values())
    assert chi < 20.5  # 5 degrees of freedom: one time in a thousand
    same = (mask[1:] == mask[:-1]).all(-1).double().mean()
    assert abs(same - 1 / 6) < 4 * (1 / 6 * 5 / 6 / size) ** 0.5


def test_the_choice_is_another_than_what_is_held_out():
    # were both drawn from the same numbers, what is kept would tell what is held out
    item = torch.arange(5000).repeat_interleave(4)
    table = Annotations.from_long(item, item % 3, torch.zeros_like(item), 5000)
    held, one = hold_out(table, 0.3, seed=0), at_most(table, 1, seed=0)
    assert held.double().mean() == pytest.approx(0.3) and one.double().mean() == pytest.approx(0.25)
    assert abs((held & one).double().mean() - 0.3 * 0.25) < 4 * (0.3 * 0.25 / len(item)) ** 0.5


def test_a_great_crowd_is_thinned_fast():
    size = 1_000_000
    generator = torch.Generator().manual_seed(0)
    item = torch.randint(size // 5, (size,), generator=generator)
    table = Annotations.from_long(item, item, item, size // 5)
    start = time.perf_counter()
    at_most(table, 2, seed=0)
    assert time.perf_counter() - start < 5


def test_redundancy_of_a_datamodule():
    whole = SimulatedDataModule(num_items=300, num_annotators=30)
    data = SimulatedDataModule(num_items=300, num_annotators=30, redundancy=2, split_seed=1)
    assert data.table.annotations.counts[:300].max() == 2
    assert set(triples(data.table.annotations)) < set(triples(whole.table.annotations))
    assert data.table.annotators == whole.table.annotators and data.num_annotators == whole.num_annotators
    assert data.annotators_digest == whole.annotators_digest
    size, total = len(data.table.annotations.label), len(whole.table.annotations.label)
    assert data.table.notes == [f"kept {size} of {total} annotations, at most 2 an item"]
    assert whole.table.notes == []
    data.setup("fit")
    assert int(data.datasets["annotated"].annotations.counts.max()) == 2
    assert len(data.crowd().label) == size
    again = SimulatedDataModule(num_items=300, num_annotators=30, redundancy=2, split_seed=1)
    other = SimulatedDataModule(num_items=300, num_annotators=30, redundancy=2, split_seed=2)
    assert triples(again.table.annotations) == triples(data.table.annotations)
    assert triples(other.table.annotations) != triples(data.table.annotations)


def test_the_crowd_that_was_given_stays_as_it_was(tmp_path):
    crowd = read_crowd(folder(tmp_path))
    before = triples(crowd.annotations)

    class Given(CrowdDataModule):
        def load_inputs(self):
            return torch.zeros(10, 1)

    assert Given(crowd, redundancy=1).table.annotations.counts.tolist() == [1] * 10
    assert triples(crowd.annotations) == before and crowd.notes == []


def test_annotators_without_labels_stay():
    data = SimulatedDataModule(num_items=40, num_annotators=100, labels_per_item=10, redundancy=1)
    assert len(set(data.table.annotations.annotator.tolist())) < data.num_annotators == len(data.table.annotators)


def test_redundancy_goes_before_hold_out(tmp_path):
    data = SimulatedDataModule(num_items=300, num_annotators=10, labels_per_item=8, redundancy=4, holdout=0.25)
    data.setup("fit")
    train, held = data.datasets["train"].annotations, data.datasets["heldout"].annotations
    assert len(held.label) == round(0.25 * len(data.table.annotations.label))
    assert len(held.label) + len(train.label) == len(data.table.annotations.label)
    together = train.counts.index_add(0, data.datasets["heldout"].rows, held.counts)
    assert together.max() == 4


def test_every_split_is_thinned(tmp_path):
    said = SAID + "".join(f"{item},{who},1\n" for item in "yz" for who in ("ann", "bob", "cyd"))
    data = FeatureDataModule(str(folder(tmp_path, said, TRAINING + "y,valid,1\nz,test,0\n")), redundancy=1)
    assert data.table.annotations.counts.tolist() == [1] * 12
    data.setup("fit")
    assert [int(data.datasets[name].annotations.counts.sum()) for name in ("train", "valid", "test")] == [10, 1, 1]
    assert data.num_annotators == 3 and data.table.notes == ["kept 12 of 26 annotations, at most 1 an item"]


# Items without inputs


def test_items_are_their_own_inputs(tmp_path):
    path = folder(tmp_path, items=TRAINING + "y,valid,1\nz,test,0\n")
    (path / "features.npy").write_bytes(b"never read")
    data = ItemDataModule(str(path), batch_size=4)
    assert (data.in_features, data.num_items, data.num_tasks) == (12, 10, 1)
    data.setup("fit")
    for batch in data.train_dataloader():
        assert torch.equal(batch.inputs, batch.items) and batch.inputs.dtype == torch.long
    (valid,), *_ = data.val_dataloader()
    (test,), annotated = data.test_dataloader()
    assert (valid.inputs.tolist(), test.inputs.tolist()) == ([10], [11])  # among all items, not among their split
    assert torch.cat([batch.inputs for batch in annotated]).tolist() == list(range(10))
    assert data.table.notes == [
        "2 of 12 items are not in the train split: nothing is learned of them; choose no epoch by them (--run.monitor)"
    ]


def test_labels_alone_are_a_crowd(tmp_path):
    (tmp_path / "annotations.csv").write_text("item,label\nx,a\ny,b\nx,b\nx,b\n")
    data = ItemDataModule(str(tmp_path), holdout=0.0)
    assert (data.in_features, data.num_annotators, data.num_classes) == (2, 1, 2)
    assert len(data.table.notes) == 1 and "no annotators" in data.table.notes[0]
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch.votes(2)[batch.items.argsort()].tolist() == [[1, 2], [0, 1]]
    assert ItemDataModule(str(tmp_path), redundancy=1).table.annotations.counts.tolist() == [1, 1]


# Several tasks


def two_tasks(path: Path, names: tuple[str, str] = ("one", "two"), width: int = 3) -> list[str]:
    """Twelve items, then eleven; ann labels both tasks, bob the first and eve the second."""
    paths = [path / "x" / names[0], path / "y" / names[1]]
    for one in paths:
        one.mkdir(parents=True)
    folder(paths[0], items=TRAINING + "y,valid,1\nz,test,0\n")
    folder(paths[1], SAID.replace("bob", "eve"), TRAINING + "z,test,1\n")
    np.save(paths[1] / "features.npy", -np.ones((11, width)) * np.arange(11)[:, None])
    return [str(one) for one in paths]


def test_tasks_are_served_side_by_side(tmp_path):
    paths = two_tasks(tmp_path)
    data = MultiTaskDataModule(paths, batch_size=7)
    assert (data.num_tasks, data.in_features, data.num_items, data.num_annotators) == (2, 3, 20, 3)
    assert data.tasks == ["one", "two"] and data.table.annotators == ["ann", "bob", "eve"]
    assert data.table.items[:2] == ["one/x0", "one/x1"] and data.table.items[-1] == "two/z"
    data.setup("fit")
    first = np.load(Path(paths[0], "features.npy"))
    seen = []
    for batch in data.train_dataloader():
        assert set(batch.inputs) == {"inputs", "task"}
        assert batch.inputs["inputs"].dtype == torch.float32 and batch.inputs["task"].dtype == torch.long
        rows = zip(batch.items.tolist(), batch.inputs["task"].tolist(), batch.inputs["inputs"].tolist())
        for item, task, inputs in rows:
            assert task == (item >= 10)  # ten training items of the first task come first
            assert inputs == (first[item].tolist() if task == 0 else [-(item - 10)] * 3)
            seen.append(item)
        theirs = batch.inputs["task"][batch.row]
        assert (theirs[batch.annotator == 1] == 0).all() and (theirs[batch.annotator == 2] == 1).all()
    assert sorted(seen) == list(range(20))
    test = next(iter(data.test_dataloader()[0]))
    assert (test.inputs["task"].tolist(), test.gold.tolist()) == ([0, 1], [0, 1])
    assert [batch.to("cpu").inputs["task"].dtype for batch in data.predict_dataloader()] == [torch.long]


def test_folders_of_one_name(tmp_path):
    data = MultiTaskDataModule(two_tasks(tmp_path, names=("same", "same")))
    assert data.tasks == ["same", "same-2"]
    assert len(set(data.table.items)) == 23 and data.table.items[12] == "same-2/x0"


def test_tasks_that_do_not_go_together(tmp_path):
    with pytest.raises(UserError, match=r"--data.paths=\[\]: two crowd folders or more"):
        MultiTaskDataModule([])
    paths = two_tasks(tmp_path, width=4)
    with pytest.raises(UserError, match=rf"--data.paths=\[{paths[0]}\]: two crowd folders or more"):
        MultiTaskDataModule(paths[:1])
    with pytest.raises(UserError, match=r"y/two/features.npy: 4 columns where .*x/one/features.npy has 3;"):
        MultiTaskDataModule(paths)
    features = np.zeros((11, 3))
    features[4, 1] = np.nan
    np.save(Path(paths[1], "features.npy"), features)
    with pytest.raises(UserError, match=r"y/two/features.npy, row 5 of 11 \(item 'x4'\): nan in column 2"):
        MultiTaskDataModule(paths).setup("fit")


def test_tasks_are_thinned_and_held_out_together(tmp_path):
    data = MultiTaskDataModule(two_tasks(tmp_path), redundancy=1, holdout=0.2)
    data.setup("fit")
    assert data.table.annotations.counts.max() == 1
    assert len(data.datasets["heldout"].annotations.label) == 4
    assert data.table.notes == ["kept 20 of 40 annotations, at most 1 an item"]


# Features of annotators

WHO = "annotator,age,country,mail\nbob,40,FR,b@x\nann,20,,a@x\nzoe,7,DE,z@x\n"


def test_features_of_annotators(tmp_path):
    path = folder(tmp_path, items=TRAINING + "y,valid,1\nz,test,0\n")
    (path / "annotators.csv").write_text(WHO)
    data = FeatureDataModule(str(path), annotator_features=True, holdout=0.2)
    assert data.profile_features == 2 and data.profile_names == ["age", "country=FR"]
    assert data.profiles.tolist() == [[-1, 0], [1, 1]]  # of ann and bob: zoe labelled nothing
    assert data.table.notes == ["annotators: column 'mail' is no feature, since all its values differ"]
    data.setup("fit")
    loaders = [data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader(), data.predict_dataloader()]
    for batch in chain(*loaders, [data.crowd()]):
        assert batch.profile.shape == (len(batch.annotator), 2)
        assert torch.equal(batch.profile, data.profiles[batch.annotator])
    assert len(data.crowd().profile) == 16


def test_annotators_have_no_features_unless_asked(tmp_path):
    path = folder(tmp_path)
    (path / "annotators.csv").write_text(WHO)
    data = FeatureDataModule(str(path))
    data.setup("fit")
    assert (data.profile_features, data.profiles, data.profile_names) == (0, None, [])
    assert next(iter(data.train_dataloader())).profile is None and data.crowd().profile is None


def test_features_of_annotators_that_are_not_there(tmp_path):
    path = folder(tmp_path)
    with pytest.raises(UserError, match=r"--data.annotator_features=true: .* has no annotators.csv with .*; add it"):
        FeatureDataModule(str(path), annotator_features=True)
    (path / "annotators.csv").write_text("annotator\nann\nbob\n")
    with pytest.raises(UserError, match=r"has no annotators.csv with a column annotator and one for each feature"):
        FeatureDataModule(str(path), annotator_features=True)
    (path / "annotators.csv").write_text("annotator,mail\nann,a@x\nbob,b@x\n")
    with pytest.raises(UserError, match=r"column 'mail' is no feature, since all its values differ; add others"):
        FeatureDataModule(str(path), annotator_features=True)
    (path / "annotations.csv").unlink()  # new items, to be predicted
    (path / "annotators.csv").unlink()
    assert FeatureDataModule(str(path), annotator_features=True).profile_features == 0


def test_features_of_the_annotators_of_several_tasks(tmp_path):
    paths = two_tasks(tmp_path)
    Path(paths[1], "annotators.csv").write_text("annotator,age\nann,20\neve,40\n")
    data = MultiTaskDataModule(paths, annotator_features=True)
    assert data.profile_names == ["age", "age (missing)"]
    assert data.profiles.tolist() == [[-1, 0], [0, 1], [1, 0]]


# The simulated crowd


def frequencies(data: SimulatedDataModule, who: Tensor) -> tuple[Tensor, Tensor]:
    """Labels given by the annotators ``who`` (a mask), counted ``(K, K)`` and as expected of their matrices."""
    table, K = data.table.annotations, data.num_classes
    gold = data.table.gold[table.item]
    chosen = who[table.annotator]
    seen = torch.bincount(gold[chosen] * K + table.label[chosen], minlength=K * K).view(K, K).double()
    want = torch.zeros(K, K, dtype=torch.double)
    want.index_add_(0, gold[chosen], data.table.confusion[table.annotator[chosen], gold[chosen]].double())
    return seen, want


@pytest.mark.parametrize(
    "options",
    [
        dict(crowd="groups"),
        dict(crowd="mixed", spammers=0.3, adversaries=0.2),
        dict(crowd="uniform", accuracy=0.6),
        dict(source="digits", labels_per_item=20, adversaries=0.3),
    ],
    ids=lambda options: options.get("crowd", "digits"),
)
def test_labels_follow_the_true_matrices(options):
    data = SimulatedDataModule(**{"num_items": 4000 if "source" not in options else None, "seed": 1, **options})
    confusion = data.table.confusion
    assert len(data.table.annotations.label) > 19_000
    assert confusion.shape == (data.num_annotators, data.num_classes, data.num_classes)
    assert confusion.dtype == torch.float32 and (confusion >= 0).all()
    torch.testing.assert_close(confusion.sum(-1), torch.ones(confusion.shape[:2]))
    assert data.groups.shape == (data.num_annotators,)
    for group in data.groups.unique():
        seen, want = frequencies(data, data.groups == group)
        assert (seen[want == 0] == 0).all()
        possible = want > 0
        chi = ((seen - want)[possible] ** 2 / want[possible]).sum()
        freedom = int(possible.sum()) - data.num_classes
        assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_groups_are_those_of_the_paper():
    data = SimulatedDataModule(num_annotators=8000, num_items=8000)
    share = torch.bincount(data.groups) / data.num_annotators
    torch.testing.assert_close(share, torch.tensor([0.25, 0.55, 0.20]), atol=0.02, rtol=0)
    for group, diagonal in enumerate([[0.80952, 0.89474, 0.47575], [0.60714, 0.42395, 0.89474], [0.89474, 0, 0.25872]]):
        matrices = data.table.confusion[data.groups == group]
        assert (matrices == matrices[0]).all()
        torch.testing.assert_close(matrices[0].diagonal(), torch.tensor(diagonal), atol=2e-5, rtol=0)


def test_a_mixed_crowd():
    data = SimulatedDataModule(crowd="mixed", num_annotators=3000, num_items=5000, spammers=0.2, adversaries=0.1)
    share = torch.bincount(data.groups) / data.num_annotators
    torch.testing.assert_close(share, torch.tensor([0.7, 0.2, 0.1]), atol=0.03, rtol=0)
    right = data.table.confusion.diagonal(dim1=1, dim2=2)  # (R, K)
    ordinary = right[data.groups == 0]
    assert ordinary.min() >= 0.4 and ordinary.max() <= 0.95 and abs(ordinary.mean() - 0.675) < 0.02
    assert (data.table.confusion[data.groups == 1] == 1 / 3).all()
    assert torch.allclose(right[data.groups == 2], torch.tensor(0.1))
    assert len(data.table.confusion[data.groups != 1].unique(dim=0)) == int((data.groups != 1).sum())


@pytest.mark.parametrize(
    ("spammers", "adversaries", "want"), [(1, 0, {1}), (0, 1, {2}), (0, 0, {0}), (0.9, 0.1, {1, 2})]
)
def test_a_crowd_of_one_kind(spammers, adversaries, want):
    data = SimulatedDataModule(crowd="mixed", num_items=200, spammers=spammers, adversaries=adversaries)
    assert set(data.groups.tolist()) == want


def test_a_uniform_crowd():
    data = SimulatedDataModule(source="digits", crowd="uniform", accuracy=0.73)
    want = torch.full((10, 10), 0.03).fill_diagonal_(0.73)
    torch.testing.assert_close(data.table.confusion, want.expand(data.num_annotators, 10, 10))
    assert not data.groups.any()
    sure = SimulatedDataModule(crowd="uniform", accuracy=1.0, num_items=200).table
    assert torch.equal(sure.annotations.label, sure.gold[sure.annotations.item])


@pytest.mark.parametrize(("annotators", "labels"), [(100, 5.0), (10, 5.0), (10, 8.0), (300, 120.0), (100_000, 5.0)])
def test_pairs_are_drawn_alike(annotators, labels):
    data = SimulatedDataModule(num_items=2000, num_annotators=annotators, labels_per_item=labels)
    table = data.table.annotations
    counts = table.counts[:2000].double()
    p = labels / annotators
    assert abs(counts.mean() - labels) < 5 * (labels * (1 - p) / 2000) ** 0.5 + 0.02  # .02: an empty item gets a label
    assert abs(counts.var() / (labels * (1 - p)) - 1) < 0.2
    assert (counts >= 1).all() and not table.counts[2000:].any()
    assert len(set(zip(table.item.tolist(), table.annotator.tolist()))) == len(table.item)
    if annotators <= 300:
        load = torch.bincount(table.annotator, minlength=annotators).double()
        assert ((load - 2000 * p).abs() < 5 * (2000 * p * (1 - p)) ** 0.5).all()


def test_sparse_labels_leave_no_item_empty():
    data = SimulatedDataModule(num_items=500, num_annotators=50, labels_per_item=0.01)
    counts = Counter(data.table.annotations.counts[:500].tolist())
    assert set(counts) <= {1, 2} and counts[1] > 490


def test_everyone_labels_everything():
    for annotators in (1, 5, 300):
        data = SimulatedDataModule(num_items=50, num_annotators=annotators, labels_per_item=annotators)
        table = data.table.annotations
        want = [(i, r) for i in range(50) for r in range(annotators)]
        assert list(zip(table.item.tolist(), table.annotator.tolist())) == want


def test_a_great_crowd_costs_what_its_labels_cost():
    tracemalloc.start()
    start = time.perf_counter()
    data = SimulatedDataModule(num_items=2000, num_annotators=100_000)
    took, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 5
    assert peak < 2e7  # of bytes; items x annotators would be 2e8 cells
    assert 9000 < data.num_annotators < 10_500
    assert data.table.annotators == sorted(data.table.annotators)


def test_only_annotators_who_said_something_stay():
    data = SimulatedDataModule(num_items=30, num_annotators=100_001, seed=2)
    table = data.table
    assert set(table.annotations.annotator.tolist()) == set(range(data.num_annotators))
    assert len(table.annotators) == len(table.confusion) == len(data.groups) < 300
    assert all(len(name) == 7 and name[0] == "a" for name in table.annotators)
    numbers = [int(name[1:]) for name in table.annotators]
    assert all(a < b for a, b in pairwise(numbers)) and numbers[-1] > 10_000


def test_the_seed_is_all_the_chance_there_is():
    def key(data: SimulatedDataModule) -> list:
        return [data.features.tolist(), triples(data.table.annotations), data.table.gold.tolist()]

    for source in ("gaussians", "digits"):
        torch.manual_seed(1)
        np.random.seed(1)
        one = SimulatedDataModule(source=source, seed=3, num_items=100)
        torch.manual_seed(2)
        np.random.seed(2)
        again = SimulatedDataModule(source=source, seed=3, num_items=100)
        other = SimulatedDataModule(source=source, seed=4, num_items=100)
        assert key(one) == key(again)
        assert torch.equal(one.table.confusion, again.table.confusion)
        assert all(a != b for a, b in zip(key(one), key(other)))
        crowded = SimulatedDataModule(source=source, seed=3, num_items=200, num_annotators=7, crowd="uniform")
        assert torch.equal(one.features[one.index["test"]], crowded.features[crowded.index["test"]])


def test_gaussians():
    data = SimulatedDataModule()
    assert isinstance(data, CrowdDataModule) and data.table.name == "gaussians"
    assert [len(data.index[split]) for split in ("train", "valid", "test")] == [2457, 819, 819]
    assert (data.in_features, data.num_classes, data.holdout) == (2, 3, 0.0)
    for index in data.index.values():
        assert torch.bincount(data.table.gold[index]).unique().tolist() == [len(index) // 3]
    names = data.table.items
    assert (names[0], names[2456], names[2457], names[-1]) == (
        "train_00000",
        "train_02456",
        "valid_00000",
        "test_00818",
    )
    assert len(set(names)) == len(names) == len(data.table.split) == len(data.features)
    inputs = data.load_inputs()
    assert inputs.dtype == torch.float32 and inputs.shape == (4095, 2)


def test_the_best_classifier_of_gaussians():
    data = SimulatedDataModule(num_items=40_000, num_annotators=5)
    centres = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0]])
    nearest = torch.cdist(data.features, centres).argmin(-1)
    assert float((nearest == data.table.gold).float().mean()) == pytest.approx(0.948, abs=0.01)


def test_digits():
    from sklearn.datasets import load_digits

    data = SimulatedDataModule(source="digits", seed=5)
    assert [len(data.index[split]) for split in ("train", "valid", "test")] == [1078, 360, 359]
    assert (data.in_features, data.num_classes, data.table.name) == (64, 10, "digits")
    inputs = data.load_inputs()
    assert inputs.dtype == torch.float32 and inputs.min() == 0 and inputs.max() == 1
    pixels, gold = load_digits(return_X_y=True)
    want = sorted((*image, digit) for image, digit in zip(pixels.tolist(), gold.tolist()))
    assert sorted((*image, digit) for image, digit in zip((16 * inputs).tolist(), data.table.gold.tolist())) == want
    fewer = SimulatedDataModule(source="digits", seed=5, num_items=100)
    assert fewer.num_items == 100 and len(fewer.index["test"]) == 359
    assert set(data.groups.tolist()) == {0, 1}  # mixed


def test_the_table_is_a_crowd():
    data = SimulatedDataModule(num_items=20)
    assert isinstance(data.table, Crowd)
    assert len(data.table.annotations) == len(data.table.items) and (data.table.gold >= 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(source="moons"), "--data.source=moons: one of gaussians, digits"),
        (dict(crowd="wise"), "--data.crowd=wise: one of groups"),
        (dict(source="digits", crowd="groups"), "--data.crowd=groups: .*take mixed or uniform"),
        (dict(source="digits", num_items=1079), "--data.num_items=1079: digits has 1078"),
        (dict(num_items=0), "--data.num_items=0: "),
        (dict(num_items=-3), "--data.num_items=-3: "),
        (dict(accuracy=1.1), "--data.accuracy=1.1: "),
        (dict(accuracy=float("nan")), "--data.accuracy=nan: "),
        (dict(spammers=-0.1), "--data.spammers=-0.1: "),
        (dict(adversaries=2), "--data.adversaries=2: "),
        (dict(spammers=0.6, adversaries=0.5), "--data.spammers=0.6 and --data.adversaries=0.5: together at most 1"),
        (dict(num_annotators=0), "--data.num_annotators=0: "),
        (dict(num_annotators=4), "--data.labels_per_item=5.0: .* at most --data.num_annotators=4"),
        (dict(labels_per_item=0), "--data.labels_per_item=0: "),
        (dict(labels_per_item=-1), "--data.labels_per_item=-1: "),
        (dict(labels_per_item=101), "--data.labels_per_item=101: "),
        (dict(labels_per_item=float("nan")), "--data.labels_per_item=nan: "),
        (dict(seed=-1), "--data.seed=-1: "),
        (dict(batch_size=0), "--data.batch_size=0: "),
        (dict(holdout=1.0), "--data.holdout=1.0: "),
        (dict(redundancy=0), "--data.redundancy=0: at least one annotation an item, or null"),
        (dict(redundancy=-2), "--data.redundancy=-2: "),
        (dict(annotator_features=True), "--data.annotator_features=true: gaussians has no annotators.csv"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(UserError, match=f"^{message}") as caught:
        SimulatedDataModule(**options)
    assert "\n" not in str(caught.value)
