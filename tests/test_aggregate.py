"""``lfc aggregate``: labels from annotations alone, from a folder or a bare table."""

import csv
import json

import numpy as np
import pytest

from lfc.cli import main
from tests.crowds import shared, write_crowd

TABLE = """task,worker,label
q1,ann,yes
q1,bob,yes
q1,eve,no
q2,ann,no
q2,bob,no
q3,ann,yes
q3,eve,no
q3,bob,yes
"""


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", ["mv", "ds", "glad", "mmce"])
def test_a_bare_table_becomes_labels_and_annotators(tmp_path, method, capsys):
    table = tmp_path / "answers.csv"
    table.write_text(TABLE)
    extra = ["--gamma=1"] if method == "mmce" else []
    main(["aggregate", "--method", method, str(table), "--out", str(tmp_path / "out"), *extra])
    labels = rows(tmp_path / "out" / "labels.csv")
    assert [(row["item"], row["label"], row["majority"]) for row in labels] == [
        ("q1", "yes", "yes"),
        ("q2", "no", "no"),
        ("q3", "yes", "yes"),
    ]
    for row in labels:
        assert float(row["p_yes"]) + float(row["p_no"]) == pytest.approx(1, abs=1e-5)
    annotators = {row["annotator"]: row for row in rows(tmp_path / "out" / "annotators.csv")}
    assert {name: row["labels"] for name, row in annotators.items()} == {"ann": "3", "bob": "3", "eve": "2"}
    assert float(annotators["ann"]["accuracy"]) > float(annotators["eve"]["accuracy"])
    with np.load(tmp_path / "out" / "confusion.npz") as arrays:
        assert arrays["overall"].shape == (2, 2)
    assert "8 labels of 3 items by 3 annotators" in capsys.readouterr().out


def test_a_crowd_folder_is_scored_against_gold(tmp_path, monkeypatch, capsys):
    crowd = write_crowd(tmp_path / "zoo")
    monkeypatch.chdir(tmp_path)
    main(["aggregate", str(crowd)])
    main(["aggregate", str(crowd), "--pseudo_count=1"])
    found = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs" / "aggregate").glob("*/metrics.json"))]
    assert len(found) == 2 and all(0 <= scores["labels/acc"] <= 1 for scores in found)
    assert found[0]["history"] != found[1]["history"]  # the option reached the method
    assert "labels/acc" in capsys.readouterr().out


def test_the_published_figures_come_out(tmp_path):
    for name, method, accuracy in (("bluebirds", "ds", 0.898148), ("rte", "ds", 0.9275), ("bluebirds", "mv", 0.759259)):
        out = tmp_path / f"{name}-{method}"
        main(["aggregate", "--method", method, str(shared(name)), "--out", str(out)])
        assert json.loads((out / "metrics.json").read_text())["labels/acc"] == pytest.approx(accuracy, abs=1e-5)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--method=dss", "x"], "--method=dss: no such method; did you mean 'ds'?"),
        ([], "nothing to aggregate; give a crowd folder or a table: lfc aggregate --method ds PATH"),
        (["nowhere"], "nowhere: no such folder; give the path of a crowd folder"),
        (["x", "--pseudo_cont=1"], "--pseudo_cont: no such option; did you mean 'pseudo_count'?"),
        (["x", "--pseudo_count=a"], "--pseudo_count=a: expected float"),
        (["x", "--max_iter=0"], "max_iter: 0 where a whole number from 1 up was wanted; change it"),
    ],
    ids=str,
)
def test_a_mistake_ends_in_one_line(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["aggregate", *args])
    assert capsys.readouterr().err.strip() == f"lfc: error: {message}"


def test_a_table_of_another_kind_is_refused(tmp_path, capsys):
    (tmp_path / "answers.xlsx").write_text("no table")
    with pytest.raises(SystemExit, match="2"):
        main(["aggregate", str(tmp_path / "answers.xlsx")])
    assert "neither .csv nor .parquet" in capsys.readouterr().err


def test_help_lists_the_options_of_the_method(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["aggregate", "--method", "mmce", "--help"])
    assert "--gamma" in capsys.readouterr().out
