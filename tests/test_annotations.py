"""The crowd table and the reading of crowd folders."""
# ruff: noqa: E501 (a table of bad inputs reads best with one a line)

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lfc.annotations import Annotations, Crowd, check_finite, encode_profiles, join_crowds, read_crowd, read_features
from lfc.errors import UserError
from tests.crowds import shared

SAID = "item,annotator,label\nx,ann,cat\ny,bob,dog\nx,bob,dog\n"
ABOUT = "item,split,gold,text\nx,train,cat,one\ny,test,,two\n"


def write(folder: Path, files: dict[str, str | bytes | pa.Table]) -> Path:
    for name, content in files.items():
        if isinstance(content, pa.Table):
            pq.write_table(content, folder / name)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def triples(crowd: Crowd) -> list[tuple[str, str, str]]:
    table = crowd.annotations
    codes = zip(table.item.tolist(), table.annotator.tolist(), table.label.tolist(), strict=True)
    return [(crowd.items[i], crowd.annotators[r], crowd.classes[k]) for i, r, k in codes]


# The table, against loops


@pytest.fixture
def long() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(high, (200,), generator=generator) for high in (30, 7, 4))


def test_take_is_a_loop_over_items(long):
    item, annotator, label = long
    table = Annotations.from_long(item, annotator, label, num_items=33)
    index = torch.tensor([32, 4, 4, 0, 29, 31])
    want = []
    for row, wanted in enumerate(index.tolist()):
        for i, r, k in zip(item.tolist(), annotator.tolist(), label.tolist(), strict=True):
            if i == wanted:
                want.append((row, r, k))
    assert list(zip(*(part.tolist() for part in table.take(index)), strict=True)) == want


def test_counts_and_item(long):
    item, annotator, label = long
    table = Annotations.from_long(item, annotator, label, num_items=33)
    assert len(table) == 33
    assert table.counts.tolist() == [item.tolist().count(i) for i in range(33)]
    assert table.item.tolist() == sorted(item.tolist())


def test_select_is_take_of_each(long):
    table = Annotations.from_long(*long, num_items=33)
    index = torch.tensor([32, 4, 4, 0])
    chosen = table.select(index)
    for position, i in enumerate(index):
        for want, got in zip(table.take(i[None])[1:], chosen.take(torch.tensor([position]))[1:], strict=True):
            assert want.tolist() == got.tolist()


def test_where_keeps_items(long):
    table = Annotations.from_long(*long, num_items=33)
    kept = table.where(table.annotator == 3)
    assert len(kept) == 33
    rows = zip(table.item.tolist(), table.annotator.tolist(), table.label.tolist(), strict=True)
    want = [row for row in rows if row[1] == 3]
    assert list(zip(kept.item.tolist(), kept.annotator.tolist(), kept.label.tolist(), strict=True)) == want


def test_a_table_without_annotations():
    none = torch.zeros(0, dtype=torch.long)
    table = Annotations.from_long(none, none, none, num_items=2)
    assert table.counts.tolist() == [0, 0]
    assert [part.tolist() for part in table.take(torch.tensor([1, 0]))] == [[], [], []]


# What is read


def test_a_crowd_folder(tmp_path):
    crowd = read_crowd(
        write(
            tmp_path,
            {
                "annotations.csv": SAID,
                "items.csv": ABOUT,
                "annotators.csv": "annotator,age,country\nbob,41,FR\nzoe,9,DE\n",
                "meta.json": '{"name": "pets", "classes": ["dog", "cat"]}',
            },
        )
    )
    assert (crowd.items, crowd.annotators, crowd.classes) == (["x", "y"], ["ann", "bob"], ["dog", "cat"])
    assert triples(crowd) == [("x", "ann", "cat"), ("x", "bob", "dog"), ("y", "bob", "dog")]
    assert (crowd.split.tolist(), crowd.gold.tolist(), crowd.soft) == ([0, 2], [1, -1], None)
    assert crowd.columns == {"text": ["one", "two"]}
    assert crowd.profiles == {"age": ["", "41"], "country": ["", "FR"]}
    assert crowd.notes == ["annotators.csv: 1 of 2 annotators have no row, so no features"]
    assert (crowd.name, crowd.path) == ("pets", tmp_path)


def test_without_items_they_come_in_order_of_appearance(tmp_path):
    crowd = read_crowd(write(tmp_path, {"annotations.csv": "task,worker,label\n9,w,1\n10,w,0\n9,v,0\n"}))
    assert (crowd.items, crowd.annotators, crowd.classes) == (["9", "10"], ["v", "w"], ["0", "1"])
    assert (crowd.split.tolist(), crowd.gold.tolist(), crowd.name) == ([0, 0], [-1, -1], tmp_path.name)


