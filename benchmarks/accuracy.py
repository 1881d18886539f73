"""Accuracy of the heads on two real crowds, beside what was published.

    python benchmarks/accuracy.py                                both, five seeds: half an hour on two cores
    python benchmarks/accuracy.py --only labelme                 two minutes
    python benchmarks/accuracy.py --data=DIR --seeds=3

DIR (by default $LFC_DATA, else ../shared/data) holds the crowd folders ``labelme`` and ``music_genre``.

- ``labelme``: VGG16 features, 512-128-8, dropout .5, Adam, 50 epochs. One training gives both the epoch with the best
  ``val/acc``, as ``lfc fit`` chooses it, and the last one, as where nothing is chosen by gold (``--run.monitor=none``).
  Published: CMM's Table 3, and for the crowd layer PyLearningCrowds' notebook and the authors' own.
- ``music_genre``: 124 audio features and a linear model, all annotations trained on, the last epoch; raw features, as
  the SpeeLFC paper has them (its Table 2), and standardised ones. Raw features differ by orders of magnitude, which is
  why they take thousands of epochs. ``--epochs`` sets another number for all.

Means over seeds with 95 % t-intervals, which know of the seed alone: 300 test items add a standard error of 2.7 points
on music_genre, 1188 one of 1.1 on labelme.
"""

import argparse
from pathlib import Path
from typing import Any

from common import BestEpoch, data_folder, parallel, plus_minus, show, test, train

from lfc import heads
from lfc.datamodules import FeatureDataModule

LABELME = {  # published test accuracy, I-JS, G-JS
    ("MajorityVote", "soft"): ("81.7", ".216", ".024"),
    ("MajorityVote", "hard"): ("80.0", ".225", ".035"),
    ("CrowdLayer", "MW"): ("83-84", "", ""),
    ("SpeeLFC", ""): ("", "", ""),
    ("SpeeLFCD", ""): ("", "", ""),
    ("Gold", ""): ("92.1", "", ""),
}
MUSIC = {  # published test accuracy; epochs on raw features, on standardised ones
    ("MajorityVote", "soft"): ("62.7", 1000, 1000),
    ("MajorityVote", "hard"): ("62.7", 1000, 1000),
    ("CrowdLayer", "MW"): ("42.9", 1000, 1000),
    ("SpeeLFC", ""): ("69.2", 3000, 1000),
    ("SpeeLFCD", ""): ("68.3", 3000, 1000),
}


def head_args(head: str, kind: str, data: str) -> dict[str, Any]:
    if head == "SpeeLFC" and data == "music_genre":
        return {"diagonal": 4.7}
    return {"kind": kind} if kind else {}


def labelme_run(path: str, head: str, kind: str, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Scores of the epoch chosen by gold and of the last one."""
    data, best = FeatureDataModule(path), BestEpoch()
    arguments = head_args(head, kind, "labelme")
    trainer, model = train(data, getattr(heads, head), head_args=arguments, epochs=epochs, seed=seed, callbacks=[best])
    scores = {"last": test(trainer, model, data)}
    model.load_state_dict(best.state)
    return scores | {"best": test(trainer, model, data)}


def music_run(path: str, head: str, kind: str, seed: int, epochs: int, standardize: bool) -> dict[str, float]:
    """Scores of the last epoch."""
    data = FeatureDataModule(path, holdout=0.0)
    arguments, backbone = head_args(head, kind, "music_genre"), {"hidden": [], "standardize": standardize}
    trainer, model = train(
        data,
        getattr(heads, head),
        head_args=arguments,
        backbone=backbone,
        epochs=epochs,
        seed=seed,
        validate=False,
    )
    return test(trainer, model, data)


def labelme(path: Path, seeds: int, epochs: int, workers: int) -> None:
    jobs = [(str(path), *head, seed, epochs) for head in LABELME for seed in range(seeds)]
    results = dict(zip(jobs, parallel(labelme_run, jobs, workers, "labelme")))
    rows = []
    for head, published in LABELME.items():
        runs = [results[(str(path), *head, seed, epochs)] for seed in range(seeds)]

        def column(choice: str, score: str, *, runs: list[Any] = runs, **style: Any) -> str:
            return plus_minus([run[choice][score] for run in runs if score in run[choice]], **style)

        accuracy = [column(choice, "test/acc", scale=100) for choice in ("best", "last")]
        labels = [column(choice, "labels/acc", scale=100) for choice in ("best", "last")]
        divergence = [column("best", f"annotators/{name}", digits=3) for name in ("i_js", "g_js")]
        rows.append([" ".join(head).strip(), *accuracy, published[0], *labels, *divergence, *published[1:]])
    columns = [
        "head",
        "test acc, best epoch",
        "test acc, last",
        "published test acc",
        "labels acc, best",
        "labels acc, last",
    ]
    columns += ["I-JS", "G-JS", "published I-JS", "published G-JS"]
    title = f"labelme, 512-128-8: {seeds} seeds, {epochs} epochs, mean ± 95 % interval; best epoch by val/acc"
    show("accuracy-labelme", title, columns, rows)


def music_genre(path: Path, seeds: int, epochs: int | None, workers: int) -> None:
    jobs = [
        (str(path), *head, seed, epochs or (scaled if standardize else raw), standardize)
        for head, (_, raw, scaled) in MUSIC.items()
        for standardize in (False, True)
        for seed in range(seeds)
    ]
    jobs.sort(key=lambda job: -job[4])  # the longest first, so that no process waits for another at the end
    results = dict(zip(jobs, parallel(music_run, jobs, workers, "music_genre")))
    rows = []
    for head, (published, *_) in MUSIC.items():
        row = [" ".join(head).strip()]
        for standardize in (False, True):
            runs = {job: run for job, run in results.items() if job[1:3] == head and job[5] == standardize}
            row += [str(next(iter(runs))[4]), plus_minus([run["test/acc"] for run in runs.values()], 100)]
            row += [plus_minus([run["labels/acc"] for run in runs.values()], 100)]
            row += [] if standardize else [published]
        rows.append(row)
    columns = ["head", "raw: epochs", "test acc", "labels acc", "published test acc"]
    columns += ["standardised: epochs", "test acc", "labels acc"]
    title = f"music_genre, linear: {seeds} seeds, last epoch, mean ± 95 % interval"
    show("accuracy-music_genre", title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("labelme", "music_genre")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which crowds")
    parser.add_argument("--data", help="folder that holds the crowd folders")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="by default 50 on labelme, 1000 to 3000 on music_genre")
    parser.add_argument("--workers", type=int, default=2, help="processes, of a thread each")
    options = parser.parse_args()
    for name in options.only:
        path = data_folder(options.data, name)
        if path is not None and name == "labelme":
            labelme(path, options.seeds, options.epochs or 50, options.workers)
        elif path is not None:
            music_genre(path, options.seeds, options.epochs, options.workers)


if __name__ == "__main__":
    main()
