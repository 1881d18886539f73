"""Training as a whole: several processes, EM, what is learned, and crowds at the edge."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lfc import functional
from lfc.annotations import Annotations, Crowd
from lfc.backbones import MLP
from lfc.cli import main
from lfc.datamodules import CrowdDataModule, SimulatedDataModule
from lfc.heads import CrowdLayer, Head, MajorityVote, SpeeLFC, SpeeLFCD
from lfc.module import CrowdClassifier
from lfc.runs import write_report
from tests.crowds import write_crowd
from tests.test_cli import ROOT, fit, metrics, rows

TWO = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]


class ToyEM(Head):
    """Dawid and Skene's EM, with the network's opinion as the prior of each item."""

    em_every = 1

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("targets", torch.zeros(self.num_items, self.num_classes))
        self.register_buffer("confusion", torch.zeros(self.num_annotators, self.num_classes, self.num_classes))

    def prepare(self, crowd):
        self.m_step(functional.normalize_rows(crowd.votes(self.num_classes)), crowd)

    def posterior(self, features, batch):
        log_obs = self.confusion[batch.annotator, :, batch.label].clamp_min(1e-6).log()
        return functional.posterior(self(features), log_obs, batch.row)

    def m_step(self, rows, crowd):
        self.targets.copy_(rows)
        self.confusion.copy_(
            functional.normalize_rows(functional.confusion_counts(rows, crowd, self.num_annotators)),
        )

    def loss(self, features, batch):
        return -(self.targets[batch.items] * self(features)).sum() / len(batch)

    def annotators(self):
        return {"confusion": self.confusion}


class Given(CrowdDataModule):
    """A crowd made by hand: ``said`` is a list of (item, annotator, label); inputs tell the classes apart."""

    def __init__(self, said, split, gold, num_classes, num_annotators, **loading):
        item, annotator, label = torch.tensor(said).T
        self.inputs = torch.eye(num_classes)[torch.arange(len(split)) % num_classes]
        self.in_features = num_classes
        table = Crowd(
            items=[f"i{i}" for i in range(len(split))],
            annotators=[f"r{r}" for r in range(num_annotators)],
            classes=[f"k{k}" for k in range(num_classes)],
            annotations=Annotations.from_long(item, annotator, label, len(split)),
            split=torch.tensor(split),
            gold=torch.tensor(gold),
        )
        super().__init__(crowd=table, **loading)

    def load_inputs(self):
        return self.inputs


def classifier(data, head, lr=0.01, hidden=(16,), **options):
    seed_everything(0, verbose=False)
    backbone = MLP(data.in_features, hidden=list(hidden), standardize=True)
    sizes = {"num_classes": data.num_classes, "num_annotators": data.num_annotators, "num_items": data.num_items}
    module = head(in_features=backbone.out_features, **sizes, **options)
    return CrowdClassifier(backbone, module, partial(torch.optim.Adam, lr=lr))


def trainer(epochs, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "use_distributed_sampler": False, "accelerator": "cpu"} | options
    return Trainer(max_epochs=epochs, **quiet, **options)


def train(data, head, epochs, lr=0.01, **options):
    model, lightning = classifier(data, head, lr, **options), trainer(epochs)
    lightning.fit(model, datamodule=data)
    loss = lightning.callback_metrics["train/loss"]
    lightning.test(model, datamodule=data, verbose=False)
    scores = {key: value.item() for key, value in lightning.callback_metrics.items()}
    return model, scores | {"train/loss": loss.item()}


# two processes


def fit_in_two_processes(folder, *args):
    command = [sys.executable, "-m", "lfc.cli", "fit", f"--config={ROOT}/configs/quickstart.yaml", *TWO, *args,
               "--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", "--run.wandb=off",
               "--data.num_annotators=20", f"--run.root={folder}"]  # fmt: skip
    drop = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "LFC_RUN_FOLDER")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stderr
    (run,) = (folder / "quickstart").iterdir()  # one folder for both processes
    return run


def check_run_folder(run, items):
    assert np.isfinite(metrics(run)["train/loss"]) and metrics(run)["epochs"] == 2
    labels = rows(run / "labels.csv")
    assert [row["item"] for row in labels] == [f"train_{i:05d}" for i in range(items)]
    for row in labels:
        assert sum(float(row[f"p_{k}"]) for k in range(3)) == pytest.approx(1, abs=1e-4)
    predictions = rows(run / "predictions.csv")
    assert len(predictions) == 819
    right = np.mean([row["label"] == row["gold"] for row in predictions])
    assert metrics(run)["test/acc"] == pytest.approx(right, abs=1e-6)
    assert [row["epoch"] for row in rows(run / "history.csv")] == ["0", "1"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    names = ("config.yaml", "annotators.csv", "confusion.npz")
    assert all((run / name).stat().st_size for name in names)


def check_same_run(two, one):
    """Two processes with batches of b made the steps of one with batches of 2b."""
    times = ("seconds", "peak_memory_mb")
    for key, value in metrics(one).items():
        if isinstance(value, float) and key not in times:
            assert metrics(two)[key] == pytest.approx(value, abs=1e-4), key
    saved = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (two, one)]
    for name, value in saved[1].items():
        torch.testing.assert_close(saved[0][name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_two_processes_that_update_by_row_make_the_steps_of_one(tmp_path):
    two = fit_in_two_processes(
        tmp_path / "two", "--data.num_items=120", "--data.batch_size=10", "--model.annotator_update=rows"
    )
    check_run_folder(two, 120)
    fit(tmp_path / "one", "--data.num_items=120", "--data.num_annotators=20", "--data.batch_size=20",
        "--model.annotator_update=dense")  # fmt: skip
    check_same_run(two, tmp_path / "one" / "quickstart" / "SpeeLFC-seed0")


def test_em_in_two_processes_ends_with_the_buffers_of_one(tmp_path):
    args = ["--data.num_items=120", "--model.head=tests.test_training.ToyEM"]
    two = fit_in_two_processes(tmp_path / "two", *args, "--data.batch_size=10")
    check_run_folder(two, 120)
    fit(tmp_path / "one", *args, "--data.num_annotators=20", "--data.batch_size=20")
    check_same_run(two, tmp_path / "one" / "quickstart" / "ToyEM-seed0")


@pytest.mark.slow
def test_two_processes_share_an_odd_number_of_items(tmp_path):
    run = fit_in_two_processes(tmp_path, "--data.num_items=121", "--model.annotator_update=dense")
    check_run_folder(run, 121)


def test_predict_in_two_processes_is_refused_at_once(tmp_path, capsys):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["predict", f"--config={run}/config.yaml", f"--ckpt_path={run}/checkpoints/best.ckpt", *TWO])
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1] == "lfc: error: lfc predict runs in one process; set --trainer.devices=1"


def test_a_second_run_of_a_launched_process_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # as the first process of several has it
    for _ in range(2):
        fit(
            tmp_path,
            "--data.num_items=40",
            "--trainer.devices=1",
            "--trainer.max_epochs=1",
            "--trainer.accelerator=cpu",
        )
    assert len(list((tmp_path / "quickstart").glob("*/metrics.json"))) == 2


# EM


def test_the_first_em_round_is_the_one_made_by_hand():
    data = SimulatedDataModule(num_items=40, num_annotators=6, labels_per_item=3, batch_size=16)
    model, lightning = classifier(data, ToyEM, lr=0.0), trainer(1)
    lightning.fit(model, datamodule=data)
    head, crowd = model.head, data.crowd()
    said = list(zip(crowd.row.tolist(), crowd.annotator.tolist(), crowd.label.tolist()))
    with torch.no_grad():
        prior = model.eval()(data.features[:40]).exp().double().numpy()

    def matrices(posterior):
        counts = np.zeros((6, 3, 3))
        for item, annotator, label in said:
            counts[annotator, :, label] += posterior[item]
        total = counts.sum(-1, keepdims=True)
        return np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / 3)

    votes = np.zeros((40, 3))
    for item, _, label in said:
        votes[item, label] += 1
    before = matrices(votes / votes.sum(-1, keepdims=True))
    posterior = prior.copy()
    for item, annotator, label in said:
        posterior[item] *= np.maximum(before[annotator, :, label], 1e-6)
    posterior /= posterior.sum(-1, keepdims=True)
    assert np.allclose(head.targets, posterior, atol=1e-5)
    assert np.allclose(head.confusion, matrices(posterior), atol=1e-5)
    assert not np.allclose(head.confusion, before, atol=1e-2)


def test_em_rounds_come_as_often_as_the_head_says(monkeypatch):
    data = SimulatedDataModule(num_items=20, num_annotators=6, labels_per_item=3)
    model, lightning, rounds = classifier(data, ToyEM), trainer(5), []
    monkeypatch.setattr(ToyEM, "em_every", 2)
    monkeypatch.setattr(
        ToyEM, "e_step", lambda self, features, batch: rounds.append(1) or self.posterior(features, batch)
    )
    lightning.fit(model, datamodule=data)
    assert len(rounds) == 2  # after epochs 1 and 3; one batch each


# what is learned


def test_the_annotators_matrices_are_recovered():
    data = SimulatedDataModule(crowd="uniform", accuracy=0.8, num_items=2000, labels_per_item=5, num_annotators=10)
    _, scores = train(data, SpeeLFC, epochs=15)
    assert scores["annotators/i_js"] < 0.02
    assert scores["labels/acc"] > scores["labels/majority_acc"]


def test_an_adversary_has_a_negative_ability():
    data = SimulatedDataModule(
        crowd="mixed", adversaries=0.2, spammers=0, num_items=1500, num_annotators=15, labels_per_item=5, seed=1
    )
    model, _ = train(data, SpeeLFCD, epochs=30)
    ability, right = model.head.annotators()["ability"], data.table.confusion.diagonal(dim1=-2, dim2=-1).mean(-1)
    adversary, ordinary = data.groups == 2, right > 0.6  # whoever is right less than half the time is below 0 too
    assert adversary.any() and ordinary.sum() > 5
    assert (ability[adversary] < 0).all() and (ability[ordinary] > 0).all()


def test_knowing_the_annotators_beats_the_majority():
    scores = {head: train(SimulatedDataModule(), head, epochs=15)[1] for head in (SpeeLFC, MajorityVote)}
    assert scores[SpeeLFC]["test/acc"] > scores[MajorityVote]["test/acc"] + 0.02


# crowds at the edge


def crowd_of(num_classes=2, num_annotators=3, size=12, gold=True, **loading):
    """``size`` training items in turn of each class, then as many to test; everybody is right."""
    truth = [i % num_classes for i in range(2 * size)]
    said = [(i, r, truth[i]) for i in range(size) for r in range(num_annotators)]
    return Given(
        said, [0] * size + [2] * size, truth if gold else [-1] * 2 * size, num_classes, num_annotators, **loading
    )


EDGES = {
    "without gold": {"gold": False},
    "two classes": {"num_classes": 2},
    "a hundred classes": {"num_classes": 100, "size": 200},
    "batches of one": {"batch_size": 1},
    "a single annotator": {"num_annotators": 1},
    "nothing held out": {"holdout": 0.0},
}


@pytest.mark.parametrize("head", [SpeeLFC, SpeeLFCD, MajorityVote, CrowdLayer, ToyEM])
@pytest.mark.parametrize("name", EDGES)
def test_training_goes(name, head):
    model, scores = train(crowd_of(**EDGES[name]), head, epochs=2)
    assert np.isfinite(scores["train/loss"])
    assert ("test/acc" in scores) == (name != "without gold")
    assert torch.isfinite(model.report.posterior).all()


def test_an_annotator_who_was_never_learned_from_has_no_accuracy(tmp_path):
    said = [(i, r, i % 2) for i in range(8) for r in range(2)] + [(9, 2, 1)]  # the third only on a test item
    data = Given(said, [0] * 8 + [2] * 4, [i % 2 for i in range(12)], 2, 3)
    model, scores = train(data, SpeeLFCD, epochs=2)
    write_report(tmp_path, model.report)
    table = rows(tmp_path / "annotators.csv")
    assert [row["accuracy"] == "" for row in table] == [False, False, True]
    assert [row["ability"] == "" for row in table] == [False, False, True]
    assert [row["labels"] for row in table] == ["8", "8", "1"]
    assert np.isfinite(scores["train/loss"])


def test_an_item_without_labels_trains_nothing_and_breaks_nothing():
    said = [(i, r, i % 2) for i in range(1, 8) for r in range(2)]  # item 0 has none
    data = Given(said, [0] * 8 + [2] * 4, [i % 2 for i in range(12)], 2, 2, batch_size=1)
    model, scores = train(data, SpeeLFC, epochs=2)
    assert np.isfinite(scores["train/loss"])
    assert len(model.report.posterior) == 7


def test_by_row_without_validation_the_rows_are_not_late():
    """A row that its last batches did not hold is at the present step in the checkpoint, whoever asks."""
    found = []
    for update in ("dense", "rows"):
        data = SimulatedDataModule(num_items=60, num_annotators=30, labels_per_item=2, batch_size=4, holdout=0.0)
        model, lightning = classifier(data, SpeeLFC), trainer(2, limit_val_batches=0)
        model.annotator_update = update
        lightning.fit(model, datamodule=data)
        found.append(model.head.ancestral.table.clone())
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


# precision and the Python interface


def test_heads_work_in_float32_under_mixed_precision():
    seen = []

    class Watched(SpeeLFC):
        def loss(self, features, batch):
            result = super().loss(features, batch)
            seen.append((features.dtype, self(features).dtype, result.dtype))
            return result

    data = SimulatedDataModule(num_items=100, num_annotators=10)
    model, lightning = classifier(data, Watched), trainer(1, precision="bf16-mixed")
    inner = []
    next(m for m in model.backbone.modules() if isinstance(m, nn.Linear)).register_forward_hook(
        lambda module, args, output: inner.append(output.dtype)
    )
    lightning.fit(model, datamodule=data)
    assert set(seen) == {(torch.float32,) * 3}
    assert torch.bfloat16 in inner  # the backbone did run in half precision
    assert torch.isfinite(lightning.callback_metrics["train/loss"])


def test_the_python_interface_with_lightnings_own_checkpoints(tmp_path):
    data = SimulatedDataModule(num_items=100, num_annotators=10)
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/acc", mode="max")
    lightning = trainer(3, callbacks=[checkpoint], enable_checkpointing=True)
    lightning.fit(classifier(data, SpeeLFC), datamodule=data)
    best = checkpoint.best_model_score
    scores = lightning.test(datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    assert 0 <= scores[0]["test/acc"] <= 1
    (scores,) = lightning.validate(datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    assert scores["val/acc"] == pytest.approx(best.item())
    saved = torch.load(checkpoint.best_model_path, weights_only=True)
    assert saved["lfc"]["classes"] == ["0", "1", "2"]