def test_without_annotations(tmp_path):
    crowd = read_crowd(write(tmp_path, {"items.csv": "item,text\na,one\nb,two\n"}))
    assert (crowd.items, crowd.annotators, crowd.classes) == (["a", "b"], [], [])
    assert crowd.annotations.counts.tolist() == [0, 0]


def test_ids_stay_as_written(tmp_path):
    said = "item,annotator,label\n00053,007,a\n53,7,b\n 53,1e3,a\n"
    crowd = read_crowd(write(tmp_path, {"annotations.csv": said}))
    assert crowd.items == ["00053", "53", " 53"]
    assert crowd.annotators == ["007", "1e3", "7"]


def test_parquet_numbers_become_text(tmp_path):
    said = pa.table({"item": [3, 1], "annotator": [7, 7], "label": [1.0, 0.0], "seconds": [[1], [2]]})
    about = pa.table(
        {"item": [1, 3], "gold": pa.array([1.0, None]), "soft_0": [0.5, float("nan")], "soft_1": [1.5, None]}
    )
    crowd = read_crowd(write(tmp_path, {"annotations.parquet": said, "items.parquet": about}))
    assert (crowd.items, crowd.annotators, crowd.classes) == (["1", "3"], ["7"], ["0", "1"])
    assert (crowd.gold.tolist(), crowd.soft.tolist()) == ([1, -1], [[0.25, 0.75], [0, 0]])


def test_parquet_lists_become_json(tmp_path):
    about = pa.table({"item": ["a"], "tokens": [["so", "é"]], "image": [b"\xff"]})
    assert read_crowd(write(tmp_path, {"items.parquet": about})).columns["tokens"] == ['["so", "\\u00e9"]']


@pytest.mark.parametrize(
    "encode",
    [
        pytest.param(lambda text: text.encode("utf-8-sig"), id="utf-8 with a mark"),
        pytest.param(lambda text: text.encode("utf-16"), id="utf-16"),
        pytest.param(lambda text: b"\xfe\xff" + text.encode("utf-16-be"), id="utf-16, big end first"),
        pytest.param(lambda text: text.replace("\n", "\r").encode(), id="CR"),
        pytest.param(lambda text: text.replace("\n", "\r\n").encode(), id="CRLF"),
        pytest.param(lambda text: text.replace("\n", "\n\n").encode(), id="blank lines"),
        pytest.param(lambda text: text.rstrip().encode(), id="no last line end"),
        pytest.param(lambda text: text.replace("item,", " ITEM ,").encode(), id="column names"),
        pytest.param(lambda text: text.replace("\n", ",\n").encode(), id="a comma too many in every row"),
        pytest.param(lambda text: text.replace(",cat", ", cat ").encode(), id="space around a label"),
    ],
)
def test_files_as_people_make_them(tmp_path, encode):
    crowd = read_crowd(write(tmp_path, {"annotations.csv": encode(SAID)}))
    assert triples(crowd) == [("x", "ann", "cat"), ("x", "bob", "dog"), ("y", "bob", "dog")]


def test_quoted_text(tmp_path):
    about = 'item,text\na,"one\ntwo, ""three"""\nb,5" pipe\n'
    assert read_crowd(write(tmp_path, {"items.csv": about})).columns["text"] == ['one\ntwo, "three"', '5" pipe']


def test_a_long_text(tmp_path):
    text = "word " * 10**6
    assert read_crowd(write(tmp_path, {"items.csv": f"item,text\na,{text}\n"})).columns["text"] == [text]


@pytest.mark.parametrize(
    "labels, gold, meta, classes, want, want_gold",
    [
        ("10 9", "", None, ["9", "10"], [1, 0], -1),
        ("b a", "c", None, ["a", "b", "c"], [1, 0], 2),
        ("0 1", "b", ["a", "b"], ["a", "b"], [0, 1], 1),
        ("1.0 2.0", "2", None, ["1", "2"], [0, 1], 1),
        ("1 2", "3", [1, 2, 3], ["1", "2", "3"], [0, 1], 2),
        ("0.5 1.0", "", None, ["0.5", "1.0"], [0, 1], -1),
        ("-1 1", "", None, ["-1", "1"], [0, 1], -1),
    ],
)
def test_classes(tmp_path, labels, gold, meta, classes, want, want_gold):
    first, second = labels.split()
    files = {
        "annotations.csv": f"item,annotator,label\nx,r,{first}\nx,s,{second}\n",
        "items.csv": f"item,gold\nx,{gold}\n",
    }
    if meta:
        files["meta.json"] = f'{{"classes": {meta}}}'.replace("'", '"')
    crowd = read_crowd(write(tmp_path, files))
    assert (crowd.classes, crowd.annotations.label.tolist(), crowd.gold.tolist()) == (classes, want, [want_gold])


