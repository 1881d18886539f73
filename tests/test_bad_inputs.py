"""Crowd folders as people make them: each trains, or ends in one line that says what to mend."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from lfc.cli import main
from tests.crowds import write_crowd
from tests.test_cli import QUICK, ROOT

WORKS = None


def edit(name, change):
    """Spoil a text file."""

    def spoil(crowd):
        path = crowd / name
        path.write_text(change(path.read_text()))

    return spoil


def encode(name, encoding):
    return lambda crowd: (crowd / name).write_bytes((crowd / name).read_text().encode(encoding))


def line_ends(name, end):
    return lambda crowd: (crowd / name).write_bytes((crowd / name).read_bytes().replace(b"\n", end))


def cut_short(crowd):
    (crowd / "features.npy").write_bytes((crowd / "features.npy").read_bytes()[:300])


def content(name, data):
    return lambda crowd: (crowd / name).write_bytes(data)


def features(change):
    """Spoil the features."""

    def spoil(crowd):
        array = np.load(crowd / "features.npy")
        np.save(crowd / "features.npy", change(array))

    return spoil


def put(value):
    def change(array):
        array[7, 1] = value
        return array

    return features(change)


def after(name, *lines):
    return edit(name, lambda text: text + "".join(f"{line}\n" for line in lines))


def split(old, new):
    return edit("items.csv", lambda text: text.replace(f",{old},", f",{new},"))


def one_class(crowd):
    (crowd / "meta.json").unlink()
    for name in ("items.csv", "annotations.csv"):
        edit(name, lambda text: text.replace("dog", "cat").replace("owl", "cat"))(crowd)


def only_on_test_items(crowd):
    edit("annotations.csv", lambda text: "item,annotator,label\n040,ann,cat\n041,bob,dog\n")(crowd)


def a_hundred_classes(crowd):
    names = ["cat", "dog", "owl", *(f"c{k}" for k in range(97))]
    (crowd / "meta.json").write_text(json.dumps({"classes": names}))


def two_classes(crowd):
    (crowd / "meta.json").write_text('{"classes": ["cat", "dog"]}')
    for name in ("items.csv", "annotations.csv"):
        edit(name, lambda text: text.replace("owl", "dog"))(crowd)


def both_kinds(crowd):
    table = pa.table({"item": ["000"], "annotator": ["ann"], "label": ["cat"]})
    pyarrow.parquet.write_table(table, crowd / "annotations.parquet")


def without_gold(crowd):
    write_crowd(crowd, gold=False)


def without_gold_and_validation(crowd):
    write_crowd(crowd, gold=False, valid=False)


def pickled(crowd):
    np.save(crowd / "features.npy", np.array([{}] * 50, dtype=object), allow_pickle=True)


def archive(crowd):
    with open(crowd / "features.npy", "wb") as file:
        np.savez(file, features=np.zeros((50, 3)))


def a_file(crowd):
    shutil.rmtree(crowd)
    crowd.write_text("")


CROWDS = {
    "missing folder": (shutil.rmtree, "zoo: no such folder"),
    "a file for a folder": (a_file, "a file, not a folder"),
    "empty folder": (lambda c: [p.unlink() for p in c.iterdir()], "neither annotations nor items"),
    "missing annotations.csv": (lambda c: (c / "annotations.csv").unlink(), "no annotations; add annotations.csv"),
    "missing items.csv": (lambda c: (c / "items.csv").unlink(), "50 rows for 29 items"),
    "missing features.npy": (lambda c: (c / "features.npy").unlink(), "features.npy: no such file"),
    "missing column": (edit("annotations.csv", lambda t: t.replace("annotator", "who", 1)), "no column 'annotator'"),
    "semicolons": (edit("annotations.csv", lambda t: t.replace(",", ";")), "separate columns by commas"),
    "column twice": (edit("items.csv", lambda t: t.replace("split", "gold", 1)), "column 'gold' stands twice"),
    "duplicate item": (after("items.csv", "000,train,cat"), "row 52: item '000' stands twice"),
    "unknown item": (after("annotations.csv", "999,ann,cat"), "row 89: item '999' is not in the items table"),
    "empty item id": (after("annotations.csv", ",ann,cat"), "row 89: the item id is empty"),
    "empty annotator id": (after("annotations.csv", "001,,cat"), "row 89: the annotator id is empty"),
    "label outside the classes": (after("annotations.csv", "001,ann,cow"), "label 'cow' is no class"),
    "gold outside the classes": (edit("items.csv", lambda t: t + "050,test,cow\n"), "gold 'cow' is no class"),
    "unknown split": (split("valid", "holdout"), "split 'holdout' is none of train, valid"),
    "ragged row": (after("annotations.csv", "001,ann,cat,sure"), "row 89: 4 fields where the header has 3"),
    "open quotation mark": (after("annotations.csv", '001,ann,"cat'), "never closed"),
    "no train split": (split("train", "test"), "no item is in the train split"),
    "annotations only on test items": (only_on_test_items, "no item of the train split has an annotation"),
    "every label empty": (edit("annotations.csv", lambda t: "item,annotator,label\n001,ann,\n"), "none is left"),
    "one class only": (one_class, "'cat' is the only class found"),
    "one class in meta.json": (content("meta.json", b'{"classes": ["cat"]}'), "at least two are needed"),
    "broken meta.json": (content("meta.json", b'{"classes": ['), "meta.json, row 1: not JSON"),
    "meta.json of a list": (content("meta.json", b"[1]"), "write an object"),
    "empty file": (content("annotations.csv", b""), "the file is empty"),
    "header only": (content("annotations.csv", b"item,annotator,label\n"), "no rows below the header"),
    "binary file": (content("annotations.csv", bytes(range(256)) * 4), "NUL bytes"),
    "not UTF-8": (encode("annotations.csv", "cp037"), "is not UTF-8"),
    "one byte not UTF-8": (content("meta.json", b'{"name": "caf\xe9"}'), "byte 0xe9 is not UTF-8"),
    "csv and parquet": (both_kinds, "both annotations.csv and annotations.parquet"),
    "NaN in the features": (put(np.nan), "row 8 of 50 (item '007'): nan in column 2"),
    "infinite feature": (put(np.inf), "row 8 of 50 (item '007'): inf in column 2"),
    "too few rows of features": (features(lambda a: a[:49]), "49 rows for 50 items"),
    "features of one axis": (features(lambda a: a[:, 0]), "save a two-dimensional array"),
    "features of three axes": (features(lambda a: a[:, :, None]), "save a two-dimensional array"),
    "features of text": (features(lambda a: a.astype(str)), "save a two-dimensional array"),
    "features of no column": (features(lambda a: a[:, :0]), "two-dimensional array"),
    "complex features": (features(lambda a: a.astype(complex)), "save a two-dimensional array"),
    "pickled features": (pickled, "not a readable array"),
    "features.npy cut short": (cut_short, "not a readable array"),
    "features.npy empty": (content("features.npy", b""), "not a readable array"),
    "features.npy an archive": (archive, "an archive of arrays"),
    "features beyond float32": (features(lambda a: a.astype(float) * 1e300), "row 1 of 50 (item '000')"),
    "no annotators beside another column": (
        edit("annotations.csv", lambda t: t.replace("annotator", "seconds", 1)),
        "no column 'annotator'",
    ),
    # these train
    "no annotators": (edit("annotations.csv", lambda t: re.sub(r",\w+,", ",", t)), WORKS),
    "as it should be": (lambda c: None, WORKS),
    "CR line ends": (line_ends("annotations.csv", b"\r"), WORKS),
    "CRLF line ends": (line_ends("items.csv", b"\r\n"), WORKS),
    "UTF-16": (encode("annotations.csv", "utf-16"), WORKS),
    "UTF-8 with a mark": (encode("items.csv", "utf-8-sig"), WORKS),
    "an annotator without labels": (
        content("annotators.csv", b"annotator,age\nann,3\nbob,4\ncyd,5\ndan,6\neve,7\n"),
        WORKS,
    ),
    "no validation split": (split("valid", "test"), WORKS),
    "no gold": (without_gold, WORKS),
    "no gold and no validation split": (without_gold_and_validation, WORKS),
    "no test split": (split("test", "valid"), WORKS),
    "train split alone": (lambda c: [split("test", "train")(c), split("valid", "train")(c)], WORKS),
    "an empty label": (after("annotations.csv", "001,ann,"), WORKS),
    "a repeated pair": (after("annotations.csv", "001,ann,cat", "001,ann,cat"), WORKS),
    "blank lines": (edit("annotations.csv", lambda t: t.replace("\n", "\n\n")), WORKS),
    "no meta.json": (lambda c: (c / "meta.json").unlink(), WORKS),
    "two classes": (two_classes, WORKS),
    "a hundred classes": (a_hundred_classes, WORKS),
    "features of whole numbers": (features(lambda a: a.astype(np.int16)), WORKS),
    "features in Fortran order": (features(np.asfortranarray), WORKS),
    "a constant feature": (features(lambda a: a * [1, 1, 0]), WORKS),
}


def run(tmp_path, crowd, *args):
    return fit(tmp_path, f"--data.path={crowd}", *args)


def fit(tmp_path, *args, config="labelme"):
    options = ["--trainer.max_epochs=1", f"--run.root={tmp_path}/runs", *args]
    main(["fit", f"--config={ROOT}/configs/{config}.yaml", *QUICK, *options])
    (metrics,) = (tmp_path / "runs").rglob("metrics.json")
    return json.loads(metrics.read_text())


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_trains_or_says_what_to_mend(name, tmp_path, capsys):
    spoil, expected = CROWDS[name]
    crowd = write_crowd(tmp_path / "zoo")
    spoil(crowd)
    if expected is WORKS:
        found = run(tmp_path, crowd)
        assert np.isfinite(found["train/loss"])
        return
    with pytest.raises(SystemExit) as exit:
        run(tmp_path, crowd)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.count("\n") == 1 and error.startswith("lfc: error: ") and expected in error, error


def test_a_batch_of_one(tmp_path):
    assert np.isfinite(run(tmp_path, write_crowd(tmp_path / "zoo"), "--data.batch_size=1")["train/loss"])


def test_a_path_with_spaces_and_more(tmp_path):
    folder = write_crowd(tmp_path / "der große Zoo, № 7 (neu)")
    assert np.isfinite(run(tmp_path, folder)["train/loss"])


MONITORS = {
    "val/annotation_nll": [split("valid", "test"), without_gold, without_gold_and_validation],
    "val/acc": [split("test", "valid")],
}


@pytest.mark.parametrize(("spoil", "monitor"), [(spoil, name) for name in MONITORS for spoil in MONITORS[name]])
def test_what_the_best_epoch_is_chosen_by(spoil, monitor, tmp_path):
    crowd = write_crowd(tmp_path / "zoo")
    spoil(crowd)
    assert run(tmp_path, crowd)["monitor"] == monitor


def test_what_was_dropped_is_told(tmp_path, caplog):
    crowd = write_crowd(tmp_path / "zoo")
    after("annotations.csv", "001,ann,", "002,bob,cat", "002,bob,cat")(crowd)
    with caplog.at_level("INFO"):
        run(tmp_path, crowd)
    assert "note: annotations.csv: dropped 1 of 90 annotations with an empty label" in caplog.text
    assert "repeated (item, annotator) pairs" in caplog.text


# Options of the data, and what goes with what

OPTIONS = {
    "no label an item": (["--data.path=ZOO", "--data.redundancy=0"], "--data.redundancy=0: at least one annotation"),
    "no features of annotators": (["--data.path=ZOO", "--data.annotator_features=true"], "zoo has no annotators.csv"),
    "no tasks": (["--data=MultiTaskDataModule", "--data.paths=[]"], "--data.paths=[]: two crowd folders or more"),
    "one task": (["--data=MultiTaskDataModule", "--data.paths=[ZOO]"], "two crowd folders or more"),
    "tasks without paths": (["--data=MultiTaskDataModule"], "MultiTaskDataModule needs paths; add --data.paths="),
    "a task that is not there": (["--data=MultiTaskDataModule", "--data.paths=[ZOO,ZOO/x]"], "zoo/x: no such folder"),
    "tasks of two widths": (["--data=MultiTaskDataModule", "--data.paths=[ZOO,WIDE]"], "4 columns where"),
    "vectors for an embedding": (
        ["--data.path=ZOO", "--model.backbone=ItemEmbedding"],
        "ItemEmbedding reads ItemDataModule's item numbers; these inputs are torch.float32",
    ),
    "items for a network": (["--data=ItemDataModule", "--data.path=ZOO"], "MLP reads feature vectors"),
    # these train
    "one label an item": (["--data.path=ZOO", "--data.redundancy=1"], WORKS),
    "one label an item, some held out": (["--data.path=ZOO", "--data.redundancy=1", "--data.holdout=0.2"], WORKS),
    "two tasks": (["--data=MultiTaskDataModule", "--data.paths=[ZOO,TOO]"], WORKS),
    "two tasks after one": (["--data.path=ZOO", "--data=MultiTaskDataModule", "--data.paths=[ZOO,TOO]"], WORKS),
    "one task twice": (["--data=MultiTaskDataModule", "--data.paths=[ZOO,ZOO]"], WORKS),
    "two tasks, standardised": (
        ["--data=MultiTaskDataModule", "--data.paths=[ZOO,TOO]", "--model.backbone.standardize=true"],
        WORKS,
    ),
    "items": (["--data=ItemDataModule", "--data.path=ZOO", "--model.backbone=ItemEmbedding"], WORKS),
    "items from files": (
        ["--data=CONFIGS/data/items.yaml", "--data.path=ZOO", "--model.backbone=CONFIGS/backbone/item_embedding.yaml"],
        WORKS,
    ),
    "features of annotators": (["--data.path=TOO", "--data.annotator_features=true"], WORKS),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_data(name, tmp_path, capsys):
    given, expected = OPTIONS[name]
    zoo, too, wide = (write_crowd(tmp_path / name, seed=seed) for seed, name in enumerate(("zoo", "too", "wide")))
    content("annotators.csv", b"annotator,age\nann,3\nbob,4\ncyd,\n")(too)
    features(lambda array: np.pad(array, ((0, 0), (0, 1))))(wide)
    places = {"ZOO": zoo, "TOO": too, "WIDE": wide, "CONFIGS": ROOT / "configs"}
    args = [re.sub("|".join(places), lambda found: str(places[found[0]]), arg) for arg in given]
    if expected is WORKS:
        assert np.isfinite(fit(tmp_path, *args)["train/loss"])
        return
    with pytest.raises(SystemExit) as exit:
        fit(tmp_path, *args)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.count("\n") == 1 and error.startswith("lfc: error: ") and expected in error, error
    assert not list(tmp_path.rglob("metrics.json"))


def test_a_model_of_two_tasks_predicts_both(tmp_path):
    paths = [write_crowd(tmp_path / name, seed=seed) for seed, name in enumerate(("zoo", "too"))]
    fit(tmp_path, f"--data.paths=[{paths[0]},{paths[1]}]", config="multi_task")
    run_folder = tmp_path / "runs" / "multi_task" / "SpeeLFC-seed0"
    assert (run_folder / "labels.csv").read_text().count("\ntoo/") == 29
    predictions = (run_folder / "predictions.csv").read_text()
    assert predictions.count("\nzoo/") == predictions.count("\ntoo/") == 10
    assert (run_folder / "annotators.csv").read_text().count("\n") == 5  # the same four people in both
    new = [tmp_path / "new" / path.name for path in paths]
    for path, old in zip(new, paths):
        path.mkdir(parents=True)
        (path / "items.csv").write_text("item\n" + "".join(f"{i}\n" for i in range(50)))
        shutil.copy(old / "features.npy", path)
    checkpoint = run_folder / "checkpoints" / "best.ckpt"
    main(["predict", f"--config={run_folder}/config.yaml", f"--ckpt_path={checkpoint}",
          f"--data.paths=[{new[0]},{new[1]}]"])  # fmt: skip
    (found,) = [path for path in tmp_path.rglob("predictions.csv") if path.parent != run_folder]
    told = {row.split(",")[0]: row.split(",")[1] for row in found.read_text().splitlines()[1:]}
    before = {row.split(",")[0]: row.split(",")[1] for row in predictions.splitlines()[1:]}
    assert len(told) == 100
    assert {f"{task}/{int(i):03d}": told[f"{task}/{i}"] for task in ("zoo", "too") for i in range(40, 50)} == before


def test_what_was_kept_is_told(tmp_path, caplog):
    crowd = write_crowd(tmp_path / "zoo")
    edit("annotations.csv", lambda text: re.sub(r",\w+,", ",", text))(crowd)
    with caplog.at_level("INFO"):
        run(tmp_path, crowd, "--data.redundancy=2")
    assert "note: annotations.csv: no annotators, so all labels count as those of one" in caplog.text
    assert "note: kept 58 of 87 annotations, at most 2 an item" in caplog.text
    assert "repeated" not in caplog.text
