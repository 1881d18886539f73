"""What a datamodule is: it serves annotations beside inputs, a batch of items at a time."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lfc.annotations import SPLITS, Annotations, Crowd, encode_profiles
from lfc.batch import CrowdBatch
from lfc.errors import UserError


class CrowdDataset(Dataset[CrowdBatch]):
    """Some items of a crowd with their annotations; an index *tensor* fetches a whole batch at once.

    Args:
        inputs: Anything that an index tensor into all items selects from: a tensor, or an object with ``__getitem__``.
        index: ``(n,)`` which of all items these are.
        annotations: Of these items, in that order.
        gold: ``(n,)`` reference classes, or ``None`` to hide them.
        soft: ``(n, K)`` label distributions.
        rows: ``(n,)`` the items' positions in their split, where they are not ``0..n``.
        profiles: ``(R, F)`` features of every annotator.
    """

    def __init__(
        self,
        inputs: Any,
        index: Tensor,
        annotations: Annotations,
        gold: Tensor | None,
        soft: Tensor | None = None,
        rows: Tensor | None = None,
        profiles: Tensor | None = None,
    ) -> None:
        self.inputs, self.index, self.annotations = inputs, index, annotations
        self.gold, self.soft, self.rows, self.profiles = gold, soft, rows, profiles
        self.train: Tensor | None = None
        """``(n,)`` the items' rows among the training items, -1 for any other; for those that heads ask about."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Tensor) -> CrowdBatch:
        row, annotator, label = self.annotations.take(rows)
        return CrowdBatch(
            inputs=self.inputs[self.index[rows]],
            items=rows if self.rows is None else self.rows[rows],
            row=row,
            annotator=annotator,
            label=label,
            gold=None if self.gold is None else self.gold[rows],
            soft=None if self.soft is None else self.soft[rows],
            profile=None if self.profiles is None else self.profiles[annotator],
            train=None if self.train is None else self.train[rows],
        )


