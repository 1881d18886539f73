"""EM with a network: DL-EM, two stages, and the engine's rounds, stops, starts and fine-tuning."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback, seed_everything

from lfc.aggregation import DawidSkene, MajorityVote, Votes
from lfc.backbones import MLP
from lfc.cli import main
from lfc.datamodules import SimulatedDataModule
from lfc.functional import confusion_counts, normalize_rows
from lfc.heads import DLEM, Head, TwoStage
from lfc.module import CrowdClassifier
from tests.test_training import ROOT, Given, check_same_run, fit, fit_in_two_processes, train, trainer


def small(**options):
    return SimulatedDataModule(
        **{"num_items": 60, "num_annotators": 8, "labels_per_item": 4, "batch_size": 30} | options
    )


def tabular(head, log_t):
    """A head whose network is a table: features are one-hot items."""
    head.classifier.weight.data = log_t.T.clone()
    torch.nn.init.zeros_(head.classifier.bias)


# DL-EM


def test_an_exact_round_of_dl_em_never_lowers_the_objective():
    generator = torch.Generator().manual_seed(0)
    for trial in range(20):
        data = small(num_items=25, labels_per_item=3, seed=trial)
        data.setup("fit")
        crowd, items = data.crowd(), torch.eye(25, dtype=torch.float64)
        pseudo_count = (0.0, 0.1, 1.0)[trial % 3]
        sizes = {"num_classes": 3, "num_annotators": data.num_annotators, "num_items": 25, "in_features": 25}
        head = DLEM(pseudo_count=pseudo_count, **sizes).double()
        head.prepare(crowd)
        tabular(head, torch.rand(25, 3, generator=generator).double().log_softmax(-1))
        objectives = []
        for _ in range(15):
            with torch.no_grad():
                rows = head.e_step(items, crowd)
                objectives.append(float(head.log_likelihood(items, crowd).sum() + head.log_prior()))
                head.m_step(rows, crowd)
                tabular(head, rows.clamp_min(1e-300).log())  # the exact M-step of a table
        assert (np.diff(objectives) >= -1e-7 * abs(objectives[0])).all(), (trial, objectives)
        assert objectives[-1] > objectives[0] + 1


def test_with_one_prior_for_all_items_dl_em_is_dawid_and_skene():
    data = small(num_items=200, labels_per_item=5)
    data.setup("fit")
    crowd = data.crowd()
    sizes = {"num_classes": 3, "num_annotators": data.num_annotators, "num_items": 200, "in_features": 1}
    head, ones = DLEM(pseudo_count=1.0, **sizes).double(), torch.ones(200, 1, dtype=torch.float64)
    head.prepare(crowd)
    prior = normalize_rows(crowd.votes(3)).double().mean(0)
    with torch.no_grad():
        for _ in range(10):
            tabular(head, prior.log()[None])
            rows = head.e_step(ones, crowd)
            objective = float(head.log_likelihood(ones, crowd).sum() + head.log_prior())
            prior = rows.mean(0)
            head.m_step(rows, crowd)
    peer = DawidSkene(pseudo_count=1.0, max_iter=10, tol=0).fit(Votes.from_batch(crowd, 3, data.num_annotators))
    assert objective == pytest.approx(peer.history[-1], rel=1e-6)
    assert torch.allclose(rows, peer.posterior, atol=1e-5)


def test_dl_em_maximises_the_joint_likelihood():
    """At the E-step the gradient of its loss is that of the likelihood itself."""
    data = small()
    data.setup("fit")
    crowd = data.crowd()
    sizes = {"num_classes": 3, "num_annotators": data.num_annotators, "num_items": 60, "in_features": 4}
    head = DLEM(**sizes).double()
    head.prepare(crowd)
    features = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head.targets.copy_(head.e_step(features, crowd).detach())
    (of_loss,) = torch.autograd.grad(head.loss(features, crowd) * 60, features)
    (of_likelihood,) = torch.autograd.grad(-head.log_likelihood(features, crowd).sum(), features)
    assert torch.allclose(of_loss, of_likelihood, atol=1e-6)


def test_dl_ems_matrices_are_smoothed_expected_counts():
    data = small()
    data.setup("fit")
    crowd = data.crowd()
    head = DLEM(pseudo_count=2.0, in_features=1, num_classes=3, num_annotators=data.num_annotators, num_items=60)
    rows = torch.rand(60, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
    before = head.annotators()["confusion"].double()
    change = head.m_step(rows, crowd)
    counts = confusion_counts(rows.double(), crowd, data.num_annotators) + 2
    expected = counts / counts.sum(-1, keepdim=True)
    assert torch.allclose(head.annotators()["confusion"].double(), expected, atol=1e-6)
    assert float(change) == pytest.approx(float(((expected - before).abs() / before).mean()), rel=1e-4)


def test_dl_em_without_pseudo_counts_survives_what_was_never_said():
    data = small(num_items=30, labels_per_item=2)
    model, scores = train(data, partial(DLEM, pseudo_count=0.0), epochs=4)
    assert np.isfinite(scores["train/loss"]) and np.isfinite(scores["labels/acc"])
    assert model.head.annotators()["confusion"].isfinite().all()


def test_dl_em_recovers_the_annotators():
    data = SimulatedDataModule(crowd="uniform", accuracy=0.8, num_items=2000, labels_per_item=5, num_annotators=10)
    _, scores = train(data, DLEM, epochs=10)
    assert scores["annotators/i_js"] < 0.02
    assert scores["labels/acc"] > scores["labels/majority_acc"]


def test_dl_em_beats_the_majority_where_annotators_mislead():
    _, scores = train(SimulatedDataModule(), DLEM, epochs=12)
    assert scores["test/acc"] > 0.9 and scores["labels/acc"] > scores["labels/majority_acc"] + 0.2


def test_dl_em_in_two_processes_ends_as_in_one(tmp_path):
    args = ["--data.num_items=120", "--model.head=DLEM"]
    two = fit_in_two_processes(tmp_path / "two", *args, "--data.batch_size=10")
    fit(tmp_path / "one", *args, "--data.num_annotators=20", "--data.batch_size=20")
    check_same_run(two, tmp_path / "one" / "quickstart" / "DLEM-seed0")
    objective = [
        (run / "history.csv").read_text().splitlines()[-1].split(",")[3]
        for run in (two, tmp_path / "one" / "quickstart" / "DLEM-seed0")
    ]
    assert float(objective[0]) == pytest.approx(float(objective[1]), rel=1e-5)


# two stages


def test_two_stages_train_on_what_the_aggregator_inferred():
    data = small(num_items=200)
    data.setup("fit")
    crowd = data.crowd()
    sizes = {"num_classes": 3, "num_annotators": data.num_annotators, "num_items": 200, "in_features": 2}
    result = DawidSkene().fit(Votes.from_batch(crowd, 3, data.num_annotators))
    soft, hard = TwoStage(**sizes), TwoStage(kind="hard", **sizes)
    for head in (soft, hard):
        head.prepare(crowd)
    assert torch.allclose(soft.targets.double(), result.posterior, atol=1e-6)
    assert torch.equal(hard.targets.argmax(-1), result.label) and torch.equal(hard.targets.sum(-1), torch.ones(200))
    assert torch.allclose(soft.annotators()["confusion"].double(), result.annotators["confusion"], atol=1e-6)
    features = torch.randn(200, 2)
    expected = -(result.posterior.float() * soft(features)).sum() / 200
    assert torch.allclose(soft.loss(features, crowd), expected, atol=1e-5)
    assert not torch.allclose(soft.loss(features, crowd), hard.loss(features, crowd))


def test_two_stages_report_the_aggregators_labels_of_training_items_alone():
    said = [(0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 0)]
    data = Given(said, split=[0, 0, 2, 0], gold=[1, 0, 1, 0], num_classes=2, num_annotators=2, holdout=0.0)
    model, scores = train(data, partial(TwoStage, MajorityVote()), epochs=1)
    inferred = model.report.posterior
    assert inferred[[0, 1, 3]].tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    assert 0 < inferred[2].min() < 1  # a test item: only the network has an opinion
    assert scores["labels/acc"] >= 0.75


def test_every_aggregator_is_an_option_of_two_stages(tmp_path):
    for aggregator in ("MajorityVote", "DawidSkene", "GLAD", "MMCE"):
        extra = ["--model.head.aggregator.gamma=1"] if aggregator == "MMCE" else []
        main(["fit", f"--config={ROOT}/configs/quickstart.yaml", "--model.head=TwoStage", "--trainer.max_epochs=1",
              f"--model.head.aggregator={aggregator}", *extra, "--data.num_items=60", f"--run.root={tmp_path}",
              f"--run.name={aggregator}", "--run.wandb=off", "--trainer.enable_progress_bar=false"])  # fmt: skip
        assert json.loads((tmp_path / "quickstart" / aggregator / "metrics.json").read_text())["labels/acc"] > 0.4


# the engine


class Rounds(DLEM):
    """Counts what the engine asks of it."""

    def __init__(self, log=None, **options):
        super().__init__(**options)
        self.log = [] if log is None else log

    def m_step(self, rows, crowd):
        self.log.append("m")
        return super().m_step(rows, crowd)

    def loss(self, features, batch):
        self.log.append("tune" if self.finetuning else "step")
        return super().loss(features, batch)

    def restart(self, crowd):
        self.log.append("restart")
        super().restart(crowd)


class Halt(Callback):
    """Stops training after so many epochs, as a killed run is stopped."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.should_stop or trainer.current_epoch + 1 == self.epochs