def test_the_option_classes_wins(tmp_path):
    files = {"annotations.csv": SAID, "meta.json": '{"classes": ["cat", "dog"]}'}
    assert read_crowd(write(tmp_path, files), classes=["dog", "cow", "cat"]).classes == ["dog", "cow", "cat"]


@pytest.mark.parametrize(
    "name, code",
    [("train", 0), ("Valid", 1), ("val", 1), ("DEV", 1), ("validation", 1), (" test ", 2)],
)
def test_splits(tmp_path, name, code):
    assert read_crowd(write(tmp_path, {"items.csv": f"item,split\na,{name}\n"})).split.tolist() == [code]


@pytest.mark.parametrize(
    "columns", ["votes_cat,votes_dog", "soft_cat,soft_dog", "votes_0,votes_1", "Votes_cat, VOTES_dog"]
)
def test_votes_are_normalised(tmp_path, columns):
    files = {"items.csv": f"item,{columns}\na,1,3\nb,0,0\nc,,2e-1\n", "meta.json": '{"classes": ["cat", "dog"]}'}
    crowd = read_crowd(write(tmp_path, files))
    assert crowd.soft.tolist() == [[0.25, 0.75], [0, 0], [0, 1]]
    assert (crowd.annotators, crowd.columns, crowd.soft.dtype) == ([], {}, torch.float32)


# Policies

TWICE = "item,annotator,label\nx,r,a\ny,r,b\nx,r,b\nx,s,a\nx,r,c\n"


@pytest.mark.parametrize(
    "policy, of_x, note",
    [
        ("keep", "a b a c", "annotations.csv: 2 repeated (item, annotator) pairs, each counted as a vote"),
        ("first", "a a", "annotations.csv: dropped 2 of 5 annotations, repeated pairs of which the first counts"),
        ("last", "a c", "annotations.csv: dropped 2 of 5 annotations, repeated pairs of which the last counts"),
    ],
)
def test_duplicates(tmp_path, policy, of_x, note):
    crowd = read_crowd(write(tmp_path, {"annotations.csv": TWICE}), duplicates=policy, classes=["a", "b", "c"])
    assert " ".join(label for item, _, label in triples(crowd) if item == "x") == of_x
    assert crowd.notes == [note]


def test_unknown_items_are_dropped_on_demand(tmp_path):
    folder = write(tmp_path, {"annotations.csv": SAID + "z,eve,cow\n", "items.csv": ABOUT})
    crowd = read_crowd(folder, unknown_items="drop")
    assert (crowd.annotators, crowd.classes) == (["ann", "bob"], ["cat", "dog"])
    assert crowd.notes == ["annotations.csv: dropped 1 of 4 annotations of items that are not in the items table"]


def test_empty_labels_are_dropped(tmp_path):
    crowd = read_crowd(write(tmp_path, {"annotations.csv": SAID + "z,eve, \n,,\n"}))
    assert (crowd.items, crowd.notes) == (
        ["x", "y"],
        ["annotations.csv: dropped 2 of 5 annotations with an empty label"],
    )


# Without annotators

LABELS = "item,label\nx,cat\ny,dog\nx,dog\nx,cat\nx,\n"


@pytest.mark.parametrize("policy", ["keep", "first", "last", "error"])
@pytest.mark.parametrize("head", ["item,label", " Task ,LABEL"])
def test_labels_of_nobody(tmp_path, policy, head):
    crowd = read_crowd(write(tmp_path, {"annotations.csv": LABELS.replace("item,label", head)}), duplicates=policy)
    assert (crowd.items, crowd.annotators, crowd.classes) == (["x", "y"], ["anonymous"], ["cat", "dog"])
    said = [("x", "anonymous", "cat"), ("x", "anonymous", "dog"), ("x", "anonymous", "cat"), ("y", "anonymous", "dog")]
    assert triples(crowd) == said
    assert crowd.notes == [
        "annotations.csv: no annotators, so all labels count as those of one, called 'anonymous'",
        "annotations.csv: dropped 1 of 5 annotations with an empty label",
    ]


