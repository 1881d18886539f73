"""Run folders: everything a run leaves behind, written beside and renamed, so that a crash spoils nothing."""

import csv
import io
import json
import os
import platform
import re
import resource
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from lfc.report import Findings, Report


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, whole, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_table(path: Path, rows: Iterable[list[Any]]) -> None:
    """Write rows, the header first, as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, text.getvalue())


def new_folder(root: Path, experiment: str, name: str) -> Path:
    """``root/experiment/name``, or the first of ``name-2``, ``name-3``, ... that is not there yet; it is made."""
    number = 1
    while True:
        folder = root / _safe(experiment) / (_safe(name) if number == 1 else f"{_safe(name)}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def last_folder(root: Path, experiment: str, name: str) -> Path | None:
    """The newest of the folders of one name that holds a checkpoint to go on from."""
    pattern = re.compile(re.escape(_safe(name)) + r"(?:-(\d+))?")
    found = [
        (int(match[1] or 1), folder)
        for folder in (root / _safe(experiment)).glob("*")
        if (match := pattern.fullmatch(folder.name)) and (folder / "checkpoints" / "last.ckpt").is_file()
    ]
    return max(found)[1] if found else None


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", name).strip(".") or "run"


class History(Logger):
    """``history.csv``: a line whenever something is logged, on disk at once; the record that no crash takes away.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "history.csv"
        self.rows: list[dict[str, Any]] = []
        self.columns = ["epoch", "step"]
        self._file: Any = None
        self._last = 0  # where the last line begins

    @property
    def name(self) -> str:
        """Of the logger."""
        return "history"

    @property
    def version(self) -> str:
        """There is but one."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        """Nothing but the file."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The config is in ``config.yaml``."""

    @rank_zero_only
    def resume(self, epoch: int) -> None:
        """Go on after ``epoch`` epochs of an interrupted run: keep its lines, drop those that are made again."""
        if self.path.is_file() and not self.rows:
            text = self.path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a run killed while it wrote leaves part of a line
            rows = list(csv.DictReader(io.StringIO(whole)))
            self.rows = [
                {**row, "epoch": int(row["epoch"]), "step": int(row["step"])}
                for row in rows
                if int(row["epoch"]) < epoch
            ]
            self.columns += [key for row in self.rows for key in row if key not in self.columns]
            self.columns = list(dict.fromkeys(self.columns))
            self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a line, or complete the last one if it is of the same step; final tests are in ``metrics.json``."""
        scores = {key: value for key, value in metrics.items() if key.startswith(("train/", "val/", "lr"))}
        if not scores:
            return
        place = {"epoch": int(metrics["epoch"]), "step": step}
        if self.rows and all(self.rows[-1][key] == value for key, value in place.items()):
            self.rows[-1] |= scores
            again = True
        else:
            self.rows.append(place | scores)
            again = False
        new = [key for key in self.rows[-1] if key not in self.columns]
        self.columns += new
        if new or self._file is None:
            self._rewrite()
            return
        if again:
            self._file.seek(self._last)
            self._file.truncate()
        self._last = self._file.tell()
        self._file.write(self._line(self.rows[-1]))
        self._file.flush()

    def scores(self, epoch: int, prefix: str) -> dict[str, float]:
        """What was logged under ``prefix`` in one epoch."""
        rows = [row for row in self.rows if row["epoch"] == epoch]
        found = {key: value for row in rows for key, value in row.items() if key.startswith(prefix) and value != ""}
        return {key: float(value) for key, value in found.items()}

    def _line(self, row: Mapping[str, Any]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerow(row)
        return text.getvalue()

    def _rewrite(self) -> None:
        self.finalize("")
        lines = [self._line({name: name for name in self.columns}), *map(self._line, self.rows)]
        write_atomically(self.path, "".join(lines))
        self._file = open(self.path, "r+", newline="", encoding="utf-8")
        self._last = self._file.seek(0, os.SEEK_END) - len(lines[-1])

    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def write_report(folder: Path, report: Report) -> None:
    """What was inferred and, where there is a test split, ``predictions.csv``."""
    write_findings(folder, report)
    if len(report.predictions):
        write_table(folder / "predictions.csv", report.prediction_rows())


def write_findings(folder: Path, report: Findings) -> None:
    """``labels.csv``, ``annotators.csv`` and ``confusion.npz``."""
    write_table(folder / "labels.csv", report.label_rows())
    write_table(folder / "annotators.csv", report.annotator_rows())
    arrays = {
        "annotators": np.array(report.crowd.annotators, dtype=str),
        "classes": np.array(report.crowd.classes, dtype=str),
        "overall": report.overall(report.posterior).numpy(),
    }
    if "confusion" in report.known:
        arrays["confusion"] = report.known["confusion"].float().numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / "confusion.npz", buffer.getvalue())


def write_metrics(folder: Path, metrics: Mapping[str, Any]) -> None:
    """``metrics.json``: one flat object, scores under their names."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    write_atomically(folder / "metrics.json", json.dumps(plain, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    packages = ("lfc", "torch", "pytorch-lightning", "torchmetrics", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def peak_memory_mb() -> int:
    """The most memory this process has held so far, with that of the GPU where there is one."""
    gpu = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + gpu)
