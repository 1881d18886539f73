"""Run folders: nothing is lost, and nothing lands elsewhere."""

import csv
import os

import pytest

from lfc.cli import main
from lfc.runs import History, last_folder, new_folder, write_atomically, write_table
from tests.test_cli import QUICK, ROOT


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# files


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_crash_while_writing_leaves_the_old_file(broken, tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    write_atomically(path, "old")

    def crash(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, broken, crash)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]  # nothing beside it


def test_files_are_written_whole_with_their_folders(tmp_path):
    write_atomically(tmp_path / "a" / "b.bin", b"\0\1")
    assert (tmp_path / "a" / "b.bin").read_bytes() == b"\0\1"
    write_table(tmp_path / "t.csv", [["a", "b"], ["x, y", 'say "no"'], ["é\n", 1]])
    assert read(tmp_path / "t.csv") == [{"a": "x, y", "b": 'say "no"'}, {"a": "é\n", "b": "1"}]
    assert b"\r" not in (tmp_path / "t.csv").read_bytes()


# folders


def test_folders_are_numbered(tmp_path):
    names = [new_folder(tmp_path, "e", "SpeeLFC-seed0").name for _ in range(3)]
    assert names == ["SpeeLFC-seed0", "SpeeLFC-seed0-2", "SpeeLFC-seed0-3"]
    assert new_folder(tmp_path, "other", "SpeeLFC-seed0").name == "SpeeLFC-seed0"


def test_the_last_folder_is_the_highest_number_with_a_checkpoint(tmp_path):
    assert last_folder(tmp_path, "e", "run") is None
    folders = [new_folder(tmp_path, "e", "run") for _ in range(11)]
    new_folder(tmp_path, "e", "run-like")
    assert last_folder(tmp_path, "e", "run") is None  # none has a checkpoint
    for folder in (*folders[:10], tmp_path / "e" / "run-like"):
        write_atomically(folder / "checkpoints" / "last.ckpt", "")
    assert last_folder(tmp_path, "e", "run") == folders[9]  # run-10, not run-9; run-11 has none


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "/etc", "a b/c", "a\\b", "x\0y", "…", "naïve"])
def test_unsafe_names_stay_inside_the_root(name, tmp_path):
    root = tmp_path / "root"
    folder = new_folder(root, name, name)
    assert folder.is_dir() and folder.resolve().parent.parent == root.resolve()
    assert " " not in folder.name and "/" not in folder.name


def test_an_unsafe_experiment_of_the_command_line_stays_inside_the_root(tmp_path):
    root = tmp_path / "deep" / "root"
    main(["fit", f"--config={ROOT}/configs/quickstart.yaml", *QUICK, f"--run.root={root}", "--data.num_items=40",
          "--run.experiment=../my x", "--run.name=../../a b"])  # fmt: skip
    (metrics,) = tmp_path.rglob("metrics.json")
    assert metrics.parent.parent.parent == root
    assert {p.name for p in tmp_path.iterdir()} == {"deep"} and {p.name for p in root.parent.iterdir()} == {"root"}


# history


def test_the_lines_of_a_step_become_one(tmp_path):
    history = History(tmp_path)
    history.log_metrics({"val/acc": 0.5, "epoch": 0}, 3)
    history.log_metrics({"train/loss": 1.5, "epoch": 0}, 3)
    history.log_metrics({"test/acc": 0.9, "epoch": 0}, 3)  # final tests are not history
    history.log_metrics({"val/acc": 0.6, "epoch": 1}, 6)
    history.log_metrics({"train/loss": 1.2, "epoch": 1}, 6)
    expected = [
        {"epoch": "0", "step": "3", "val/acc": "0.5", "train/loss": "1.5"},
        {"epoch": "1", "step": "6", "val/acc": "0.6", "train/loss": "1.2"},
    ]
    assert read(tmp_path / "history.csv") == expected  # on disk at once
    history.finalize("success")
    assert read(tmp_path / "history.csv") == expected
    assert history.scores(1, "val/") == {"val/acc": 0.6}


def test_a_new_column_leaves_earlier_lines_empty_there(tmp_path):
    history = History(tmp_path)
    history.log_metrics({"train/loss": 2.0, "epoch": 0}, 1)
    history.log_metrics({"train/loss": 1.0, "lr-Adam": 0.1, "epoch": 1}, 2)
    history.log_metrics({"lr-Adam": 0.2, "epoch": 2}, 3)
    found = read(tmp_path / "history.csv")
    assert [row["lr-Adam"] for row in found] == ["", "0.1", "0.2"]
    assert [row["train/loss"] for row in found] == ["2.0", "1.0", ""]


def begun(folder, epochs=3):
    history = History(folder)
    for epoch in range(epochs):
        history.log_metrics({"train/loss": 3.0 - epoch, "val/acc": 0.25, "epoch": epoch}, 10 * (epoch + 1))
    history.finalize("")
    return folder / "history.csv"


def test_going_on_drops_what_is_made_again(tmp_path):
    path = begun(tmp_path)
    whole = path.read_text()
    history = History(tmp_path)
    history.resume(2)
    assert [row["epoch"] for row in read(path)] == ["0", "1"]
    history.log_metrics({"train/loss": 1.0, "val/acc": 0.25, "epoch": 2}, 30)
    assert path.read_text() == whole
    assert history.scores(0, "train/") == {"train/loss": 3.0}


def test_going_on_where_there_is_no_history(tmp_path):
    history = History(tmp_path)
    history.resume(1)
    history.log_metrics({"train/loss": 1.0, "epoch": 1}, 2)
    assert len(read(tmp_path / "history.csv")) == 1


def test_a_run_killed_in_the_middle_of_a_line_goes_on(tmp_path):
    whole = begun(tmp_path, epochs=13).read_text()
    *lines, last = whole.splitlines(keepends=True)  # of epoch 12, which cut short is epoch 1
    for end in range(len(last)):
        path = tmp_path / str(end) / "history.csv"
        write_atomically(path, "".join(lines) + last[:end])
        history = History(path.parent)
        history.resume(12)
        history.log_metrics({"train/loss": -9.0, "val/acc": 0.25, "epoch": 12}, 130)
        assert path.read_text() == whole, last[:end]


@pytest.mark.parametrize("text", ["", "epo", "epoch,step,train/loss\n"])
def test_a_run_killed_before_the_first_line_goes_on(text, tmp_path):
    write_atomically(tmp_path / "history.csv", text)
    history = History(tmp_path)
    history.resume(1)
    history.log_metrics({"train/loss": 1.0, "epoch": 1}, 2)
    assert [row["epoch"] for row in read(tmp_path / "history.csv")] == ["1"]