def test_labels_of_nobody_on_items_that_are_not_there(tmp_path):
    folder = write(tmp_path, {"annotations.csv": LABELS + "z,cat\n", "items.csv": ABOUT})
    with pytest.raises(UserError, match=r"annotations.csv, row 7: item 'z' is not in the items table"):
        read_crowd(folder)
    assert len(read_crowd(folder, unknown_items="drop").annotations.label) == 4


def test_labels_of_nobody_in_parquet(tmp_path):
    table = pa.table({"item": [3, 3], "label": [1, 0]})
    crowd = read_crowd(write(tmp_path, {"annotations.parquet": table}))
    assert triples(crowd) == [("3", "anonymous", "1"), ("3", "anonymous", "0")]


# Several crowds as one


def a_crowd(folder: Path, files: dict[str, str]) -> Crowd:
    folder.mkdir()
    return read_crowd(write(folder, files))


def test_joined_crowds(tmp_path):
    one = a_crowd(
        tmp_path / "one",
        {
            "annotations.csv": SAID,
            "items.csv": ABOUT,
            "annotators.csv": "annotator,age,country\nann,,FR\nbob,41,\n",
            "meta.json": '{"classes": ["dog", "cat"]}',
        },
    )
    other = a_crowd(
        tmp_path / "other",
        {
            "annotations.csv": "item,annotator,label\nx,zoe,owl\nz,bob,cat\nx,ann,cat\n",
            "items.csv": "item,split,gold,image,soft_owl,soft_cat\nz,valid,owl,p,1,3\nx,train,,q,,\n",
            "annotators.csv": "annotator,age,city\nann,20,Paris\nbob,50,\nzoe,60,Rome\n",
        },
    )
    both = join_crowds([one, other], ["a", "b"])
    assert both.items == ["a/x", "a/y", "b/z", "b/x"]
    assert both.annotators == ["ann", "bob", "zoe"]
    assert (one.classes, other.classes, both.classes) == (["dog", "cat"], ["cat", "owl"], ["dog", "cat", "owl"])
    assert sorted(triples(both)) == sorted(
        [(f"a/{i}", r, k) for i, r, k in triples(one)] + [(f"b/{i}", r, k) for i, r, k in triples(other)]
    )
    assert both.annotations.counts.tolist() == [2, 1, 1, 2]
    assert (both.split.tolist(), both.gold.tolist()) == ([0, 2, 1, 0], [1, -1, 2, -1])
    assert both.soft.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0.75, 0.25], [0, 0, 0]]
    assert both.columns == {"text": ["one", "two", "", ""], "image": ["", "", "p", "q"]}
    assert both.profiles == {"age": ["20", "41", "60"], "country": ["FR", "", ""], "city": ["Paris", "", "Rome"]}
    assert (both.name, both.path) == ("a+b", None)
    assert both.notes == ["the classes are not the same everywhere; each item may be of any of all 3"]


def test_joined_crowds_of_the_same_classes(tmp_path):
    said = {"annotations.csv": SAID + "x,ann,\n", "meta.json": '{"classes": ["dog", "cow", "cat"]}'}
    crowds = [a_crowd(tmp_path / name, said) for name in "ab"]
    unlabelled = a_crowd(tmp_path / "c", {"items.csv": "item\nx\n"})
    both = join_crowds([*crowds, unlabelled], ["a", "b", "c"])
    assert both.classes == ["dog", "cow", "cat"] and both.soft is None
    dropped = "annotations.csv: dropped 1 of 4 annotations with an empty label"
    assert both.notes == [f"a: {dropped}", f"b: {dropped}"]
    assert both.annotations.label.tolist() == 2 * crowds[0].annotations.label.tolist()
    assert both.annotations.counts.tolist() == [2, 1, 2, 1, 0]


# Annotators as numbers


def encoded(**profiles: list[str]) -> tuple[dict[str, list[float]], list[str]]:
    notes: list[str] = []
    table, names = encode_profiles(profiles, notes)
    assert table.dtype == torch.float32 and table.shape == (len(next(iter(profiles.values()))), len(names))
    return dict(zip(names, table.T.tolist(), strict=True)), notes


def test_numbers_are_standardised():
    found, notes = encoded(age=["20", " 30.0", "4e1", "3E+1"])
    assert list(found) == ["age"] and notes == []
    assert found["age"] == pytest.approx([-(2**0.5), 0, 2**0.5, 0])


