"""Every registered plug-in keeps its contract, and the contract catches those that do not."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn

import lfc.aggregation
import lfc.backbones
import lfc.datamodules
import lfc.heads
from lfc.aggregation import Aggregation, Aggregator, DawidSkene, Votes
from lfc.backbones import MLP, Backbone
from lfc.datamodules import CrowdDataModule, FeatureDataModule, SimulatedDataModule
from lfc.datamodules.multi_task import TaskInputs
from lfc.heads import AnnotatorTable, Head, MajorityVote, SpeeLFC
from lfc.heads.base import ConfusionHead
from lfc.testing import check_aggregator, check_backbone, check_datamodule, check_head
from tests.crowds import write_crowd


def registered(package, base):
    classes = [getattr(package, name) for name in package.__all__]
    return [cls for cls in classes if issubclass(cls, base) and not inspect.isabstract(cls)]


@pytest.mark.parametrize("head", registered(lfc.heads, Head), ids=lambda cls: cls.__name__)
def test_heads(head):
    check_head(head)


@pytest.mark.parametrize("kind", ["MW", "VW", "VB", "VW+B", "SW"])
@pytest.mark.parametrize("input", ["prob", "log_prob"])
def test_every_crowd_layer(kind, input):
    check_head(partial(lfc.heads.CrowdLayer, kind=kind, input=input))


def test_hard_majority_vote():
    check_head(partial(MajorityVote, kind="hard"))


INPUTS = {lfc.backbones.ItemEmbedding: torch.tensor([5, 0, 6, 0])}
"""What a backbone reads that does not read vectors."""


@pytest.mark.parametrize("backbone", registered(lfc.backbones, Backbone), ids=lambda cls: cls.__name__)
def test_backbones(backbone):
    check_backbone(backbone, INPUTS.get(backbone, torch.randn(4, 7)), in_features=7)


@pytest.mark.parametrize(
    "options", [{"hidden": []}, {"hidden": [5, 3], "dropout": 0.5}, {"standardize": True}], ids=str
)
def test_every_mlp(options):
    check_backbone(partial(MLP, **options), 3 + 10 * torch.randn(4, 7), in_features=7)


@pytest.mark.parametrize("data", registered(lfc.datamodules, CrowdDataModule), ids=lambda cls: cls.__name__)
def test_datamodules(data, tmp_path):
    known = {"path": str(write_crowd(tmp_path / "a")), "paths": [str(write_crowd(tmp_path / name)) for name in "ab"]}
    options = {name: value for name, value in known.items() if name in inspect.signature(data).parameters}
    for more in ({}, {"holdout": 0.2}, {"redundancy": 2}, {"redundancy": 2, "holdout": 0.2}):
        check_datamodule(partial(data, **options, **more, batch_size=7))
    if options:
        (tmp_path / "a" / "annotators.csv").write_text("annotator,age,country\nann,30,FR\nbob,,DE\ndan,41,FR\n")
        check_datamodule(partial(data, **options, batch_size=7, holdout=0.2, annotator_features=True))


@pytest.mark.parametrize("aggregator", registered(lfc.aggregation, Aggregator), ids=lambda cls: cls.__name__)
def test_aggregators(aggregator):
    check_aggregator(aggregator)


@pytest.mark.parametrize(
    "options",
    [{"kind": "one_coin"}, {"hard": True}, {"pseudo_count": 1.0}, {"kind": "one_coin", "hard": True}],
    ids=str,
)
def test_every_dawid_skene(options):
    check_aggregator(partial(DawidSkene, **options))


def test_hard_vote():
    check_aggregator(partial(lfc.aggregation.MajorityVote, kind="hard"))


@pytest.mark.parametrize(
    "cls",
    [
        *registered(lfc.heads, Head),
        *registered(lfc.backbones, Backbone),
        *registered(lfc.aggregation, Aggregator),
    ],
    ids=str,
)
def test_every_option_is_documented(cls):
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            assert f"{name}:" in cls.__doc__, f"{cls.__name__}: the option {name} has no help"


# what the checks must catch


class ReadsGold(SpeeLFC):
    def loss(self, features, batch):
        return super().loss(features, batch) + (0 if batch.gold is None else batch.gold.clamp_min(0).float().mean())


class GoldPosterior(SpeeLFC):
    def posterior(self, features, batch):
        known = batch.gold if batch.gold is not None else batch.items * 0
        return nn.functional.one_hot(known.clamp_min(0), self.num_classes).float()


class FirstLabelOnly(MajorityVote):
    def loss(self, features, batch):
        return -self(features)[batch.row[0], batch.label[0]]


class DependsOnOrder(SpeeLFC):
    def log_obs(self, features, batch):
        weight = torch.arange(1.0, len(batch.label) + 1)
        return super().log_obs(features, batch) * weight[:, None]


class NanWithoutVotes(MajorityVote):
    def _target(self, batch):
        votes = batch.votes(self.num_classes)
        return votes / votes.sum(-1, keepdim=True)


class MeanOverAnnotations(SpeeLFC):
    def loss(self, features, batch):
        return -self.annotation_log_prob(features, batch).mean().nan_to_num()


class UnusedParameter(SpeeLFC):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.unused = nn.Parameter(torch.zeros(3))


class NoParameter(SpeeLFC):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.scale = [torch.ones(1, requires_grad=True)]

    def loss(self, features, batch):
        return super().loss(features, batch) * self.scale[0].squeeze()


class NeverMoves(SpeeLFC):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.stuck = nn.Parameter(torch.ones(()))

    def loss(self, features, batch):
        return super().loss(features, batch) + 0 * self.stuck


class SqueezesBatchOfOne(SpeeLFC):
    def posterior(self, features, batch):
        return super().posterior(features, batch).squeeze()


class ForgetsState(MajorityVote):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.prior = torch.ones(self.num_classes)

    def prepare(self, crowd):
        self.prior = crowd.votes(self.num_classes).sum(0) + 1

    def loss(self, features, batch):
        return super().loss(features, batch) * self.prior[0]


class DetachesFeatures(SpeeLFC):
    def forward(self, features):
        return super().forward(features.detach())


class ReturnsProbabilities(MajorityVote):
    def forward(self, features):
        return super().forward(features).exp()


class AttachedReport(SpeeLFC):
    def annotators(self):
        return {"confusion": self.ancestral.weight.view(-1, self.num_classes, self.num_classes).softmax(-1)}


class Transposed(SpeeLFC):
    def annotators(self):
        return {"confusion": self.ancestral.table.softmax(-2) ** 1.5}


class TouchesEveryAnnotator(ConfusionHead):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.matrices = nn.Parameter(torch.eye(self.num_classes).repeat(self.num_annotators, 1, 1))

    def log_obs(self, features, batch):
        return self.matrices.log_softmax(-1)[batch.annotator, :, batch.label]


class FailsForTwoClasses(SpeeLFC):
    def loss(self, features, batch):
        return super().loss(features, batch) / (self.num_classes - 2)


class RefusesSizes(MajorityVote):
    def __init__(self, in_features, num_classes, num_annotators):
        super().__init__(in_features=in_features, num_classes=num_classes, num_annotators=num_annotators, num_items=1)


class RandomInEval(SpeeLFC):
    def loss(self, features, batch):
        return super().loss(features, batch) * (1 + torch.rand(()))


BROKEN_HEADS = {
    ReadsGold: "loss reads the gold labels",
    GoldPosterior: "posterior reads the gold labels|log-prob",
    FirstLabelOnly: "order of|without annotations|index",
    DependsOnOrder: "order of annotations",
    NanWithoutVotes: "finite",
    MeanOverAnnotations: "two batches must add up",
    UnusedParameter: "without gradient.*unused",
    NoParameter: "no nn.Parameter",
    NeverMoves: "never move.*stuck",
    SqueezesBatchOfOne: "loses its shape",
    ForgetsState: "does not restore",
    DetachesFeatures: "no gradient reaches the backbone",
    ReturnsProbabilities: "log-probabilities",
    AttachedReport: "detached",
    Transposed: "must sum to one",
    TouchesEveryAnnotator: "AnnotatorTable",
    FailsForTwoClasses: "finite",
    RefusesSizes: "num_items",
    RandomInEval: "same twice",
}


@pytest.mark.parametrize("head", BROKEN_HEADS, ids=lambda cls: cls.__name__)
def test_broken_heads_are_caught(head):
    with pytest.raises((AssertionError, TypeError, IndexError), match=BROKEN_HEADS[head]):
        check_head(head)


class WrongWidth(MLP):
    def __init__(self, in_features):
        super().__init__(in_features, [5])
        self.out_features = 6


class MixesItems(MLP):
    def __init__(self, in_features):
        super().__init__(in_features, [5])

    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(0))


class ForgetsScale(MLP):
    def __init__(self, in_features):
        super().__init__(in_features, [5])
        self.shift = torch.zeros(in_features)

    def prepare(self, inputs):
        self.shift = torch.cat(list(inputs)).mean(0)

    def forward(self, inputs):
        return super().forward(inputs - self.shift)


class DropsInEval(MLP):
    def __init__(self, in_features):
        super().__init__(in_features, [5])

    def forward(self, inputs):
        return nn.functional.dropout(super().forward(inputs), 0.5, training=True)


BROKEN_BACKBONES = {
    WrongWidth: "must return",
    MixesItems: "depend on the rest",
    ForgetsScale: "does not restore",
    DropsInEval: "same twice",
}


@pytest.mark.parametrize("backbone", BROKEN_BACKBONES, ids=lambda cls: cls.__name__)
def test_broken_backbones_are_caught(backbone):
    with pytest.raises(AssertionError, match=BROKEN_BACKBONES[backbone]):
        check_backbone(backbone, 2 + torch.randn(4, 7), in_features=7)


class Doubled(SimulatedDataModule):
    def train_dataloader(self):
        return list(super().train_dataloader()) * 2


class Unseeded(SimulatedDataModule):
    def train_dataloader(self):
        return self.loader_with(torch.seed() % 2**31)

    def loader_with(self, seed):
        loader = super().train_dataloader()
        loader.sampler.seed = seed % 100_000
        return loader


class LosesAnnotations(SimulatedDataModule):
    def crowd(self):
        crowd = super().crowd()
        crowd.row, crowd.annotator, crowd.label = crowd.row[1:], crowd.annotator[1:], crowd.label[1:]
        return crowd


class SizesTooLate(SimulatedDataModule):
    @property
    def num_classes(self):
        return 3 if self.datasets else 0


class WrongTask(SimulatedDataModule):
    num_tasks = 2


class TaskTooFar(SimulatedDataModule):
    num_tasks = 2

    def load_inputs(self):
        return TaskInputs(self.features, torch.full((len(self.features),), 2))


class OtherInputs(SimulatedDataModule):
    def load_inputs(self):
        return torch.rand(self.features.shape)


class NumbersTooFar(SimulatedDataModule):
    def load_inputs(self):
        return torch.arange(len(self.features)) + 2


class Halves(SimulatedDataModule):
    def load_inputs(self):
        return torch.zeros(len(self.features), dtype=torch.int32)


class NoProfile(SimulatedDataModule):
    profile_features = 2


class ProfileByRow(SimulatedDataModule):
    profile_features = 2

    def crowd(self):
        crowd = super().crowd()
        crowd.profile = torch.arange(2.0 * len(crowd.label)).view(-1, 2)
        return crowd

    def _dataset(self, *args):
        dataset = super()._dataset(*args)
        dataset.profiles = torch.zeros(self.num_annotators, 2)
        return dataset


class StrayProfile(SimulatedDataModule):
    def setup(self, stage):
        self.profiles = torch.zeros(self.num_annotators, 2)
        super().setup(stage)


BROKEN_DATA = {
    WrongTask: "must name the task",
    TaskTooFar: "task must be in",
    OtherInputs: "same inputs",
    NumbersTooFar: "item numbers must be in",
    Halves: "item numbers .* of int64",
    NoProfile: "profile must be there",
    ProfileByRow: "same in every annotation",
    StrayProfile: "profile must be None",
    Doubled: "shorter|longer|once",
    Unseeded: "same batches",
    LosesAnnotations: "exactly the training annotations",
    SizesTooLate: "positive before setup",
}


@pytest.mark.parametrize("data", BROKEN_DATA, ids=lambda cls: cls.__name__)
def test_broken_datamodules_are_caught(data):
    with pytest.raises((AssertionError, ValueError), match=BROKEN_DATA[data]):
        check_datamodule(partial(data, num_items=50, num_annotators=10))


class Vote(lfc.aggregation.MajorityVote):
    def change(self, result, votes):
        pass

    def _fit(self, votes, bar):
        result = super()._fit(votes, bar)
        self.change(result, votes)
        return result


class Unnormalized(Vote):
    def change(self, result, votes):
        result.posterior *= 1.1


class Negative(Vote):
    def change(self, result, votes):
        result.posterior += torch.linspace(-1.0, 1.0, votes.num_classes).double()


class SinglePrecision(Vote):
    def change(self, result, votes):
        result.posterior = result.posterior.float()


class LosesAnItem(Vote):
    def _fit(self, votes, bar):
        last = votes.num_items - (votes.num_items > 30)
        return Aggregation(super()._fit(votes, bar).posterior[:last], votes.labelled)

    def fit(self, votes):
        return self._fit(votes, None)


class NanForUnlabelled(Vote):
    def fit(self, votes):
        result = super().fit(votes)
        result.posterior[~votes.labelled] = float("nan")
        return result


class LabelsUnlabelled(Vote):
    def change(self, result, votes):
        result.labelled = torch.ones_like(votes.labelled)


class LastOfAnnotatorsMissing(Vote):
    def change(self, result, votes):
        result.annotators["ability"] = result.annotators["ability"][:-1]


class ColumnsSumToOne(Vote):
    def change(self, result, votes):
        result.annotators["confusion"] = result.annotators["confusion"].transpose(1, 2)


class ItemsUnordered(Vote):
    def change(self, result, votes):
        result.items["weight"] = torch.arange(votes.num_items).double()


class AnnotatorsUnordered(Vote):
    def change(self, result, votes):
        result.annotators["ability"] = torch.arange(votes.num_annotators).double()


class FavoursFirstItem(Vote):
    def change(self, result, votes):
        result.posterior[0] = 1 / votes.num_classes


class FavoursFirstAnnotator(Vote):
    def _fit(self, votes, bar):
        first = (votes.annotator == 0).nonzero().squeeze(-1).repeat(3)
        triple = [torch.cat([x, x[first]]) for x in (votes.item, votes.annotator, votes.label)]
        return super()._fit(Votes(*triple, votes.num_items, votes.num_annotators, votes.num_classes), bar)


class FavoursFirstClass(Vote):
    def change(self, result, votes):
        result.posterior[:, 0] += 0.1
        result.posterior /= result.posterior.sum(-1, keepdim=True)


class CountsEmptyItems(Vote):
    def change(self, result, votes):
        shrink = votes.labelled.double().mean()
        result.posterior = shrink * result.posterior + (1 - shrink) / votes.num_classes


class CountsEmptyAnnotators(Vote):
    def change(self, result, votes):
        result.annotators["ability"] = result.annotators["ability"] / votes.num_annotators


class CountsOnce(Vote):
    def _fit(self, votes, bar):
        item, annotator, label = torch.stack([votes.item, votes.annotator, votes.label]).unique(dim=1)
        return super()._fit(
            Votes(item, annotator, label, votes.num_items, votes.num_annotators, votes.num_classes), bar
        )


class Unsteady(Vote):
    def change(self, result, votes):
        result.posterior[:] = torch.rand(result.posterior.shape).double().softmax(-1)


class ChangesVotes(Vote):
    def change(self, result, votes):
        votes.label[0] = 0


class Decreases(Vote):
    def change(self, result, votes):
        result.history = [-3.0, -2.0, -2.1]


class NeedsThreeClasses(Vote):
    def change(self, result, votes):
        result.posterior /= votes.num_classes - 2


class Contrary(Vote):
    def change(self, result, votes):
        result.posterior[:] = (1 - result.posterior) / (votes.num_classes - 1)


BROKEN_AGGREGATORS = {
    Unnormalized: "sum to one",
    Negative: "nonnegative",
    SinglePrecision: "float64",
    LosesAnItem: "must be .N, K.",
    NanForUnlabelled: "finite",
    LabelsUnlabelled: "-1 where there are no votes",
    LastOfAnnotatorsMissing: "must have 6 rows",
    ColumnsSumToOne: "must sum to one: true classes",
    ItemsUnordered: "does not follow items",
    AnnotatorsUnordered: "'ability'.*order of annotators",
    FavoursFirstItem: "order of items",
    FavoursFirstAnnotator: "order of annotators",
    FavoursFirstClass: "order of classes",
    CountsEmptyItems: "without votes change the posterior",
    CountsEmptyAnnotators: "without votes change annotators",
    CountsOnce: "must count again",
    Unsteady: "same posterior twice",
    ChangesVotes: "changes the votes",
    Decreases: "history decreases",
    NeedsThreeClasses: "finite",
    Contrary: "must get the class said",
}


@pytest.mark.parametrize("aggregator", BROKEN_AGGREGATORS, ids=lambda cls: cls.__name__)
def test_broken_aggregators_are_caught(aggregator):
    with pytest.raises(AssertionError, match=BROKEN_AGGREGATORS[aggregator]):
        check_aggregator(aggregator)


def test_the_folder_of_these_tests_is_read(tmp_path):
    data = FeatureDataModule(str(write_crowd(tmp_path)))
    assert (data.num_classes, data.num_annotators, data.num_items) == (3, 4, 30)
    assert AnnotatorTable(torch.zeros(2), 3).table.shape == (3, 2)