def engine(data, epochs, *, model_options=None, halt=None, ckpt_path=None, **options):
    seed_everything(0, verbose=False)
    backbone, log = MLP(data.in_features, hidden=[4], standardize=True), []
    sizes = {"num_classes": data.num_classes, "num_annotators": data.num_annotators, "num_items": data.num_items}
    steps = {name: options.pop(name, 0) for name in ("em_steps", "finetune_steps")}
    head = Rounds(log, in_features=4, **sizes, **options)
    head.em_steps, head.finetune_steps = steps["em_steps"], steps["finetune_steps"]
    model = CrowdClassifier(backbone, head, partial(torch.optim.Adam, lr=0.01), **(model_options or {}))
    lightning = trainer(epochs, callbacks=[Halt(halt)])
    lightning.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model, lightning, log


def test_a_round_is_epochs_then_an_e_step_then_an_m_step():
    _, _, log = engine(small(), 4, em_every=2, em_tol=0.0)
    assert log == ["m", *["step"] * 4, "m", *["step"] * 4, "m"]  # prepared first; two batches an epoch


def test_em_ends_after_its_rounds():
    model, lightning, log = engine(small(), 50, em_rounds=3, em_tol=0.0)
    assert lightning.current_epoch == 3 and log.count("m") == 4 and model.em.done