def test_a_missing_number_has_a_column_of_its_own():
    found, _ = encoded(age=["-20", "", "40", " "])
    assert found == {"age": [-1, 0, 1, 0], "age (missing)": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    "values", [["7", "7", "7"], ["0", "0", "0"], ["0.1", "0.1", "0.1"], ["1e300", "1e300", "1e300"]]
)
def test_a_constant_number_is_zero(values):
    assert encoded(age=values)[0]["age"] == [0, 0, 0]


def test_great_and_small_numbers():
    found, _ = encoded(great=["1e300", "-1e300"], small=["1e-300", "3e-300"], shifted=["1000000001", "1000000003"])
    assert {name: pytest.approx([1, -1]) if name == "great" else pytest.approx([-1, 1]) for name in found} == found


@pytest.mark.parametrize("word", ["n/a", "nan", "inf", "1_000", "1e999", "0x10", "²"])
def test_a_word_among_numbers_makes_them_words(word):
    found, _ = encoded(age=["20", word, "20", word, ""])
    assert found == {
        f"age={name}": [float(v == name) for v in ["20", word, "20", word, ""]] for name in sorted(["20", word])
    }


def test_a_column_a_value():
    found, notes = encoded(country=["FR", "", " DE", "FR "])
    assert found == {"country=DE": [0, 0, 1, 0], "country=FR": [1, 0, 0, 1]} and notes == []


def test_a_mark_of_one_annotator_is_a_feature():
    assert encoded(expert=["", "yes", ""])[0] == {"expert=yes": [0, 1, 0]}


def test_columns_that_are_no_features():
    many = [f"v{i // 2}" for i in range(2002)]
    found, notes = encoded(
        mail=[f"{i}@x" for i in range(2002)], nothing=[" "] * 2002, many=many, fewer=[*many[:2000], "", ""]
    )
    assert list(found) == [f"fewer=v{i}" for i in sorted(map(str, range(1000)))]
    assert notes == [
        "annotators: column 'mail' is no feature, since all its values differ",
        "annotators: column 'nothing' is no feature, since it is empty",
        "annotators: column 'many' is no feature, since it has 1001 different values and 1000 are the most",
    ]


def test_nobody_and_nothing():
    assert encode_profiles({})[0].shape == (0, 0)
    table, names = encode_profiles({"mail": ["a", "b"]})
    assert table.shape == (2, 0) and names == []


# What cannot be read: one line that names file, row and remedy

