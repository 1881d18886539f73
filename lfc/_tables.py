"""Files to tables of text: CSV, Parquet and JSON as people make them, and one clear line where they cannot be read."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import ArrayLike

from lfc.errors import UserError

TEXT = pa.large_string()
END = b"<end of table>"
"""Written below the last row of a CSV file: it comes back as a row of its own unless a quotation mark is left open."""


@dataclass(frozen=True)
class Table:
    """Columns of text, all of one length, that know where they came from."""

    path: Path
    columns: dict[str, pa.Array]
    """By name, stripped and in lower case; a class after ``votes_`` or ``soft_`` keeps its case."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def name(self, *names: str) -> str:
        """The first of ``names`` that is a column."""
        for name in names:
            if name in self.columns:
                return name
        found, wanted = ", ".join(self.columns), " or ".join(map(repr, names))
        remedy = "separate columns by commas" if re.search(r"[;\t|]", found) else f"name a column {names[0]!r}"
        raise UserError(f"{self.path}, row 1: no column {wanted} among: {shorten(found)}; {remedy}")

    def ids(self, *names: str) -> pa.Array:
        """The column of ids under one of ``names``: none may be empty, none may stand twice."""
        name = self.name(*names)
        ids = self.columns[name]
        if (empty := first(pc.equal(ids, ""))) is not None:
            raise self.error(empty, f"the {name} id is empty; give it one, or remove the row")
        if (again := first_repeat(ids)) is not None:
            raise self.error(again, f"{name} {quote(ids[again])} stands twice; keep one row for each {name}")
        return ids

    def error(self, index: int, message: str) -> UserError:
        """An error about the row ``index`` (from 0), told by its row in a spreadsheet, where the header is row 1."""
        return UserError(f"{self.path}, row {self._row(int(index))}: {message}")

    def _row(self, index: int) -> int:
        if self.path.suffix == ".csv":  # blank lines are skipped, and counted
            rows = (row for row, fields in enumerate(_records(_read_bytes(self.path).decode()), start=1) if fields)
            return next(islice(rows, index + 1, None), index + 2)
        return index + 2


def check_folder(folder: Path) -> None:
    """Raise an error unless this is a folder that can be read."""
    try:
        next(folder.iterdir(), None)
    except FileNotFoundError:
        raise UserError(f"{folder}: no such folder; give the path of a crowd folder") from None
    except NotADirectoryError:
        raise UserError(f"{folder}: a file, not a folder; give the folder that holds annotations and items") from None
    except OSError as error:
        raise _unreadable(folder, error) from None


def read_table(folder: Path, stem: str) -> Table | None:
    """``stem.csv`` or ``stem.parquet`` of a folder, every value as text and ``''`` where there is none.

    Returns:
        The table, or ``None`` where the folder has neither file.
    """
    paths = [path for suffix in (".csv", ".parquet") if (path := folder / f"{stem}{suffix}").exists()]
    if len(paths) == 2:
        raise UserError(f"{folder}: both {stem}.csv and {stem}.parquet are there; delete the one that is out of date")
    if not paths:
        return None
    return read_file(paths[0])


def read_file(path: Path) -> Table:
    """A ``.csv`` or ``.parquet`` file, every value as text and ``''`` where there is none."""
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path}: neither .csv nor .parquet; save the table as one of them")
    header, columns = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    names = [_name(text) for text in header]
    for name in names:
        if name and names.count(name) > 1:
            raise UserError(f"{path}, row 1: column {name!r} stands twice; rename or remove one")
    if not columns or not len(columns[0]):
        raise UserError(f"{path}: no rows below the header; fill it, or remove the file")
    return Table(path, {name: column for name, column in zip(names, columns, strict=True) if name})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where the file is missing."""
    if not path.exists():
        return {}
    try:
        found = json.loads(_read_bytes(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, row {error.lineno}: not JSON ({error.msg}); correct it, or remove the file") from None
    if not isinstance(found, dict):
        raise UserError(f'{path}, row 1: holds a {type(found).__name__}; write an object, such as {{"classes": [...]}}')
    return found


def first(mask: ArrayLike) -> int | None:
    """Index of the first true value, if any.

    >>> first([False, True, True])
    1
    """
    where = np.flatnonzero(np.asarray(mask))
    return int(where[0]) if len(where) else None


def first_repeat(values: pa.Array) -> int | None:
    """Index of the first value that stood before, if any.

    >>> first_repeat(pa.array(["a", "b", "a", "b"]))
    2
    """
    codes = values.dictionary_encode().indices.to_numpy()  # numbered as they first appear: a new value is a new maximum
    again = first(codes[1:] <= np.maximum.accumulate(codes)[:-1])
    return None if again is None else again + 1


def shorten(text: str, width: int = 80) -> str:
    """The text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def quote(value: object) -> str:
    """A value as it is shown in a message."""
    return repr(shorten(str(value)) if len(str(value)) > 80 else str(value))


