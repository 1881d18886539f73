"""Speed of the heads, as ratios within one run, and what the fast update costs in accuracy.

    python benchmarks/heads.py                      all four tables, about ten minutes on two cores
    python benchmarks/heads.py --only crowd fit     some of them: crowd, peer, fit, update

- ``crowd``: the whole step (forward, backward, optimiser, zero_grad; 512-128-8, 64 items of 5 labels) in crowds of
  1,000 to 100,000 annotators. A step should cost at most 1.5 times as much in the largest as in the smallest.
- ``peer``: the same step beside crowd-kit's ``CrowdLayer`` at 100,000 annotators, which should take at least 20 times
  as long. Needs ``pip install 'crowd-kit[learning]'``; left out without it.
- ``fit``: a step of ``lfc fit``, with progress bar and logging, beside a bare loop over the same batches, network, head
  and optimiser, which it should exceed by at most 1.8.
- ``update``: test accuracy and training loss with ``annotator_update`` ``dense`` and ``rows``, which should agree.

Seconds depend on the machine and on who else uses it, so nothing here is a limit in seconds: contenders take turns, a
few steps each, a ratio is one of medians, and beside the wall clock stands the processor's time, which other processes
disturb less. crowd-kit's step is all memory and arithmetic and so gains most by a second thread.
"""

import argparse
import copy
import itertools
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import console, data_folder, interval, parallel, plus_minus, quiet, show, test, train
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from lfc.backbones import MLP
from lfc.batch import CrowdBatch
from lfc.datamodules import FeatureDataModule, SimulatedDataModule
from lfc.heads import CrowdLayer, SpeeLFC
from lfc.module import CrowdClassifier

FEATURES, HIDDEN, CLASSES, BATCH, LABELS = 512, 128, 8, 64, 5
CROWDS = (1_000, 10_000, 100_000)

Step = Callable[[], None]


# steps