PAIR = pa.table({"item": ["x"], "annotator": ["r"], "label": ["cat"]})
BAD = {
    "nothing": ({}, {}, "neither annotations nor items; add annotations.csv"),
    "both formats": ({"annotations.csv": SAID, "annotations.parquet": PAIR}, {}, "both annotations.csv and annotations.parquet|delete"),
    "missing column": ({"annotations.csv": "item,who,label\nx,r,a\n"}, {}, "annotations.csv, row 1|'annotator' or 'worker'|item, who, label"),
    "no annotator beside another column": ({"annotations.csv": "item,label,seconds\nx,a,3\ny,b,4\n"}, {}, "annotations.csv, row 1|'annotator' or 'worker'|item, label, seconds"),
    "item twice and no annotator": ({"annotations.csv": "item,task,label\nx,s,a\ny,t,b\n"}, {}, "annotations.csv, row 1|'annotator' or 'worker'"),
    "no label": ({"annotations.csv": "item,annotator\nx,a\n"}, {}, "annotations.csv, row 1|no column 'label'"),
    "semicolons": ({"annotations.csv": "item;annotator;label\nx;r;a\n"}, {}, "annotations.csv, row 1|commas"),
    "items without item": ({"items.csv": "id,text\nx,a\n"}, {}, "items.csv, row 1|'item'|id, text"),
    "column twice": ({"annotations.csv": "item,annotator,label,Label \nx,r,a,b\n"}, {}, "annotations.csv, row 1|'label' stands twice"),
    "too many fields": ({"annotations.csv": SAID + "\nx,zoe,cat,dog\n"}, {}, "annotations.csv, row 6: 4 fields where the header has 3"),
    "too few fields": ({"annotations.csv": SAID + "x\n"}, {}, "annotations.csv, row 5: 1 field where the header has 3"),
    "quote left open": ({"items.csv": 'item,text\na,one\nb,"two\nc,three\n'}, {}, "items.csv, row 3|quotation mark"),
    "open quote first": ({"items.csv": 'item,text\na,one\n"b,two\nc,three\n'}, {}, "items.csv, row 3|close"),
    "empty file": ({"annotations.csv": ""}, {}, "annotations.csv: the file is empty"),
    "blank file": ({"annotations.csv": "\n\n"}, {}, "annotations.csv: the file is empty"),
    "header only": ({"annotations.csv": "item,annotator,label\n"}, {}, "annotations.csv: no rows below the header"),
    "no rows in parquet": ({"annotations.parquet": PAIR.slice(0, 0)}, {}, "annotations.parquet: no rows"),
    "binary": ({"annotations.csv": SAID.encode() + b"x,\0\xff,cat\n"}, {}, "annotations.csv, row 5|NUL bytes|UTF-8"),
    "latin-1": ({"annotations.csv": (SAID + "x,zoé,cat\n").encode("latin-1")}, {}, "annotations.csv, row 5|0xe9|UTF-8"),
    "broken utf-16": ({"annotations.csv": SAID.encode("utf-16")[:-1]}, {}, "annotations.csv: cannot be read"),
    "corrupt parquet": ({"annotations.parquet": b"PAR1 junk PAR1"}, {}, "annotations.parquet: cannot be read"),
    "item twice": ({"items.csv": "item\na\nb\n\na\n"}, {}, "items.csv, row 5: item 'a' stands twice"),
    "item empty": ({"items.csv": 'item,text\na,"b\nc"\n,d\n'}, {}, "items.csv, row 3: the item id is empty"),
    "annotated item empty": ({"annotations.csv": SAID + ",r,cat\n"}, {}, "annotations.csv, row 5: the item id is empty"),
    "annotator empty": ({"annotations.csv": SAID + "x,,cat\n"}, {}, "annotations.csv, row 5: the annotator id is empty"),
    "worker empty": ({"annotations.csv": "task,worker,label\nx,,cat\n"}, {}, "annotations.csv, row 2: the worker id is empty"),
    "unknown item": ({"annotations.csv": SAID + "z,r,\nz,r,cat\n", "items.csv": ABOUT}, {}, "annotations.csv, row 6: item 'z'|unknown_items=drop"),
    "only unknown items": ({"annotations.csv": SAID, "items.csv": "item\nz\n"}, {"unknown_items": "drop"}, "annotations.csv: dropped 3 of 3|none is left"),
    "only empty labels": ({"annotations.csv": "item,annotator,label\nx,r,\n"}, {}, "annotations.csv: dropped 1 of 1|none is left"),
    "pair twice": ({"annotations.csv": TWICE}, {"duplicates": "error"}, "annotations.csv, row 4: annotator 'r' labelled item 'x' before|duplicates"),
    "label misspelt": ({"annotations.csv": SAID + "y,r,dgo\n"}, {"classes": ["cat", "dog"]}, "annotations.csv, row 5: label 'dgo'|did you mean 'dog'"),
    "label no class": ({"annotations.csv": SAID, "meta.json": '{"classes": ["cat", "cow"]}'}, {}, "annotations.csv, row 3: label 'dog'|cat, cow|meta.json"),
    "label after dropped rows": ({"annotations.csv": "item,annotator,label\nx,r,\nx,r,cat\nx,s,z\n"}, {"classes": ["cat", "cow"]}, "annotations.csv, row 4: label 'z'"),
    "index out of range": ({"annotations.csv": "item,annotator,label\nx,r,0\nx,s,2\n"}, {"classes": ["cat", "cow"]}, "annotations.csv, row 3: label '2'|0 to 1"),
    "number beside names": ({"annotations.csv": "item,annotator,label\nx,r,1\nx,s,0\n"}, {"classes": ["1", "2"]}, "annotations.csv, row 3: label '0'"),
    "gold no class": ({"annotations.csv": SAID, "items.csv": "item,gold\nx,cat\ny,cow\n"}, {"classes": ["cat", "dog"]}, "items.csv, row 3: gold 'cow'"),
    "names and numbers": ({"annotations.csv": SAID, "items.csv": "item,gold\nx,0\ny,1\n"}, {}, "gold values are numbers, the label values names|meta.json"),
    "one class": ({"annotations.csv": "item,annotator,label\nx,r,a\n"}, {}, "'a' is the only class found|meta.json"),
    "one class given": ({"annotations.csv": SAID}, {"classes": ["cat"]}, "classes has 1 name"),
    "split": ({"items.csv": "item,split\na,train\nb,soft_test\n"}, {}, "items.csv, row 3: split 'soft_test'|train, valid (or val, dev, validation), test"),
    "split empty": ({"items.csv": "item,split\na,train\nb,\n"}, {}, "items.csv, row 3: split ''|train, valid"),
    "votes no number": ({"items.csv": "item,votes_a,votes_b\nx,1,2\ny,many,1\n"}, {}, "items.csv, row 3: votes_a 'many'"),
    "votes negative": ({"items.csv": "item,votes_a,votes_b\nx,1,-2\n"}, {}, "items.csv, row 2: votes_b '-2'|from 0 up"),
    "soft not finite": ({"items.csv": "item,soft_a,soft_b\nx,1,nan\n"}, {}, "items.csv, row 2: soft_b 'nan'"),
    "soft no class": ({"items.csv": "item,soft_a,soft_b\nx,1,0\n", "meta.json": '{"classes": ["a", "c"]}'}, {}, "items.csv, row 1: column 'soft_b'|a, c"),
    "votes and soft": ({"items.csv": "item,soft_a,votes_b\nx,1,0\n"}, {}, "items.csv, row 1: both votes_ and soft_"),
    "class with two columns": ({"items.csv": "item,votes_1,votes_1.0\nx,1,0\n"}, {"classes": ["1", "2"]}, "items.csv, row 1: column 'votes_1.0'"),
    "annotator twice": ({"annotations.csv": SAID, "annotators.csv": "annotator,age\nann,3\nann,4\n"}, {}, "annotators.csv, row 3: annotator 'ann' stands twice"),
    "annotators without id": ({"annotations.csv": SAID, "annotators.csv": "age\n3\n"}, {}, "annotators.csv, row 1: no column 'annotator'"),
    "meta not JSON": ({"annotations.csv": SAID, "meta.json": '{\n"classes": [cat]}'}, {}, "meta.json, row 2: not JSON"),
    "meta a list": ({"annotations.csv": SAID, "meta.json": "[1]"}, {}, "meta.json, row 1: holds a list|object"),
    "meta binary": ({"annotations.csv": SAID, "meta.json": b"\0\1"}, {}, "meta.json, row 1|NUL"),
    "classes a text": ({"annotations.csv": SAID, "meta.json": '{"classes": "cat"}'}, {}, "meta.json: classes must be a list"),
    "classes nested": ({"annotations.csv": SAID, "meta.json": '{"classes": ["cat", ["dog"]]}'}, {}, "meta.json: classes must be a list"),
    "class twice": ({"annotations.csv": SAID, "meta.json": '{"classes": ["cat", "dog", "cat"]}'}, {}, "meta.json: classes names 'cat' twice"),
    "class empty": ({"annotations.csv": SAID, "meta.json": '{"classes": ["cat", " "]}'}, {}, "meta.json: a name in classes is empty"),
    "no such policy": ({"annotations.csv": SAID}, {"duplicates": "merge"}, "duplicates: 'merge'|keep, first, last, error"),
    "no such choice": ({"annotations.csv": SAID}, {"unknown_items": "keep"}, "unknown_items: 'keep'|error, drop"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_line(tmp_path, name):
    files, options, fragments = BAD[name]
    with pytest.raises(UserError) as caught:
        read_crowd(write(tmp_path, files), **options)
    message = str(caught.value)
    assert "\n" not in message and ";" in message
    for fragment in fragments.split("|"):
        assert fragment in message


def test_a_path_that_is_no_folder(tmp_path, monkeypatch):
    write(tmp_path, {"annotations.csv": SAID})
    with pytest.raises(UserError, match="absent: no such folder"):
        read_crowd(tmp_path / "absent")
    with pytest.raises(UserError, match=r"annotations.csv: a file, not a folder"):
        read_crowd(tmp_path / "annotations.csv")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        patch.setattr(Path, "read_bytes", refuse)
        read_crowd(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        patch.setattr(Path, "iterdir", refuse)
        read_crowd(tmp_path)


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "items.csv").mkdir()
    with pytest.raises(UserError, match=r"items.csv: cannot be read \(Is a directory\)"):
        read_crowd(tmp_path)


# Features


@pytest.fixture
def two_items(tmp_path):
    return read_crowd(write(tmp_path, {"items.csv": "item\na\nb\n"}))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_features(tmp_path, two_items, dtype):
    want = np.arange(6).reshape(2, 3).astype(dtype)
    np.save(tmp_path / "features.npy", want)
    features = read_features(tmp_path, two_items)
    assert isinstance(features, np.memmap) and (features == want).all()
    check_finite(features, two_items)


@pytest.mark.parametrize(
    "save, fragment",
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b"junk"), "not a readable array"),
        (lambda path: path.write_bytes(b""), "not a readable array"),
        (lambda path: np.save(path, np.array([[{}], [{}]], dtype=object), allow_pickle=True), "not a readable array"),
        (lambda path: np.savez(path.open("wb"), a=np.zeros(2)), "archive"),
        (lambda path: np.save(path, np.zeros(2)), r"float64 \(2,\)"),
        (lambda path: np.save(path, np.array([["a"], ["b"]])), r"<U1 \(2, 1\)"),
        (lambda path: np.save(path, np.zeros((3, 1))), "3 rows for 2 items"),
    ],
)
def test_bad_features(tmp_path, two_items, save, fragment):
    save(tmp_path / "features.npy")
    with pytest.raises(UserError, match=rf"features.npy: .*{fragment}.*;") as caught:
        read_features(tmp_path, two_items)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(dtype, value):
    crowd = Crowd([f"i{i}" for i in range(3000)], [], [], None, None, None)
    features = np.zeros((3000, 512), dtype=dtype)
    features[2600, 7] = features[2700, 3] = value
    with pytest.raises(UserError, match=rf"features.npy, row 2601 of 3000 \(item 'i2600'\): {value} in column 8;"):
        check_finite(features, crowd)


