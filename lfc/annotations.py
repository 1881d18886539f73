"""The crowd table: who said what of which item, in long form from the file to the loss."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from lfc._tables import TEXT, Table, check_folder, first, quote, read_file, read_json, read_table, shorten
from lfc.errors import UserError

Duplicates = Literal["keep", "first", "last", "error"]
UnknownItems = Literal["error", "drop"]

TRAIN, VALID, TEST = 0, 1, 2
SPLITS = ("train", "valid", "test")
"""Names of the splits, in the order of their codes."""
SPLIT_CODES = {"train": TRAIN, "valid": VALID, "val": VALID, "dev": VALID, "validation": VALID, "test": TEST}
SHARES = ("votes_", "soft_")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
NONNEGATIVE = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE](\+?[0-9]{1,2}|-[0-9]+))?$"
UNKNOWN = -2
ANONYMOUS = "anonymous"
"""Who gave the labels of a table that has no annotators."""
MOST_VALUES = 1000
"""Different texts in a column about annotators beyond which it is not taken for a feature."""


@dataclass(frozen=True)
class Annotations:
    """Annotations sorted by item (CSR), so that those of any set of items are found by indexing.

    >>> table = Annotations.from_long(
    ...     item=torch.tensor([2, 0, 2]), annotator=torch.tensor([5, 5, 6]), label=torch.tensor([1, 0, 1]), num_items=3
    ... )
    >>> row, annotator, label = table.take(torch.tensor([2, 1]))
    >>> row.tolist(), annotator.tolist(), label.tolist()
    ([0, 0], [5, 6], [1, 1])
    """

    offsets: Tensor
    """``(N + 1,)``: the annotations of item ``i`` are ``offsets[i]:offsets[i + 1]``."""
    annotator: Tensor
    """``(A,)``."""
    label: Tensor
    """``(A,)``."""

    @classmethod
    def from_long(cls, item: Tensor, annotator: Tensor, label: Tensor, num_items: int) -> "Annotations":
        """Sort triples by item; annotations of one item keep their order."""
        order = torch.argsort(item, stable=True)
        offsets = torch.zeros(num_items + 1, dtype=torch.long)
        torch.cumsum(torch.bincount(item, minlength=num_items), 0, out=offsets[1:])
        return cls(offsets, annotator[order], label[order])

    def __len__(self) -> int:
        """Number of items."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """``(N,)`` annotations of each item."""
        return self.offsets.diff()

    @property
    def item(self) -> Tensor:
        """``(A,)`` the item of each annotation."""
        return torch.repeat_interleave(self.counts)

    def _positions(self, index: Tensor) -> tuple[Tensor, Tensor]:
        counts = self.offsets[index + 1] - self.offsets[index]  # (B,)
        row = torch.repeat_interleave(counts)  # (A,)
        start = self.offsets[index] - counts.cumsum(0) + counts  # (B,) where a row's annotations begin, less its shift
        return row, start[row] + torch.arange(len(row))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``row``, ``annotator`` and ``label`` of the annotations of the items ``index (B,)``."""
        row, position = self._positions(index)
        return row, self.annotator[position], self.label[position]

    def select(self, index: Tensor) -> "Annotations":
        """The table of the items ``index`` alone, in that order."""
        row, position = self._positions(index)
        return Annotations.from_long(row, self.annotator[position], self.label[position], len(index))

    def where(self, keep: Tensor) -> "Annotations":
        """The table with only the annotations of the mask ``keep (A,)``; items stay, even when left without any."""
        return Annotations.from_long(self.item[keep], self.annotator[keep], self.label[keep], len(self))


@dataclass
class Crowd:
    """A dataset without its inputs: items, annotators, classes, and who said what."""

    items: list[str]
    """Item ids in the order of the files; text, as written."""
    annotators: list[str]
    """Annotator ids, sorted."""
    classes: list[str]
    """Class names in order."""
    annotations: Annotations
    """Of every item, whatever its split."""
    split: Tensor
    """``(items,)`` 0 train, 1 valid, 2 test."""
    gold: Tensor
    """``(items,)`` reference class, -1 where unknown."""
    soft: Tensor | None = None
    """``(items, K)`` label distributions from ``votes_`` or ``soft_`` columns; a row of zeros where unknown."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """The other columns of the items table (``text``, ``image``, ...), as text."""
    profiles: dict[str, list[str]] = field(default_factory=dict)
    """The columns of ``annotators.csv`` in the order of ``annotators``, as text."""
    name: str = "crowd"
    path: Path | None = None
    notes: list[str] = field(default_factory=list)
    """What was dropped or decided while reading, a line each, for the user to see."""
    confusion: Tensor | None = None
    """``(R, K, K)`` the annotators' true matrices, where the crowd was simulated."""