def test_em_ends_when_a_round_changes_little():
    model, lightning, _ = engine(small(), 200, em_tol=0.05)
    assert model.em.done and 2 <= lightning.current_epoch < 200
    never, lightning, _ = engine(small(), 12, em_tol=0.0)
    assert not never.em.done and lightning.current_epoch == 12


def test_both_likelihood_and_matrices_must_settle(monkeypatch):
    monkeypatch.setattr(DLEM, "m_step", lambda self, rows, crowd: torch.tensor(1.0))
    model, lightning, _ = engine(small(), 6, em_tol=0.5)
    assert not model.em.done and lightning.current_epoch == 6


def test_rounds_of_steps_are_made_up_to_epochs_and_followed_by_fine_tuning():
    _, lightning, log = engine(small(), 50, em_every=0, em_steps=3, em_rounds=2, finetune_steps=5, em_tol=0.0)
    assert lightning.current_epoch == 2 * 2 + 3  # two batches an epoch
    assert log == ["m", *["step"] * 4, "m", *["step"] * 4, "m", *["tune"] * 6]


def test_a_long_schedule_is_shortened_to_the_epochs_there_are():
    model, lightning, log = engine(small(), 12, em_every=0, em_steps=100, em_rounds=4, finetune_steps=100, em_tol=0.0)
    assert log.count("m") == 5 and log.count("tune") > 0 and lightning.current_epoch <= 12 and model.em.done