# Real crowds


@pytest.mark.parametrize(
    "name, classes, splits, annotators, labels, right",
    [
        ("labelme", 8, [1000, 500, 1188], 59, 2547, 0.7405),
        ("music_genre", 10, [700, 0, 300], 44, 2945, 0.5603),
        ("sentiment_polarity", 2, [4999, 0, 5661], 203, 27746, 0.7895),
        ("rte", 2, [800, 0, 0], 164, 8000, 0.7291),
        ("medical_cause", 2, [3231, 0, 0], 468, 50226, 0.7436),
        ("medical_treat", 2, [3231, 0, 0], 468, 50226, 0.7334),
        ("bluebirds", 2, [108, 0, 0], 39, 4212, 0.6356),
        ("cifar10_human", 10, [7000, 1000, 2000], 60, 60000, 0.9391),
        ("jobs_q1", 5, [1000, 500, 500], 1185, 20125, None),
        ("jobs_q2", 5, [1000, 500, 500], 1185, 20125, None),
        ("jobs_q3", 12, [1000, 500, 500], 1185, 21092, None),
        ("temporal", 2, [462, 0, 0], 76, 4620, 0.7338),
    ],
)
def test_real_crowds(name, classes, splits, annotators, labels, right):
    crowd = read_crowd(shared(name))
    table = crowd.annotations
    assert (len(crowd.classes), len(crowd.annotators), len(table.label)) == (classes, annotators, labels)
    assert crowd.split.bincount(minlength=3).tolist() == splits
    gold = crowd.gold[table.item]
    hits = (table.label == gold)[gold >= 0].double()
    assert not len(hits) if right is None else hits.mean().item() == pytest.approx(right, abs=5e-5)