def read_crowd(
    path: str | Path,
    *,
    duplicates: Duplicates = "keep",
    unknown_items: UnknownItems = "error",
    classes: Sequence[str] | None = None,
    bare: bool = False,
) -> Crowd:
    """Read a crowd folder: tables of annotations, items and annotators, and ``meta.json``.

    One of annotations and items must be there. Column names are matched without regard to case and surrounding space.
    Ids are text and stay as written; labels, gold, splits and class names are stripped. A row with an empty label is
    dropped. A column of labels holds class names, or, where none of its values is one, indices into the classes.
    Annotations of nothing but item and label are those of one anonymous annotator, of whom nothing is a repeat.

    Args:
        path: The folder.
        duplicates: What to do where one annotator labelled one item twice: ``keep`` each as a vote, keep the ``first``
            or the ``last`` alone, or raise an ``error``.
        unknown_items: What to do with annotations of items that the items table lacks: an ``error``, or ``drop`` them.
        classes: Class names in order; by default those of ``meta.json``, else the values found, sorted.
        bare: Whether ``path`` may also be a table of annotations alone, ``.csv`` or ``.parquet``.

    Returns:
        The crowd; its ``notes`` tell what was dropped.

    Raises:
        UserError: Where a file cannot be understood; the message names file, row and remedy.
    """
    _check_choice("duplicates", duplicates, get_args(Duplicates))
    _check_choice("unknown_items", unknown_items, get_args(UnknownItems))
    folder = Path(path)
    notes: list[str] = []
    meta: dict[str, Any] = {}
    said: Table | None
    about: Table | None = None
    who: Table | None = None
    if bare and folder.is_file():
        said = read_file(folder)
    else:
        check_folder(folder)
        meta = read_json(folder / "meta.json")
        said, about, who = (read_table(folder, stem) for stem in ("annotations", "items", "annotators"))
    if said is None and about is None:
        raise UserError(f"{folder}: neither annotations nor items; add annotations.csv with item,annotator,label")
    said = said or _empty(folder / "annotations.csv", "item", "annotator", "label")
    votes = _votes(said, notes)
    about = about or Table(folder / "items.csv", {"item": pc.unique(votes["item"])})

    items = about.ids("item", "task")
    votes = _of_known_items(votes, items, said, unknown_items, notes)
    annotators = pa.array(sorted(pc.unique(votes["annotator"]).to_pylist()), TEXT)
    if not _is_anonymous(said):
        votes = _without_repeats(votes, said, duplicates, notes)

    labels = _Values("label", votes["label"], lambda i, message: said.error(votes["row"][i].as_py(), message))
    gold = _Values("gold", _stripped(about, "gold"), about.error)
    shares = _share_classes(about)
    given, source = (meta.get("classes"), f"{folder / 'meta.json'}") if classes is None else (list(classes), "classes")
    names = _found_classes(folder, labels, gold, shares) if given is None else _given_classes(given, source)
    return Crowd(
        items=items.to_pylist(),
        annotators=annotators.to_pylist(),
        classes=names,
        annotations=Annotations.from_long(
            item=torch.from_numpy(_position(votes["item"], items)),
            annotator=torch.from_numpy(_position(votes["annotator"], annotators)),
            label=torch.from_numpy(_codes(labels, names)),
            num_items=len(items),
        ),
        split=torch.from_numpy(_splits(about)),
        gold=torch.from_numpy(_codes(gold, names)),
        soft=_soft(about, shares, names),
        columns={name: about.columns[name].to_pylist() for name in _other_columns(about)},
        profiles={} if who is None else _profiles(who, annotators, notes),
        name=str(meta.get("name", folder.resolve().stem if folder.is_file() else folder.resolve().name)),
        path=folder,
        notes=notes,
    )