def test_the_best_start_is_kept():
    data = small()
    model, _, log = engine(data, 100, em_rounds=3, em_tol=0.0, model_options={"restarts": 4})
    assert log.count("restart") == 3 and model.em.done and model.em.weights is None
    assert model.e_step()[1] == pytest.approx(model.em.best, rel=1e-6)  # the best start's weights are those in place
    best = [
        engine(data, 3 * n, em_rounds=3, em_tol=0.0, model_options={"restarts": 9})[0].em.best for n in (1, 2, 3, 4)
    ]
    assert best == sorted(best) and best[0] < best[-1] == model.em.best


def test_starts_are_the_same_twice():
    first, again = (engine(small(), 6, em_rounds=3, em_tol=0.0, model_options={"restarts": 2})[0] for _ in range(2))
    assert first.em.start == 1
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values()))


def test_starts_can_be_compared_by_their_agreement_with_the_majority():
    options = {"restarts": 2, "restart_criterion": "majority"}
    model, _, _ = engine(small(), 10, em_rounds=2, em_tol=0.0, model_options=options)
    assert 0.3 < model.em.best <= 1


def test_a_head_without_em_has_nothing_to_restart(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", f"--config={ROOT}/configs/quickstart.yaml", "--model.restarts=3", f"--run.root={tmp_path}"])
    assert "SpeeLFC has no EM to restart" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_em_goes_on_from_a_checkpoint_to_the_same_end(tmp_path, stop):
    """Stopped within a start, at its end, and in the next one."""
    options = {"em_rounds": 3, "em_tol": 0.0, "model_options": {"restarts": 3}}
    whole, _, _ = engine(small(), 9, **options)
    _, lightning, _ = engine(small(), 9, halt=stop, **options)
    lightning.save_checkpoint(tmp_path / "some.ckpt")
    resumed, _, _ = engine(small(), 9, ckpt_path=tmp_path / "some.ckpt", **options)
    assert resumed.em.start == whole.em.start == 2 and resumed.em.best == whole.em.best
    assert all(torch.equal(a, b) for a, b in zip(resumed.state_dict().values(), whole.state_dict().values()))


def test_the_objective_is_in_the_history(tmp_path):
    main(["fit", f"--config={ROOT}/configs/quickstart.yaml", "--model.head=DLEM", "--trainer.max_epochs=3",
          "--data.num_items=60", f"--run.root={tmp_path}", "--run.wandb=off", "--model.head.em_tol=0",
          "--trainer.enable_progress_bar=false"])  # fmt: skip
    header, *lines = (tmp_path / "quickstart" / "DLEM-seed0" / "history.csv").read_text().splitlines()
    columns = header.split(",")
    found = [dict(zip(columns, line.split(","))) for line in lines]
    assert [row["train/em_round"] for row in found] == ["1.0", "2.0", "3.0"]
    assert all(float(row["train/em_objective"]) < 0 for row in found)


def test_a_third_partys_em_head_needs_no_more_than_two_methods():
    class Least(Head):
        em_every = 1

        def __init__(self, **sizes):
            super().__init__(**sizes)
            self.register_buffer("targets", torch.zeros(self.num_items, self.num_classes))

        def m_step(self, rows, crowd):
            self.targets.copy_(rows)

        def loss(self, features, batch):
            return -(self.targets[batch.items] * self(features)).sum() / len(batch)

    model, _ = train(small(), Least, epochs=2)
    assert torch.allclose(model.head.targets.sum(-1), torch.ones(60), atol=1e-5)