def test_majority_vote_of_labelme():
    crowd = read_crowd(shared("labelme"))
    assert len(crowd.items) == 2688
    expected = []  # the chance that a vote with random ties is right
    for i in range(1000):
        votes = crowd.annotations.take(torch.tensor([i]))[2].bincount(minlength=8)
        winners = (votes == votes.max()).nonzero().flatten().tolist()
        expected.append((crowd.gold[i].item() in winners) / len(winners))
    assert np.mean(expected) == pytest.approx(0.766, abs=5e-4)


def test_repeated_pairs_of_jobs_q3():
    folder = shared("jobs_q3")
    assert "967 repeated" in read_crowd(folder).notes[0]
    assert len(read_crowd(folder, duplicates="first").annotations.label) == 21092 - 967


def test_votes_of_stemming():
    crowd = read_crowd(shared("stemming_votes"))
    assert (len(crowd.items), crowd.annotators, crowd.classes) == (6679, [], ["0", "1"])
    assert crowd.soft.sum(1).allclose(torch.ones(6679))
    rows = torch.arange(6679)
    majority = (crowd.soft[rows, crowd.gold] > 0.5).double() + 0.5 * (crowd.soft[rows, crowd.gold] == 0.5)
    assert majority.mean().item() == pytest.approx(0.884, abs=5e-4)


@pytest.mark.parametrize("name, width", [("labelme", 512), ("music_genre", 124), ("bluebirds", 4096)])
def test_features_of_real_crowds(name, width):
    folder = shared(name)
    crowd = read_crowd(folder)
    features = read_features(folder, crowd)
    assert features.shape == (len(crowd.items), width)
    check_finite(features, crowd)


def test_a_split_of_its_own_is_refused():
    with pytest.raises(
        UserError, match=r"items.parquet, row 17505: split 'soft_test' is none of train, valid .*; rename"
    ):
        read_crowd(shared("pos_gimpel_soft"))