def batches(num_annotators: int, count: int = 500) -> list[CrowdBatch]:
    """Random batches; every annotator is as likely as another, so that hardly one comes twice in a batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, BATCH, FEATURES, generator=generator)
    row = torch.arange(BATCH).repeat_interleave(LABELS)

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, row.shape, generator=generator)

    items = torch.arange(BATCH)
    return [CrowdBatch(inputs[i % 20], items, row, draw(num_annotators), draw(CLASSES)) for i in range(count)]


def our_step(head: type, num_annotators: int) -> Step:
    """A step with the optimiser that ``lfc fit`` would build."""
    sizes = {"num_classes": CLASSES, "num_annotators": num_annotators, "num_items": 10_000}
    model = CrowdClassifier(MLP(FEATURES, [HIDDEN], dropout=0.5), head(in_features=HIDDEN, **sizes)).train()
    optimizer = model.configure_optimizers()
    stream = itertools.cycle(batches(num_annotators))

    def step() -> None:
        batch = next(stream)
        model.head.loss(model.backbone(batch.inputs), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def crowdkit_step(num_annotators: int, fused: bool | None) -> Step:
    """A step of crowd-kit's layer as its documentation has it: a row an annotation, its worker, cross-entropy, Adam."""
    from crowdkit.learning import CrowdLayer as TheirLayer

    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, CLASSES))
    layer = TheirLayer(CLASSES, num_annotators, conn_type="mw")
    optimizer = torch.optim.Adam([*body.parameters(), *layer.parameters()], fused=fused)
    stream = itertools.cycle(batches(num_annotators))

    def step() -> None:
        batch = next(stream)
        said = layer(body(batch.inputs).softmax(-1)[batch.row], batch.annotator)
        nn.functional.cross_entropy(said, batch.label, reduction="sum").div(len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def race(steps: dict[str, Step], rounds: int, block: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds of each step, by the wall clock and of the processor; in turn each makes ``block`` steps."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            for i in range(block + 2):
                w, c = time.perf_counter(), time.process_time()
                step()
                if number and i >= 2:  # the first round, and the first two steps of a turn, warm up
                    wall[name].append(time.perf_counter() - w)
                    cpu[name].append(time.process_time() - c)
    return {name: (1e3 * statistics.median(wall[name]), 1e3 * statistics.median(cpu[name])) for name in steps}


def ratios(times: tuple[float, float], base: tuple[float, float], threads: int) -> list[str]:
    """Of wall clocks, and of the processor's times, which mean nothing where threads wait for each other busily."""
    wall, cpu = (now / then for now, then in zip(times, base))
    return [f"{wall:.2f}", f"{cpu:.2f}" if threads == 1 else ""]


def crowd(rounds: int, block: int, thread_counts: list[int]) -> None:
    """Does a step cost more in a larger crowd?"""
    rows = []
    for threads, head in itertools.product(thread_counts, (SpeeLFC, CrowdLayer)):
        torch.set_num_threads(threads)
        times = race({str(size): our_step(head, size) for size in CROWDS}, rounds, block)
        for size in CROWDS:
            now, first = times[str(size)], times[str(CROWDS[0])]
            met = "" if size != CROWDS[-1] else "yes" if now[0] / first[0] <= 1.5 else "no"
            rows.append([threads, head.__name__, f"{size:,}", f"{now[0]:.2f}", *ratios(now, first, threads), met])
    columns = ["threads", "head", "annotators", "ms", "ratio", "ratio of cpu", "at most 1.5"]
    show("heads-crowd", "A step in crowds of several sizes, relative to 1,000 annotators", columns, rows)


def peer(rounds: int, block: int, thread_counts: list[int]) -> None:
    """How much longer does crowd-kit take?"""
    try:
        import crowdkit.learning  # noqa: F401
    except ImportError:
        console.print("crowd-kit is not installed, so there is no comparison: pip install 'crowd-kit[learning]'")
        return
    size, rows = CROWDS[-1], []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        steps = {
            "lfc CrowdLayer": our_step(CrowdLayer, size),
            "lfc SpeeLFC": our_step(SpeeLFC, size),
            "crowd-kit CrowdLayer, Adam": crowdkit_step(size, fused=None),
            "crowd-kit CrowdLayer, fused Adam": crowdkit_step(size, fused=True),
        }
        times = race(steps, rounds, block)
        ours = times["lfc CrowdLayer"]
        for name, now in times.items():
            met = "" if not name.endswith("r, Adam") else "yes" if now[0] / ours[0] >= 20 else "no"
            rows.append([threads, name, f"{now[0]:.2f}", *ratios(now, ours, threads), met])
    columns = ["threads", "step", "ms", "ratio", "ratio of cpu", "at least 20"]
    show("heads-peer", f"A step at {size:,} annotators, relative to lfc's CrowdLayer", columns, rows)


# lfc fit


class Versus(Callback):
    """Between any two epochs of ``lfc fit``, an epoch of a bare loop on a copy of the model; both are timed.

    Args:
        out: File for the times, milliseconds a step.
    """

    def __init__(self, out: str) -> None:
        self.out = out
        self.times: dict[str, list[tuple[float, float]]] = {"fit": [], "epoch": [], "bare": []}
        self.began: tuple[float, float] | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.began is not None:
            self._note("epoch", trainer)
        if trainer.current_epoch == 1:
            self.backbone, self.head = copy.deepcopy(pl_module.backbone), copy.deepcopy(pl_module.head)
            parameters = [*self.backbone.parameters(), *self.head.parameters()]
            self.optimizer = torch.optim.Adam(parameters, fused=True)
        if trainer.current_epoch > 1:
            self._bare_epoch(trainer)
        self.began = self._now()

    def _bare_epoch(self, trainer: Trainer) -> None:
        dataset, batch_size = trainer.datamodule.datasets["train"], trainer.datamodule.batch_size
        self.began = self._now()
        for rows in torch.randperm(len(dataset)).split(batch_size):
            batch = dataset[rows]
            self.head.loss(self.backbone(batch.inputs), batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._note("bare", trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_last_batch:
            self._note("fit", trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(self.out).write_text(json.dumps({name: times[2:] for name, times in self.times.items()}))

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _note(self, name: str, trainer: Trainer) -> None:
        taken = [1e3 * (now - began) / trainer.num_training_batches for now, began in zip(self._now(), self.began)]
        self.times[name].append((taken[0], taken[1]))


def write_crowd_folder(folder: Path, items: int = 6400, annotators: int = 59) -> None:
    """Random features and labels, without gold, so that a tenth of the annotations is held out to validate on."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    np.save(folder / "features.npy", rng.standard_normal((items, FEATURES), dtype=np.float32))
    (folder / "items.csv").write_text("item,split\n" + "".join(f"i{i},train\n" for i in range(items)))
    lines = (
        f"i{i},a{r},{rng.integers(CLASSES)}\n" for i in range(items) for r in rng.choice(annotators, LABELS, False)
    )
    (folder / "annotations.csv").write_text("item,annotator,label\n" + "".join(lines))


def run_in_terminal(command: list[str], env: dict[str, str]) -> None:
    """Run a command on a terminal of its own, as a user does, so that its progress bar is really drawn."""
    ours, its = pty.openpty()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=env, close_fds=True)
    os.close(its)
    said = bytearray()

    def drain() -> None:
        try:
            while chunk := os.read(ours, 65536):
                said.extend(chunk)
        except OSError:  # the terminal closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    status = process.wait()
    reader.join()
    os.close(ours)
    if status:
        raise SystemExit(f"{' '.join(command)}\n{said.decode(errors='replace')[-3000:]}")


def fit(epochs: int, thread_counts: list[int]) -> None:
    """How much does everything around a step cost?"""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_crowd_folder(root / "crowd")
        for threads, head, wandb in itertools.product(thread_counts, ("SpeeLFC", "CrowdLayer"), ("off", "offline")):
            out = root / "times.json"
            command = [sys.executable, "-m", "lfc.cli", "fit", "--config=configs/labelme.yaml"]
            command += [f"--data.path={root / 'crowd'}", f"--model.head={head}"]
            command += [f"--run.root={root}", f"--run.wandb={wandb}", f"--trainer.max_epochs={epochs}"]
            command += ["--trainer.accelerator=cpu", "--trainer.callbacks+=heads.Versus"]
            command += [f"--trainer.callbacks.out={out}"]
            paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            run_in_terminal(command, {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)})
            times = json.loads(out.read_text())
            step, epoch, bare = (
                [statistics.median(column) for column in zip(*times[name])] for name in ("fit", "epoch", "bare")
            )
            numbers = [f"{bare[0]:.2f}", f"{step[0]:.2f}", *ratios(step, bare, threads), f"{epoch[0] / bare[0]:.2f}"]
            rows.append([threads, head, wandb, *numbers, "yes" if step[0] / bare[0] <= 1.8 else "no"])
    columns = [
        "threads",
        "head",
        "W&B",
        "bare ms",
        "lfc fit ms",
        "ratio",
        "ratio of cpu",
        "with validation and checkpoint",
    ]
    title = "A step of lfc fit, bar and logs on, relative to a bare loop; and with all that ends an epoch"
    show("heads-fit", title, [*columns, "at most 1.8"], rows)


# rows or dense


def update_run(source: str, update: str, seed: int, epochs: int) -> tuple[float, float]:
    """Test accuracy and training loss of SpeeLFC."""
    if source.startswith("simulated"):
        data: Any = SimulatedDataModule(source=source.split()[1], num_annotators=2000, seed=seed)
    else:
        data = FeatureDataModule(source)
    trainer, model = train(data, SpeeLFC, epochs=epochs, seed=seed, validate=False, annotator_update=update)
    loss = trainer.callback_metrics["train/loss"].item()
    return test(trainer, model, data)["test/acc"], loss


def update(seeds: int, epochs: int, folder: Path | None, workers: int) -> None:
    """Does updating by row cost accuracy?"""
    sources = ["simulated gaussians", "simulated digits"] + ([str(folder)] if folder else [])
    jobs = [(source, how, seed, epochs) for source in sources for how in ("dense", "rows") for seed in range(seeds)]
    results = dict(zip(jobs, parallel(update_run, jobs, workers, "dense and rows")))
    rows = []
    for source in sources:
        both = [[results[source, how, seed, epochs] for seed in range(seeds)] for how in ("dense", "rows")]
        accuracy, loss = ([[run[i] for run in runs] for runs in both] for i in (0, 1))
        differences = [b - a for a, b in zip(*accuracy)]
        mean, half = interval(differences)
        name = f"{source}, 2,000 annotators" if source.startswith("simulated") else Path(source).name
        numbers = [plus_minus(x, 100) for x in accuracy] + [f"{100 * mean:+.2f} ± {100 * half:.2f}"]
        rows.append([name, *numbers, *(plus_minus(x, digits=4) for x in loss)])
    columns = ["data", "dense, test acc %", "rows, test acc %", "difference", "dense, train loss", "rows, train loss"]
    title = f"SpeeLFC with annotators updated densely and by row; {seeds} seeds, {epochs} epochs, mean ± 95 % interval"
    show("heads-update", title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("crowd", "peer", "fit", "update")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables, help="which tables")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender in crowd and peer")
    parser.add_argument("--block", type=int, default=50, help="steps a turn; the fewer, the colder the caches")
    parser.add_argument("--fit-epochs", type=int, default=14, help="epochs of lfc fit, of 100 steps each")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of update")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of update")
    threads = sorted({1, torch.get_num_threads()})
    parser.add_argument("--threads", type=int, nargs="+", default=threads, help="threads of torch: one, then all")
    parser.add_argument("--workers", type=int, default=2, help="processes of update")
    parser.add_argument("--data", help="folder that holds the crowd folder labelme; by default $LFC_DATA")
    options = parser.parse_args()
    quiet()
    if "crowd" in options.only:
        crowd(options.rounds, options.block, options.threads)
    if "peer" in options.only:
        peer(options.rounds, options.block, options.threads)
    if "fit" in options.only:
        fit(options.fit_epochs, options.threads)
    if "update" in options.only:
        update(options.seeds, options.epochs, data_folder(options.data, "labelme"), options.workers)


if __name__ == "__main__":
    main()
