"""The command line as a user types it, in process."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import lfc.heads
from lfc.cli import COMMANDS, main
from lfc.heads import Head
from tests.crowds import write_crowd
from tests.test_contracts import registered

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
QUICK = ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false", "--run.wandb=off"]
SMALL = ["--data.num_items=120", "--data.num_annotators=20"]
TIMES = {"seconds", "peak_memory_mb"}


def fit(folder, *args, config="quickstart"):
    main(["fit", f"--config={ROOT}/configs/{config}.yaml", *QUICK, f"--run.root={folder}", *args])


def metrics(run):
    return json.loads((run / "metrics.json").read_text())


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def without_times(run):
    return {key: value for key, value in metrics(run).items() if key not in TIMES}


def test_help_is_fast_and_names_every_command(capsys):
    code = "import sys; from lfc.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("config", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_says_what_it_is_for(config):
    assert config.read_text().startswith("# ")
    settings = yaml.safe_load(config.read_text())
    assert "class_path" in settings or "model" in settings


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_every_experiment_parses(config, capsys, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", f"--config={config}", *needs(config, tmp_path), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["head"]["class_path"].startswith("lfc.heads.")


def needs(config, folder):
    return [f"--data.path={folder}"] if "features.yaml" in config.read_text() else []


@pytest.mark.parametrize("head", [cls.__name__ for cls in registered(lfc.heads, Head)])
def test_every_head_fits(head, tmp_path, capsys):
    fit(tmp_path, f"--model.head={head}", *SMALL)
    run = tmp_path / "quickstart" / f"{head}-seed0"
    found = metrics(run)
    assert found["head"] == head and 0 <= found["test/acc"] <= 1 and np.isfinite(found["train/loss"])
    assert "test/acc" in capsys.readouterr().out
    for name in ("config.yaml", "history.csv", "labels.csv", "annotators.csv", "confusion.npz", "predictions.csv"):
        assert (run / name).stat().st_size > 0
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == ["best.ckpt", "last.ckpt"]


def test_run_folder_of_a_crowd_folder(tmp_path):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    labels = rows(run / "labels.csv")
    assert list(labels[0]) == ["item", "label", "confidence", "p_cat", "p_dog", "p_owl", "majority", "gold"]
    assert [row["item"] for row in labels] == [f"{i:03d}" for i in range(29)]  # annotated items, ids as written
    for row in labels:
        p = {name: float(row[f"p_{name}"]) for name in ("cat", "dog", "owl")}
        assert sum(p.values()) == pytest.approx(1, abs=1e-4)
        assert row["label"] == max(p, key=p.get) and float(row["confidence"]) == max(p.values())
    annotators = rows(run / "annotators.csv")
    assert list(annotators[0]) == ["annotator", "labels", "accuracy", "gold_accuracy"]
    assert [row["annotator"] for row in annotators] == ["ann", "bob", "cyd", "dan"]
    said = [line.split(",") for line in (crowd / "annotations.csv").read_text().split()[1:]]
    gold = {row["item"]: row["gold"] for row in labels}
    for row in annotators:
        theirs = [gold[item] == label for item, who, label in said if who == row["annotator"]]
        assert int(row["labels"]) == len(theirs)
        assert float(row["gold_accuracy"]) == pytest.approx(np.mean(theirs), abs=1e-5)
    assert [row["item"] for row in rows(run / "predictions.csv")] == [f"{i:03d}" for i in range(40, 50)]
    arrays = np.load(run / "confusion.npz", allow_pickle=False)
    assert arrays["confusion"].shape == (4, 3, 3) and np.allclose(arrays["confusion"].sum(-1), 1, atol=1e-5)
    history = rows(run / "history.csv")
    assert [row["epoch"] for row in history] == ["0", "1"] and all(row["val/acc"] for row in history)
    right = [row["label"] == row["gold"] for row in rows(run / "predictions.csv")]
    assert metrics(run)["test/acc"] == pytest.approx(np.mean(right), abs=1e-6)


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path):
    fit(tmp_path, *SMALL)
    fit(tmp_path, *SMALL)
    fit(tmp_path, *SMALL, "--seed_everything=1")
    first, second, third = (
        tmp_path / "quickstart" / name for name in ("SpeeLFC-seed0", "SpeeLFC-seed0-2", "SpeeLFC-seed1")
    )
    assert without_times(first) == without_times(second)
    assert (first / "labels.csv").read_text() == (second / "labels.csv").read_text()
    assert (first / "history.csv").read_text() == (second / "history.csv").read_text()
    assert metrics(first)["train/loss"] != metrics(third)["train/loss"]


def test_a_config_runs_again(tmp_path):
    fit(tmp_path, *SMALL)
    run = tmp_path / "quickstart" / "SpeeLFC-seed0"
    main(["fit", f"--config={run}/config.yaml"])
    assert without_times(run.with_name("SpeeLFC-seed0-2")) == without_times(run)


@pytest.mark.parametrize("update", ["dense", "rows"])
def test_a_killed_run_goes_on_to_the_same_end(tmp_path, update):
    args = [f"--config={ROOT}/configs/quickstart.yaml", *SMALL, "--trainer.max_epochs=40", "--run.wandb=off",
            "--trainer.enable_progress_bar=false", f"--model.annotator_update={update}",
            "--model.backbone.dropout=0.2", "--model.lr_scheduler=StepLR",
            "--model.lr_scheduler.step_size=9"]  # fmt: skip
    main(["fit", *args, f"--run.root={tmp_path}/whole"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lfc.cli", "fit", *args, f"--run.root={tmp_path}/killed"]
    history = tmp_path / "killed" / "quickstart" / "SpeeLFC-seed0" / "history.csv"
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not history.is_file() or len(history.read_text().splitlines()) < 8):
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    run = history.parent
    assert not (run / "metrics.json").exists(), "the run ended before it was killed"
    main(["fit", *args, f"--run.root={tmp_path}/killed", "--ckpt_path=last"])
    whole = tmp_path / "whole" / "quickstart" / "SpeeLFC-seed0"
    assert without_times(run) == without_times(whole)
    assert (run / "history.csv").read_text() == (whole / "history.csv").read_text()
    assert (run / "labels.csv").read_text() == (whole / "labels.csv").read_text()


def test_test_validate_and_predict_use_a_checkpoint(tmp_path, capsys):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    common = [f"--config={run}/config.yaml", f"--ckpt_path={run}/checkpoints/best.ckpt"]
    capsys.readouterr()
    main(["test", *common])
    assert f"{metrics(run)['test/acc']:.4f}" in capsys.readouterr().out
    main(["validate", *common])
    assert f"{metrics(run)['val/acc']:.4f}" in capsys.readouterr().out
    main(["predict", *common])
    predicted = tmp_path / "labelme" / "predict" / "predictions.csv"
    assert predicted.read_text() == (run / "predictions.csv").read_text()


def test_predict_needs_no_annotations(tmp_path):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    new = tmp_path / "new"
    new.mkdir()
    np.save(new / "features.npy", np.zeros((2, 3)))
    (new / "items.csv").write_text("item\nx\ny\n")
    main(["predict", f"--config={run}/config.yaml", f"--ckpt_path={run}/checkpoints/best.ckpt", f"--data.path={new}"])
    found = rows(tmp_path / "labelme" / "predict" / "predictions.csv")
    assert [row["item"] for row in found] == ["x", "y"] and {"p_cat", "p_dog", "p_owl"} < set(found[0])


def test_without_gold_the_best_epoch_is_chosen_by_held_out_annotations(tmp_path):
    crowd = write_crowd(tmp_path / "zoo", gold=False)
    fit(tmp_path, f"--data.path={crowd}", "--trainer.max_epochs=4", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    history = [float(row["val/annotation_nll"]) for row in rows(run / "history.csv")]
    assert metrics(run)["monitor"] == "val/annotation_nll"
    assert metrics(run)["best_epoch"] == int(np.argmin(history))
    assert "test/acc" not in metrics(run) and "labels/acc" not in metrics(run)


def test_early_stopping(tmp_path):
    fit(tmp_path, *SMALL, "--trainer.max_epochs=60", "--run.patience=2", "--run.monitor=val/acc")
    assert metrics(tmp_path / "quickstart" / "SpeeLFC-seed0")["epochs"] < 60


def test_rates_schedulers_and_optimisers_from_the_command_line(tmp_path):
    fit(tmp_path, *SMALL, "--model.optimizer=AdamW", "--model.optimizer.weight_decay=0.1", "--model.annotator_lr=0.05",
        "--model.backbone_lr=0.001", "--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1",
        "--model.lr_scheduler.gamma=0.1")  # fmt: skip
    saved = torch.load(tmp_path / "quickstart/SpeeLFC-seed0/checkpoints/last.ckpt", weights_only=True)
    groups = saved["optimizer_states"][0]["param_groups"]
    assert [group["initial_lr"] for group in groups] == [0.001, 0.01, 0.05]
    assert [group["lr"] for group in groups] == pytest.approx([1e-5, 1e-4, 5e-4])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_a_head_by_class_path(tmp_path):
    fit(tmp_path, *SMALL, "--model.head=tests.test_readme.OneCoin")
    assert metrics(tmp_path / "quickstart" / "OneCoin-seed0")["head"] == "OneCoin"


def test_fast_dev_run_leaves_nothing(tmp_path):
    fit(tmp_path, *SMALL, "--trainer.fast_dev_run=true")
    assert not list(tmp_path.iterdir())


BAD_OPTIONS = {
    "fti": (["fti"], "did you mean 'fit'"),
    "no config": (["fit", "--config=nowhere.yaml"], "no such file"),
    "head": (["fit", "--config=CONFIG", "--model.head=SpeLFC"], "did you mean 'SpeeLFC'"),
    "backbone": (["fit", "--config=CONFIG", "--model.backbone=MPL"], "did you mean 'MLP'"),
    "help": (["fit", "--model.head.help=SpeLFC"], "did you mean 'SpeeLFC'"),
    "nothing": (["fit"], "--config configs/quickstart.yaml"),
    "order": (["fit", "--data.path=x", "--config=CONFIG"], "put --config first"),
    "spawn": (["fit", "--config=CONFIG", "--trainer.strategy=ddp_spawn", "--run.root=ROOT"], "take ddp"),
    "option": (["fit", "--config=CONFIG", "--model.head.diagnal=3"], "did you mean 'diagonal'"),
    "value": (["fit", "--config=CONFIG", "--model.head.diagonal=abc"], "expected float"),
    "choice": (["fit", "--config=CONFIG", "--model.head=CrowdLayer", "--model.head.kind=XX"], "expected one of 'MW'"),
    "abbreviation": (["fit", "--config=CONFIG", "--trainer.max_epoch=3"], "no such option"),
    "unknown": (["fit", "--config=CONFIG", "--nonsense=1"], "no such option"),
    "no checkpoint": (["test", "--config=CONFIG"], "--ckpt_path"),
    "missing checkpoint": (["test", "--config=CONFIG", "--ckpt_path=nowhere.ckpt"], "no such file"),
    "nothing to resume": (["fit", "--config=CONFIG", "--ckpt_path=last", "--run.root=ROOT"], "no run to go on with"),
    "batch of none": (["fit", "--config=CONFIG", "--data.batch_size=0"], "at least one item"),
    "holdout": (["fit", "--config=CONFIG", "--data.holdout=1.5"], "from 0 to below 1"),
    "monitor": (
        ["fit", "--config=CONFIG", "--run.monitor=val/annotation_nll", "--run.root=ROOT"],
        "--data.holdout=0.1",
    ),
    "rows": (
        [
            "fit",
            "--config=CONFIG",
            "--model.optimizer=SGD",
            "--model.annotator_update=rows",
            "--run.root=ROOT",
            "--run.wandb=off",
        ],
        "annotator_update=dense",
    ),
    "no gold": (
        ["fit", "--config=ROOT/config.yaml", "--model.head=Gold", "--run.root=ROOT", "--run.wandb=off"],
        "another head",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_mistake_ends_in_one_line(name, tmp_path, capsys):
    args, expected = BAD_OPTIONS[name]
    crowd = write_crowd(tmp_path / "zoo", gold=False)
    (tmp_path / "config.yaml").write_text(
        f"data: {{class_path: lfc.datamodules.FeatureDataModule, init_args: {{path: {crowd}}}}}\n"
        "model: {backbone: {class_path: lfc.backbones.MLP}, head: {class_path: lfc.heads.SpeeLFC}}\n"
    )
    replaced = [a.replace("CONFIG", f"{ROOT}/configs/quickstart.yaml").replace("ROOT", str(tmp_path)) for a in args]
    with pytest.raises(SystemExit) as exit:
        main(replaced)
    error = capsys.readouterr().err.strip()
    assert exit.value.code == 2
    assert error.count("\n") == 0 and error.startswith("lfc: error: ") and expected in error


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("LFC_DEBUG", "1")
    with pytest.raises(ValueError, match="no command"):
        main(["fti"])


def test_of_equally_good_epochs_the_latest_is_kept(tmp_path):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", "--trainer.max_epochs=30", config="labelme")
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    history = [float(row["val/acc"]) for row in rows(run / "history.csv")]
    best = max(epoch for epoch, score in enumerate(history) if score == max(history))
    assert history.count(max(history)) > 1, "no tie to break"
    assert metrics(run)["best_epoch"] == best and metrics(run)["val/acc"] == pytest.approx(max(history))


def test_data_that_cannot_be_trained_on_leaves_no_folder(tmp_path):
    crowd = write_crowd(tmp_path / "zoo")
    features = np.load(crowd / "features.npy")
    features[7, 1] = np.nan
    np.save(crowd / "features.npy", features)
    with pytest.raises(SystemExit):
        fit(tmp_path, f"--data.path={crowd}", config="labelme")
    assert not list((tmp_path / "labelme").iterdir())


@pytest.mark.parametrize("options", [["--run.monitor=none"], ["--data.holdout=0"]], ids=str)
def test_with_nothing_to_choose_by_the_last_epoch_is_kept(tmp_path, options):
    crowd = write_crowd(tmp_path / "zoo", valid=False)
    fit(tmp_path, f"--data.path={crowd}", *options, "--trainer.max_epochs=3", config="labelme")
    found = metrics(tmp_path / "labelme" / "SpeeLFC-seed0")
    assert found["monitor"] is None and found["best_epoch"] == 2


def test_a_checkpoint_is_not_scored_on_other_annotators(tmp_path, capsys):
    crowd = write_crowd(tmp_path / "zoo")
    fit(tmp_path, f"--data.path={crowd}", config="labelme")
    other = write_crowd(tmp_path / "other")
    table = other / "annotations.csv"
    table.write_text(table.read_text().replace(",ann,", ",zoe,"))
    run = tmp_path / "labelme" / "SpeeLFC-seed0"
    with pytest.raises(SystemExit, match="2"):
        main(
            ["test", f"--config={run}/config.yaml", f"--ckpt_path={run}/checkpoints/best.ckpt", f"--data.path={other}"]
        )
    assert "annotators are not those of the data" in capsys.readouterr().err