def _name(text: str) -> str:
    """The name under which a column is found.

    >>> _name(" Item "), _name("Votes_Cat")
    ('item', 'votes_Cat')
    """
    text = text.strip()
    prefix, mark, rest = text.partition("_")
    return f"{prefix.lower()}_{rest}" if mark and prefix.lower() in ("votes", "soft") else text.lower()


def _read_csv(path: Path) -> tuple[list[str], list[pa.Array]]:
    data = _read_bytes(path)
    text = data.decode()
    header = next((fields for fields in _records(text) if fields), [])
    if not header:
        raise UserError(f"{path}: the file is empty; fill it, or remove it")
    names = [str(column) for column in range(len(header))]
    data = b"\n".join((data, b",".join([END] * len(header))))
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            pyarrow.csv.ReadOptions(column_names=names, block_size=min(len(data) + 1, 2**31 - 1)),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, TEXT), strings_can_be_null=False),
        )
    except pa.ArrowInvalid as error:
        raise _ragged(path, text, len(header)) or _unreadable(path, error) from None
    columns = [column.combine_chunks() for column in table.columns]
    if columns[0][-1].as_py() != END.decode():
        row = sum(1 for _ in _records(text))
        raise UserError(f"{path}, row {row}: a quotation mark is opened and never closed; close it")
    return header, [column[1:-1] for column in columns]


def _ragged(path: Path, text: str, width: int) -> UserError | None:
    for row, fields in enumerate(_records(text), start=1):
        if fields and len(fields) != width:
            found = f"{len(fields)} {'field' if len(fields) == 1 else 'fields'} where the header has {width}"
            return UserError(f"{path}, row {row}: {found}; put a text with commas in quotation marks, and close them")
    return None


def _records(text: str) -> Iterator[list[str]]:
    """Rows as a spreadsheet counts them; a blank line is an empty one."""
    try:
        yield from csv.reader(io.StringIO(text, newline=""))
    except csv.Error:  # a field beyond the module's limit: rows cannot be told any further
        return


def _read_bytes(path: Path) -> bytes:
    """The content of a text file as UTF-8, without byte order mark."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeError as error:
            raise _unreadable(path, error) from None
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:
        row = _row_at(data, data.index(b"\0"))
        raise UserError(f"{path}, row {row}: holds NUL bytes, so it is not text; save it as text in UTF-8")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise UserError(f"{path}, row {_row_at(data, error.start)}: {found}; save the file in UTF-8") from None
    return data


def _row_at(data: bytes, position: int) -> int:
    before = data[:position].replace(b"\0", b"?") + b"?"
    return sum(1 for _ in _records(before.decode(errors="replace")))


def _read_parquet(path: Path) -> tuple[list[str], list[pa.Array]]:
    try:
        table = pyarrow.parquet.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None
    return table.column_names, [_as_text(column) for column in table.columns]


def _as_text(column: pa.ChunkedArray) -> pa.Array:
    """A column as text; what is no single value, such as a list of tokens, as JSON."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        return pc.fill_null(pc.cast(column, TEXT), "").combine_chunks()
    except pa.ArrowException:
        return pa.array([json.dumps(value, default=str) for value in column.to_pylist()], TEXT)


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or shorten(str(error), 160)
    return UserError(f"{path}: cannot be read ({reason}); check its permissions, or save it anew")
