"""Choosing the best epoch without gold: by the likelihood of held-out annotations, beside the choice by gold.

    python benchmarks/selection.py                      five seeds: some ten minutes on two cores
    python benchmarks/selection.py --only labelme
    python benchmarks/selection.py --holdout=0.2

A tenth of the training annotations is held out. One training notes after every epoch ``val/acc`` (needs gold on the
validation split), ``val/annotation_nll`` (needs none) and the accuracy on the test split; then each way of choosing
picks its epoch. The choice without gold should cost at most 1 point of test accuracy. On simulated data each seed has a
crowd and items of its own. labelme is a crowd folder in --data (by default $LFC_DATA, else ../shared/data).
"""

import argparse
from typing import Any

import torch
from common import data_folder, interval, parallel, plus_minus, show, train
from pytorch_lightning import Callback, LightningModule, Trainer

from lfc import heads
from lfc.datamodules import FeatureDataModule, SimulatedDataModule

HEADS = ("SpeeLFC", "CrowdLayer", "MajorityVote")
SIMULATED = {  # as configs/data has them
    "gaussians": {"num_annotators": 100},
    "digits": {"num_annotators": 100, "labels_per_item": 3},
}


class EveryEpoch(Callback):
    """Notes ``val/acc``, ``val/annotation_nll`` and the accuracy on the test split after every epoch."""

    def __init__(self) -> None:
        self.epochs: list[tuple[float, float, float]] = []

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        right, total = 0, 0
        for batch in trainer.datamodule.loader("test"):  # the model is still in evaluation mode
            right += int((pl_module(batch.inputs).argmax(-1) == batch.gold).sum())
            total += len(batch)
        scores = trainer.callback_metrics
        self.epochs.append((scores["val/acc"].item(), scores["val/annotation_nll"].item(), right / total))


def latest(scores: torch.Tensor) -> int:
    """The last of the best epochs."""
    return int((scores == scores.max()).nonzero().max())


def run(
    name: str, path: str | None, head: str, seed: int, epochs: int, holdout: float, annotator_lr: float | None
) -> dict[str, Any]:
    """Test accuracy at the epoch that each way chooses, and which epochs these are."""
    if path is None:
        data: Any = SimulatedDataModule(source=name, seed=seed, holdout=holdout, **SIMULATED[name])
    else:
        data = FeatureDataModule(path, holdout=holdout, split_seed=seed)
    every = EveryEpoch()
    train(data, getattr(heads, head), epochs=epochs, seed=seed, callbacks=[every], annotator_lr=annotator_lr)
    accuracy, nll, tested = torch.tensor(every.epochs, dtype=torch.float64).T
    # of equals the latest, as the checkpoint has it
    chosen = {"gold": latest(accuracy), "held out": latest(-nll), "last": len(tested) - 1}
    return {"epoch": chosen, "test": {way: tested[epoch].item() for way, epoch in chosen.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("labelme", *SIMULATED)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which crowds")
    parser.add_argument("--data", help="folder that holds the crowd folder labelme")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--holdout", type=float, default=0.1, help="share of the annotations held out")
    parser.add_argument("--annotator-lr", type=float, help="rate of the annotators' parameters; by default that of all")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes, of a thread each")
    options = parser.parse_args()

    crowds: dict[str, str | None] = {name: None for name in options.only if name in SIMULATED}
    if "labelme" in options.only and (folder := data_folder(options.data, "labelme")):
        crowds = {"labelme": str(folder), **crowds}
    if not crowds:
        return
    jobs = [
        (name, path, head, seed, options.epochs, options.holdout, options.annotator_lr)
        for name, path in crowds.items()
        for head in HEADS
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    results = dict(zip(jobs, parallel(run, jobs, options.workers, "selection")))
    rows = []
    for name in crowds:
        for head in HEADS:
            runs = [result for job, result in results.items() if (job[0], job[2]) == (name, head)]
            tests = {way: [run["test"][way] for run in runs] for way in ("gold", "held out", "last")}
            difference = [b - a for a, b in zip(tests["gold"], tests["held out"])]
            chosen = [sorted(run["epoch"][way] for run in runs) for way in ("gold", "held out")]
            row = [name, head, *(plus_minus(values, 100) for values in tests.values())]
            row += [plus_minus(difference, 100, digits=2, sign="+")]
            row += [plus_minus([b - a for a, b in zip(tests["gold"], tests["last"])], 100, digits=2, sign="+")]
            row += [" ".join(map(str, epochs)) for epochs in chosen]
            rows.append([*row, "yes" if interval(difference)[0] >= -0.01 else "no"])
    columns = ["data", "head", "test acc by gold", "by held-out annotations", "last epoch", "held-out less gold"]
    columns += ["last less gold", "epochs by gold", "epochs by held-out", "within 1 point"]
    title = (
        f"Test accuracy of the epoch chosen, %: {options.seeds} seeds, {options.epochs} epochs, "
        f"{options.holdout:.0%} of the annotations held out, "
        f"annotators' rate {options.annotator_lr or 'that of all'}, mean ± 95 % interval"
    )
    show("selection", title, columns, rows)


if __name__ == "__main__":
    main()
