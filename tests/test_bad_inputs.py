"""Crowd folders as people make them: each trains, or ends in one line that says what to mend."""

import json
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
    # these train
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
    options = ["--trainer.max_epochs=1", f"--run.root={tmp_path}/runs", f"--data.path={crowd}", *args]
    main(["fit", f"--config={ROOT}/configs/labelme.yaml", *QUICK, *options])
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