class IndexSampler(DistributedSampler):
    """Index tensors, a batch each; in training shuffled anew every epoch, as the seed and the epoch say.

    Under DDP each rank takes every ``world``-th item. Training ranks must make equally many steps, so there the last
    few items may be seen twice; in evaluation every item is seen once.

    Args:
        size: Number of items.
        batch_size: Items in a batch.
        train: Whether to shuffle, and to give each rank as many items.
        rank: This process, in ``[0, world)``.
        world: Number of processes.
        seed: Of the shuffling; by default the seed of the run.
    """

    def __init__(
        self, size: int, batch_size: int, *, train: bool = False, rank: int = 0, world: int = 1, seed: int | None = None
    ) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        super().__init__(cast(Any, range(size)), num_replicas=world, rank=rank, shuffle=train, seed=seed)
        self.size, self.batch_size, self.train = size, batch_size, train

    def _order(self) -> Tensor:
        if self.train:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed * 100_003 + self.epoch))
        else:
            order = torch.arange(self.size)
        # a rank without a single batch would wait for the others for ever, so a tiny split is also repeated
        wanted = -(-self.size // self.num_replicas) * self.num_replicas if self.train else self.num_replicas
        if 0 < self.size < wanted:
            order = order.repeat(-(-wanted // self.size))[:wanted]
        return order[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        return iter(order.split(self.batch_size) if len(order) else ())

    def __len__(self) -> int:
        share = (
            self.total_size // self.num_replicas if self.train else len(range(self.rank, self.size, self.num_replicas))
        )
        return -(-max(share, min(self.size, 1)) // self.batch_size)


def at_most(annotations: Annotations, most: int, seed: int) -> Tensor:
    """A mask ``(A,)`` of ``most`` random annotations of each item, or of all where it has no more.

    With the same seed, those of a smaller ``most`` are among those of a greater one.

    >>> table = Annotations.from_long(torch.tensor([0, 0, 0, 2]), torch.arange(4), torch.zeros(4).long(), num_items=3)
    >>> table.where(at_most(table, 2, seed=0)).counts.tolist()
    [2, 0, 1]
    """
    generator = torch.Generator().manual_seed(seed * 100_003 + 1)  # other numbers than those that hold out
    item = annotations.item  # (A,), sorted
    order = torch.randperm(len(item), generator=generator)
    order = order[torch.argsort(item[order], stable=True)]  # by item, and at random within one
    mask = torch.zeros(len(item), dtype=torch.bool)
    mask[order] = torch.arange(len(item)) - annotations.offsets[item] < most
    return mask


def hold_out(annotations: Annotations, fraction: float, seed: int) -> Tensor:
    """A random mask ``(A,)`` of annotations to hold out, about ``fraction`` of them.

    No annotator loses their only label, and no item its only one unless there is no other way to find enough.
    """
    generator = torch.Generator().manual_seed(seed)
    size = len(annotations.label)
    order = torch.randperm(size, generator=generator)

    def repeated(key: Tensor) -> Tensor:  # whether an earlier annotation in the order has the same key
        first = torch.full((int(key.max()) + 1 if size else 0,), size).scatter_reduce_(
            0, key[order], torch.arange(size), "amin"
        )
        return first[key[order]] < torch.arange(size)

    another = repeated(annotations.annotator)
    order = torch.cat([order[~another], order[another]])  # first those that stay: an item that has one keeps a label
    staying = int((~another).sum())
    free, another_of_item = order[staying:], repeated(annotations.item)[staying:]
    chosen = torch.cat([free[another_of_item], free[~another_of_item]])
    mask = torch.zeros(size, dtype=torch.bool)
    mask[chosen[: round(fraction * size)]] = True
    return mask


class CrowdDataModule(LightningDataModule, ABC):
    """Serves a crowd in batches of items, each with all its annotations.

    A subclass reads a :class:`lfc.annotations.Crowd` and says what the inputs are, in :meth:`load_inputs`.

    Args:
        crowd: Who said what; given by the subclass.
        batch_size: Items in a batch.
        num_workers: Processes that prepare batches; 0 is fastest where inputs are already in memory.
        holdout: Share of the training annotations to hold out, to be scored as ``val/annotation_nll``. ``null`` takes
            .1 where there is no other way to choose the best epoch (no gold and no annotations on a validation split),
            and none otherwise.
        split_seed: Seed of the choice of what is held out, and of which annotations ``redundancy`` keeps.
        redundancy: Keep at most so many annotations of each item, of any split, chosen at random, and know of no other,
            to see what accuracy fewer labels would have bought. With one seed, fewer are always some of the more, and
            annotators left without labels stay. ``null`` keeps all.
        annotator_features: Whether heads may read the columns of ``annotators.csv``: numbers are standardised, texts
            become a column a value.
    """

    in_features: int | None = None
    """Width of the inputs, where they are vectors."""
    num_tasks: int = 1
    """Number of labelling tasks; with more than one, inputs are ``{"inputs": ..., "task": (B,)}``."""
    profile_features: int = 0
    """Width ``F`` of what is known of each annotator; 0 unless asked for."""
    profiles: Tensor | None = None
    """``(R, F)`` what is known of each annotator."""
    profile_names: list[str]
    """Names of its columns."""

    def __init__(
        self,
        crowd: Crowd,
        batch_size: int = 64,
        num_workers: int = 0,
        holdout: float | None = None,
        split_seed: int = 0,
        redundancy: int | None = None,
        annotator_features: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"--data.batch_size={batch_size}: a batch holds at least one item")
        if holdout is not None and not 0 <= holdout < 1:
            raise UserError(f"--data.holdout={holdout}: a share of the annotations, from 0 to below 1, or null")
        if redundancy is not None and redundancy < 1:
            raise UserError(f"--data.redundancy={redundancy}: at least one annotation an item, or null for all")
        crowd = replace(crowd, notes=list(crowd.notes))
        if redundancy is not None:
            keep = at_most(crowd.annotations, redundancy, split_seed)
            crowd.annotations = crowd.annotations.where(keep)
            crowd.notes.append(f"kept {int(keep.sum())} of {len(keep)} annotations, at most {redundancy} an item")
        self.table, self.batch_size, self.num_workers, self.split_seed = crowd, batch_size, num_workers, split_seed
        self.profile_names = []
        if annotator_features and crowd.annotators:  # new items that nobody labelled need none
            self._encode_profiles()
        self.index = {name: (crowd.split == code).nonzero().squeeze(-1) for code, name in enumerate(SPLITS)}
        self.holdout = self._default_holdout() if holdout is None else holdout
        self.datasets: dict[str, CrowdDataset] = {}

    def _default_holdout(self) -> float:
        valid = self.index["valid"]
        informative = (self.table.gold[valid] >= 0).any() or self.table.annotations.counts[valid].any()
        return 0.0 if informative else 0.1

    def _encode_profiles(self) -> None:
        if not self.table.profiles:
            wanted = "annotators.csv with a column annotator and one for each feature"
            raise UserError(f"--data.annotator_features=true: {self._where} has no {wanted}; add it, or take false")
        self.profiles, self.profile_names = encode_profiles(self.table.profiles, self.table.notes)
        if not self.profile_names:
            reason = self.table.notes[-1].removeprefix("annotators: ")
            raise UserError(f"--data.annotator_features=true: {self._where}: {reason}; add others, or take false")
        self.profile_features = len(self.profile_names)

    @abstractmethod
    def load_inputs(self) -> Any:
        """The inputs of all items in the table's order, to be selected from with an index tensor; called once."""

    # sizes: known before anything is loaded, so that model and config are built from them

    @property
    def classes(self) -> list[str]:
        """Class names in order."""
        return self.table.classes

    @property
    def num_classes(self) -> int:
        """``K``."""
        if len(self.table.classes) < 2:
            raise UserError(f"{self._where}: no labels to tell the classes from; list them in meta.json, or add labels")
        return len(self.table.classes)

    @property
    def num_annotators(self) -> int:
        """``R``."""
        if not self.table.annotators:
            raise UserError(f"{self._where}: no annotations; add annotations.csv with item,annotator,label")
        return len(self.table.annotators)

    @property
    def annotators_digest(self) -> str:
        """Tells whether two crowds have the same annotators, in the same rows, without telling who they are."""
        return hashlib.sha256("\n".join(self.table.annotators).encode()).hexdigest()

    @property
    def num_items(self) -> int:
        """``N``, the training items."""
        return len(self.index["train"])

    @property
    def _where(self) -> str:
        return str(self.table.path or self.table.name)

    def has_gold(self, split: str) -> bool:
        """Whether any item of ``split`` has a gold label."""
        return bool((self.table.gold[self.index[split]] >= 0).any())

    # datasets

    def setup(self, stage: str | None = None) -> None:
        """Load the inputs and lay out the splits; Lightning calls it."""
        if self.datasets:
            return
        if stage == "fit" and not self.num_items:
            raise UserError(f"{self._where}: no item is in the train split; mark some as train in items.csv")
        if stage == "fit" and not self.table.annotations.counts[self.index["train"]].any():
            raise UserError(
                f"{self._where}: no item of the train split has an annotation; annotate some, or change splits"
            )
        for note in self.table.notes:
            rank_zero_info(f"note: {note}")
        inputs = self.load_inputs()
        annotations = {name: self.table.annotations.select(index) for name, index in self.index.items()}
        held = hold_out(annotations["train"], self.holdout, self.split_seed)
        seen = {**annotations, "train": annotations["train"].where(~held)}
        self.datasets = {name: self._dataset(inputs, index, seen[name]) for name, index in self.index.items()}
        if held.any():
            kept = annotations["train"].where(held)
            rows = kept.counts.nonzero().squeeze(-1)
            self.datasets["heldout"] = CrowdDataset(
                inputs, self.index["train"][rows], kept.select(rows), gold=None, rows=rows, profiles=self.profiles
            )
        annotated = self.table.annotations.counts.nonzero().squeeze(-1)
        self.datasets["annotated"] = self._dataset(inputs, annotated, self.table.annotations.select(annotated))
        everything = torch.arange(len(self.table.items))
        trained = torch.full_like(everything, -1).index_copy_(0, self.index["train"], torch.arange(self.num_items))
        for name in ("train", "annotated"):
            self.datasets[name].train = trained[self.datasets[name].index]
        self.datasets["all"] = self._dataset(inputs, everything, self.table.annotations)

    def _dataset(self, inputs: Any, index: Tensor, annotations: Annotations) -> CrowdDataset:
        soft = None if self.table.soft is None else self.table.soft[index]
        return CrowdDataset(inputs, index, annotations, self.table.gold[index], soft, profiles=self.profiles)

    def crowd(self) -> CrowdBatch:
        """All training annotations as one batch without inputs; row ``i`` is training item ``i``."""
        train = self.datasets["train"].annotations
        profile = None if self.profiles is None else self.profiles[train.annotator]
        return CrowdBatch(None, torch.arange(len(train)), train.item, train.annotator, train.label, profile=profile)

    # loaders

    def loader(
        self, split: str, *, train: bool = False, rank: int | None = None, world: int | None = None
    ) -> DataLoader:
        """Batches of one split: this rank's share, by default that of the process that asks."""
        trainer = self.trainer
        dataset = self.datasets[split]
        sampler = IndexSampler(
            len(dataset),
            self.batch_size,
            train=train,
            rank=(trainer.global_rank if trainer else 0) if rank is None else rank,
            world=(trainer.world_size if trainer else 1) if world is None else world,
        )
        if train and trainer:  # a resumed run makes its first iterator before Lightning tells samplers the epoch
            sampler.set_epoch(cast(Any, trainer.fit_loop.epoch_progress.current).processed)
        return DataLoader(
            dataset,
            sampler=sampler,
            batch_size=None,  # the sampler's index tensors are batches already
            collate_fn=_as_is,
            generator=torch.Generator().manual_seed(sampler.seed),  # or each iterator would draw from the global one
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader:
        """Training items, shuffled."""
        return self.loader("train", train=True)

    def val_dataloader(self) -> list[DataLoader]:
        """The validation split, then the training items of which annotations were held out."""
        return [self.loader(name) for name in ("valid", "heldout") if len(self.datasets.get(name, ()))]

    def test_dataloader(self) -> list[DataLoader]:
        """The test split, then every annotated item, whose labels are inferred; see :attr:`test_splits`."""
        if not self.test_splits:
            raise UserError(f"{self._where}: nothing to test: no item is in the test split, and none is annotated")
        return [self.loader(name) for name in self.test_splits]

    @property
    def test_splits(self) -> list[str]:
        """Names of the datasets that :meth:`test_dataloader` serves, in order."""
        return [name for name in ("test", "annotated") if len(self.datasets[name])]

    def predict_dataloader(self) -> DataLoader:
        """The test split, or every item where there is none."""
        return self.loader(self.predict_split)

    @property
    def predict_split(self) -> str:
        """Name of the dataset that is predicted."""
        return "test" if len(self.index["test"]) else "all"


def _as_is(batch: Any) -> Any:
    return batch


__all__ = ["CrowdDataModule", "CrowdDataset", "IndexSampler", "at_most", "hold_out"]