def read_features(folder: str | Path, crowd: Crowd) -> np.ndarray:
    """``features.npy`` of a crowd folder ``(items, D)``, mapped into memory, not loaded."""
    path = Path(folder) / "features.npy"
    if not path.exists():
        raise UserError(f"{path}: no such file; save the items' features there with numpy.save, a row for each item")
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path}: not a readable array ({shorten(str(error))}); save it anew with numpy.save") from None
    numbers = isinstance(features, np.ndarray) and features.dtype.kind in "biuf"
    if not numbers or features.ndim != 2 or not features.shape[1]:
        found = f"{features.dtype} {features.shape}" if isinstance(features, np.ndarray) else "an archive of arrays"
        raise UserError(f"{path}: {found} where numbers (items, features) were wanted; save a two-dimensional array")
    if len(features) != len(crowd.items):
        raise UserError(f"{path}: {len(features)} rows for {len(crowd.items)} items; save one row for each item")
    return features


def check_finite(features: np.ndarray, crowd: Crowd) -> None:
    """Raise an error that names the first row of ``features (items, D)`` with NaN or infinity, if there is one.

    >>> crowd = Crowd(["a", "b"], [], [], None, None, None)
    >>> check_finite(np.array([[1.0, 2.0], [3.0, np.nan]]), crowd)
    Traceback (most recent call last):
    lfc.errors.UserError: features.npy, row 2 of 2 (item 'b'): nan in column 2; replace or remove what is not a number
    """
    step = max(1, 2**20 // max(1, features.shape[1]))  # rows at a time, about a million numbers
    for start in range(0, len(features), step):
        with np.errstate(over="ignore"):
            bad = ~np.isfinite(features[start : start + step].astype(np.float32))  # as they are used
        if bad.any():
            row, column = np.argwhere(bad)[0] + [start, 0]
            path = Path(crowd.path or "", "features.npy")
            where = f"{path}, row {row + 1} of {len(features)} (item {quote(crowd.items[row])})"
            value = features[row, column]
            remedy = "scale it to fit float32" if np.isfinite(value) else "replace or remove what is not a number"
            raise UserError(f"{where}: {value} in column {column + 1}; {remedy}")


def join_crowds(crowds: Sequence[Crowd], names: Sequence[str]) -> Crowd:
    """Several crowds as one, the items of one after those of the other; annotators with the same id are the same.

    Classes are those of all, in the order in which they are first listed. What two crowds say of one annotator is taken
    from the first that says it.

    >>> said = Annotations.from_long(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]), num_items=1)
    >>> rows = torch.tensor([0]), torch.tensor([-1])
    >>> one = Crowd(["x"], ["bob"], ["cat", "dog"], said, *rows)
    >>> other = Crowd(["x"], ["ann"], ["dog", "cat"], said, *rows)
    >>> both = join_crowds([one, other], ["day", "night"])
    >>> both.items, both.annotators, both.classes
    (['day/x', 'night/x'], ['ann', 'bob'], ['cat', 'dog'])
    >>> both.annotations.annotator.tolist(), both.annotations.label.tolist()
    ([1, 0], [1, 0])

    Args:
        crowds: What to join.
        names: Of each crowd, all different; an item is then called ``name/id``.
    """
    annotators = sorted({who for crowd in crowds for who in crowd.annotators})
    classes = list(dict.fromkeys(name for crowd in crowds for name in crowd.classes))
    starts = np.cumsum([0, *(len(crowd.items) for crowd in crowds)]).tolist()
    who_code, class_code = ({name: i for i, name in enumerate(known)} for known in (annotators, classes))
    whos = [torch.tensor([who_code[name] for name in crowd.annotators], dtype=torch.long) for crowd in crowds]
    codes = [torch.tensor([*(class_code[name] for name in crowd.classes), -1]) for crowd in crowds]  # -1 stays -1
    soft = None
    if any(crowd.soft is not None for crowd in crowds):
        soft = torch.zeros(starts[-1], len(classes))
        for crowd, code, start in zip(crowds, codes, starts, strict=False):
            if crowd.soft is not None:
                soft[start : start + len(crowd.soft), code[:-1]] = crowd.soft
    notes = [f"{name}: {note}" for crowd, name in zip(crowds, names, strict=True) for note in crowd.notes]
    if any(crowd.classes and crowd.classes != classes for crowd in crowds):
        notes.append(f"the classes are not the same everywhere; each item may be of any of all {len(classes)}")
    return Crowd(
        items=[f"{name}/{item}" for crowd, name in zip(crowds, names, strict=True) for item in crowd.items],
        annotators=annotators,
        classes=classes,
        annotations=Annotations.from_long(
            item=torch.cat([crowd.annotations.item + start for crowd, start in zip(crowds, starts, strict=False)]),
            annotator=torch.cat([who[crowd.annotations.annotator] for crowd, who in zip(crowds, whos, strict=True)]),
            label=torch.cat([code[crowd.annotations.label] for crowd, code in zip(crowds, codes, strict=True)]),
            num_items=starts[-1],
        ),
        split=torch.cat([crowd.split for crowd in crowds]),
        gold=torch.cat([code[crowd.gold] for crowd, code in zip(crowds, codes, strict=True)]),
        soft=soft,
        columns={
            column: [text for crowd in crowds for text in crowd.columns.get(column, [""] * len(crowd.items))]
            for column in dict.fromkeys(name for crowd in crowds for name in crowd.columns)
        },
        profiles={
            column: _first_said(crowds, column, annotators)
            for column in dict.fromkeys(name for crowd in crowds for name in crowd.profiles)
        },
        name="+".join(names),
        notes=notes,
    )


def _first_said(crowds: Sequence[Crowd], column: str, annotators: list[str]) -> list[str]:
    """What the first crowd that says anything says of each annotator."""
    known: dict[str, str] = {}
    for crowd in reversed(crowds):
        texts = crowd.profiles.get(column, [""] * len(crowd.annotators))
        known |= {who: text for who, text in zip(crowd.annotators, texts, strict=True) if text.strip()}
    return [known.get(who, "") for who in annotators]


def encode_profiles(profiles: dict[str, list[str]], notes: list[str] | None = None) -> tuple[Tensor, list[str]]:
    """What is known of the annotators as numbers, ``(R, F)`` of float32, and the name of each of the ``F`` columns.

    A column of numbers is brought to mean 0 and deviation 1 over those who have one; an empty value becomes 0, and a
    second column is then 1 where it was empty. Any other column becomes a column a value, sorted, of which an
    annotator's own is 1; an empty value is none of them. Dropped are columns that are empty, columns of texts of which
    none comes twice, which are ids rather than features, and those of more than a thousand different texts.

    >>> profiles = {"age": ["20", "", "40"], "country": ["FR", "DE", "FR"], "mail": ["a@x", "b@x", "c@x"]}
    >>> encode_profiles(profiles, notes := [])
    (tensor([[-1.,  0.,  0.,  1.],
             [ 0.,  1.,  1.,  0.],
             [ 1.,  0.,  0.,  1.]]), ['age', 'age (missing)', 'country=DE', 'country=FR'])
    >>> notes
    ["annotators: column 'mail' is no feature, since all its values differ"]

    Args:
        profiles: Columns of text in the order of the annotators, see :attr:`Crowd.profiles`.
        notes: Where to tell, a line each, what was dropped.
    """
    columns: dict[str, np.ndarray] = {}
    for name, values in profiles.items():
        texts, code = np.unique([value.strip() for value in values], return_inverse=True)
        given = np.array([text != "" for text in texts], dtype=bool)
        numbers = [_number(text) for text in texts[given]]
        reason = ""
        if not given.any():
            reason = "it is empty"
        elif not np.isnan(numbers).any():
            table = np.zeros(len(texts))
            table[given] = numbers
            columns[name] = _standardized(table[code], given[code])
            if not given.all():
                columns[f"{name} (missing)"] = ~given[code]
        elif 1 < given.sum() == given[code].sum():
            reason = "all its values differ"
        elif given.sum() > MOST_VALUES:
            reason = f"it has {given.sum()} different values and {MOST_VALUES} are the most"
        else:
            columns |= {f"{name}={texts[i]}": code == i for i in np.flatnonzero(given)}
        if reason and notes is not None:
            notes.append(f"annotators: column {quote(name)} is no feature, since {reason}")
    size = len(next(iter(profiles.values()), ()))
    encoded = np.zeros((size, len(columns)), dtype=np.float32)
    for place, column in enumerate(columns.values()):
        encoded[:, place] = column
    return torch.from_numpy(encoded), list(columns)


def _number(text: str) -> float:
    """The number a text is, NaN where it is none or beyond all bounds.

    >>> _number("-1.5e3"), _number("nan"), _number("1_000"), _number("1e999")
    (-1500.0, nan, nan, nan)
    """
    value = float(text) if NUMBER.fullmatch(text) else np.nan
    return value if np.isfinite(value) else np.nan


def _standardized(values: np.ndarray, given: np.ndarray) -> np.ndarray:
    """``values (R,)`` at mean 0 and deviation 1 over those ``given (R,)``, 0 elsewhere; a constant is only centred."""
    scaled = values / (np.abs(values).max() or 1.0)  # or the square of a great number is beyond float64
    centred = scaled - scaled[given].mean()
    deviation = np.sqrt(np.square(centred[given]).mean())
    return np.where(given, centred / (deviation if deviation > 1e-12 else 1.0), 0.0)


@dataclass(frozen=True)
class _Values:
    """Class names or indices as they were written, and how to complain about one of them."""

    kind: str
    text: pa.Array
    error: Callable[[int, str], UserError]

    @property
    def vocabulary(self) -> list[str]:
        return [value for value in pc.unique(self.text).to_pylist() if value]


def _check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{option}: {quote(value)} is none of {', '.join(allowed)}; choose one of them")


def _empty(path: Path, *columns: str) -> Table:
    return Table(path, {column: pa.array([], TEXT) for column in columns})


def _stripped(table: Table, column: str) -> pa.Array:
    """A column without the space around its values; empty texts where the table lacks it."""
    return pc.utf8_trim_whitespace(table.columns.get(column, pa.array([""] * len(table), TEXT)))


def _position(values: pa.Array, among: pa.Array) -> np.ndarray:
    """Where each value stands in ``among``, -1 where it does not."""
    return pc.fill_null(pc.index_in(values, value_set=among), -1).to_numpy(zero_copy_only=False).astype(np.int64)


def _votes(said: Table, notes: list[str]) -> pa.RecordBatch:
    """The annotations with a label: ``item``, ``annotator``, ``label``, and the ``row`` each stood in."""
    if _is_anonymous(said):
        notes.append(f"{said.path.name}: no annotators, so all labels count as those of one, called {ANONYMOUS!r}")
        said = Table(said.path, {**said.columns, "annotator": pa.array([ANONYMOUS] * len(said), TEXT)})
    item, annotator, label = said.name("item", "task"), said.name("annotator", "worker"), said.name("label")
    columns = {"item": said.columns[item], "annotator": said.columns[annotator], "label": _stripped(said, label)}
    votes = pa.record_batch({"row": pa.array(np.arange(len(said))), **columns})
    labelled = np.asarray(pc.not_equal(votes["label"], ""))
    votes = _keep(votes, labelled, f"{said.path.name}: dropped {{}} with an empty label", notes)
    for name, ids in ((item, votes["item"]), (annotator, votes["annotator"])):
        if (empty := first(pc.equal(ids, ""))) is not None:
            raise said.error(votes["row"][empty].as_py(), f"the {name} id is empty; give it one, or remove the row")
    return votes


def _is_anonymous(said: Table) -> bool:
    """Whether there is nothing but items and labels; any other column may be the annotators' under another name."""
    return set(said.columns) in ({"item", "label"}, {"task", "label"})


def _keep(votes: pa.RecordBatch, mask: np.ndarray, note: str, notes: list[str]) -> pa.RecordBatch:
    """The annotations of the mask, and a note of how many went; an error where none is left."""
    if mask.all():
        return votes
    dropped = int(len(mask) - mask.sum())
    notes.append(note.format(f"{dropped} of {len(mask)} annotations"))
    if dropped == len(mask):
        raise UserError(f"{notes[-1]}, so that none is left; check that the columns hold what their names say")
    return votes.filter(pa.array(mask))


def _of_known_items(
    votes: pa.RecordBatch, items: pa.Array, said: Table, policy: UnknownItems, notes: list[str]
) -> pa.RecordBatch:
    known = _position(votes["item"], items) >= 0
    if policy == "error" and (unknown := first(~known)) is not None:
        message = f"item {quote(votes['item'][unknown])} is not in the items table"
        raise said.error(votes["row"][unknown].as_py(), f"{message}; add it there, or set --data.unknown_items=drop")
    return _keep(votes, known, f"{said.path.name}: dropped {{}} of items that are not in the items table", notes)


def _without_repeats(votes: pa.RecordBatch, said: Table, policy: Duplicates, notes: list[str]) -> pa.RecordBatch:
    item, annotator = (votes[column].dictionary_encode().indices.to_numpy() for column in ("item", "annotator"))
    pair = item.astype(np.int64) * len(votes) + annotator  # (A,)
    once = _is_first(pair[::-1])[::-1] if policy == "last" else _is_first(pair)
    again = first(~once)
    if again is None:
        return votes
    if policy == "error":
        message = f"annotator {quote(votes['annotator'][again])} labelled item {quote(votes['item'][again])} before"
        raise said.error(
            votes["row"][again].as_py(), f"{message}; remove one, or set --data.duplicates=keep, first or last"
        )
    if policy == "keep":
        notes.append(f"{said.path.name}: {(~once).sum()} repeated (item, annotator) pairs, each counted as a vote")
        return votes
    return _keep(votes, once, f"{said.path.name}: dropped {{}}, repeated pairs of which the {policy} counts", notes)


def _is_first(values: np.ndarray) -> np.ndarray:
    """Whether each value stands for the first time.

    >>> _is_first(np.array([5, 7, 5])).tolist()
    [True, True, False]
    """
    mask = np.zeros(len(values), dtype=bool)
    mask[np.unique(values, return_index=True)[1]] = True
    return mask


def _given_classes(given: object, source: str) -> list[str]:
    """Class names as the user lists them; numbers become text."""
    if not isinstance(given, list) or not all(type(name) in (str, int, float) for name in given):
        raise UserError(f'{source}: classes must be a list of names, such as ["cat", "dog"]; found {quote(given)}')
    names = [str(name).strip() for name in given]
    if "" in names:
        raise UserError(f"{source}: a name in classes is empty; name every class")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{source}: classes names {quote(twice)} twice; name each class once")
    if len(names) < 2:
        raise UserError(f"{source}: classes has {len(names)} name(s) where at least two are needed; list every class")
    return names


def _found_classes(folder: Path, *columns: _Values) -> list[str]:
    """Every class that is used, in order of number or else of text."""
    words = [column for column in columns if not all(map(_is_whole, column.vocabulary))]
    numbers = [column for column in columns if column.vocabulary and column not in words]
    if words and numbers:
        mixed = f"the {numbers[0].kind} values are numbers, the {words[0].kind} values names"
        raise UserError(f"{folder}: {mixed}; list the classes in order in meta.json")
    found = {_plain(value) if numbers else value for column in columns for value in column.vocabulary}
    if len(found) == 1:
        raise UserError(f"{folder}: {quote(*found)} is the only class found; list every class in meta.json")
    return sorted(found, key=lambda name: (int(name) if numbers else 0, name))


def _is_whole(value: str) -> bool:
    return re.fullmatch(r"-?[0-9]+(\.0+)?", value) is not None


def _plain(value: str) -> str:
    """A whole number without the ``.0`` that it gains beside missing values.

    >>> _plain("3.0"), _plain("00053"), _plain("3.5")
    ('3', '00053', '3.5')
    """
    return value.partition(".")[0] if _is_whole(value) else value


def _meaning(vocabulary: list[str], classes: list[str]) -> dict[str, int]:
    """The class of each value: by name, or, where no value is a name, by index.

    >>> _meaning(["dog", "cow"], ["cat", "dog"]), _meaning(["0", "1.0", "2"], ["cat", "dog"])
    ({'dog': 1}, {'0': 0, '1.0': 1})
    """
    index = {name: i for i, name in enumerate(classes)}
    names = {value: index.get(value, index.get(_plain(value))) for value in vocabulary}
    by_name = {value: code for value, code in names.items() if code is not None}
    return by_name or {v: int(_plain(v)) for v in vocabulary if _is_whole(v) and 0 <= int(_plain(v)) < len(classes)}


def _codes(values: _Values, classes: list[str]) -> np.ndarray:
    """The class index of each value, -1 where it is empty."""
    meaning = {"": -1} | _meaning(values.vocabulary, classes)
    codes = _translate(values.text, meaning)
    if (unknown := first(codes == UNKNOWN)) is not None:
        value = values.text[unknown].as_py()
        near = get_close_matches(value, classes, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "correct it, or list every class in meta.json"
        choice = f"class ({shorten(', '.join(classes))}) or index of one (0 to {len(classes) - 1})"
        raise values.error(unknown, f"{values.kind} {quote(value)} is no {choice}; {remedy}")
    return codes


def _translate(values: pa.Array, meaning: dict[str, int]) -> np.ndarray:
    coded = values.dictionary_encode()
    table = np.array([meaning.get(value, UNKNOWN) for value in coded.dictionary.to_pylist()], dtype=np.int64)
    return table[coded.indices.to_numpy()]


def _splits(about: Table) -> np.ndarray:
    if "split" not in about.columns:
        return np.zeros(len(about), dtype=np.int64)
    text = _stripped(about, "split")
    codes = _translate(pc.utf8_lower(text), SPLIT_CODES)
    if (unknown := first(codes == UNKNOWN)) is not None:
        allowed = "train, valid (or val, dev, validation), test"
        raise about.error(unknown, f"split {quote(text[unknown])} is none of {allowed}; rename it, or remove the row")
    return codes


def _share_columns(about: Table) -> list[str]:
    return [name for name in about.columns if name.startswith(SHARES) and name not in SHARES]


def _share_classes(about: Table) -> _Values:
    """The classes that have a ``votes_`` or ``soft_`` column."""
    columns = _share_columns(about)
    if len({name.partition("_")[0] for name in columns}) > 1:
        raise UserError(f"{about.path}, row 1: both votes_ and soft_ columns; keep one kind")

    def error(i: int, message: str) -> UserError:
        return UserError(f"{about.path}, row 1: column {columns[i]!r}: {message}")

    return _Values("class", pa.array([name.partition("_")[2] for name in columns], TEXT), error)


def _soft(about: Table, shares: _Values, classes: list[str]) -> Tensor | None:
    """The ``votes_`` or ``soft_`` columns as distributions ``(items, K)``."""
    if not len(shares.text):
        return None
    codes = _codes(shares, classes)
    soft = np.zeros((len(about), len(classes)))
    for i, (code, column) in enumerate(zip(codes, _share_columns(about), strict=True)):
        if code in codes[:i]:
            raise shares.error(i, "its class has a column already; keep one")
        soft[:, code] = _numbers(about, column)
    total = soft.sum(1, keepdims=True)  # (items, 1)
    return torch.from_numpy(soft / np.where(total > 0, total, 1)).float()


def _numbers(about: Table, column: str) -> np.ndarray:
    """A column of nonnegative numbers; an empty value is zero."""
    text = _stripped(about, column)
    text = pc.if_else(pc.equal(text, ""), "0", text)
    if (wrong := first(pc.invert(pc.match_substring_regex(text, NONNEGATIVE)))) is not None:
        message = f"{column} {quote(text[wrong])} is not a number from 0 up"
        raise about.error(wrong, f"{message}; correct it, or leave it empty")
    return pc.cast(text, pa.float64()).to_numpy(zero_copy_only=False)


def _other_columns(about: Table) -> list[str]:
    known = {about.name("item", "task"), "split", "gold", *_share_columns(about)}
    return [name for name in about.columns if name not in known]


def _profiles(who: Table, annotators: pa.Array, notes: list[str]) -> dict[str, list[str]]:
    """The columns of the annotators table in the order of ``annotators``; an empty text where one has no row."""
    row = pc.index_in(annotators, value_set=who.ids("annotator", "worker"))
    if row.null_count:
        notes.append(f"{who.path.name}: {row.null_count} of {len(annotators)} annotators have no row, so no features")
    others = [name for name in who.columns if name != who.name("annotator", "worker")]
    return {name: pc.fill_null(who.columns[name].take(row), "").to_pylist() for name in others}
