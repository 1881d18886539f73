"""Accuracy as the crowd grows and each annotator labels less: Setup (1) of the Crowd Mixture Model's paper.

Three Gaussians, 2457 training items, about five labels each, by T annotators of three kinds. The network is the
paper's (2-16-3, ReLU, dropout .2, Glorot start, Adam 1e-3, batches of 64, standardised inputs). Networks on fixed
labels train until the loss changes by no more than 3 % in an epoch, at most 50; EM does the same with likelihood and
matrices, from 20 starts of which the likeliest is kept. Each annotation set is drawn anew; the table is the mean over
sets with their standard deviation, and beside it the published figures.

    python benchmarks/setup1.py                  # the whole table and the picture, in minutes on two cores
    python benchmarks/setup1.py --sets 2 --annotators 100 10000 --starts 5
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from common import OUT, Settled, parallel, show, test, train
from torch import nn

from lfc.datamodules import SimulatedDataModule
from lfc.heads import CMM, DLEM, Gold, MajorityVote, TwoStage

PUBLISHED = {
    "soft MV": (69.34, 66.21, 66.87, 68.48, 67.00, 66.49),
    "hard MV": (79.57, 82.49, 80.51, 81.57, 74.30, 79.07),
    "DL-DS": (94.66, 93.89, 92.28, 91.69, 89.69, 85.13),
    "DL-EM": (93.97, 93.99, 92.18, 88.27, 76.47, 67.01),
    "CMM": (90.53, 91.07, 91.66, 90.45, 90.26, 90.46),
    "Ideal": (94.75,) * 6,
}
SIZES = (100, 500, 1500, 3500, 6000, 10000)
TOLERANCE = {"soft MV": 5.0, "hard MV": 6.0, "DL-DS": 2.0, "DL-EM": 2.0, "CMM": 2.5, "Ideal": 0.7}
EM = {"em_rounds": 50, "em_tol": 0.03}
METHODS = {
    "soft MV": (MajorityVote, {"kind": "soft"}),
    "hard MV": (MajorityVote, {"kind": "hard"}),
    "DL-DS": (TwoStage, {}),
    "DL-EM": (DLEM, EM),
    "CMM": (CMM, EM | {"groups": 3, "start": "random"}),
    "Ideal": (Gold, {}),
}
BACKBONE = {"hidden": [16], "dropout": 0.2, "standardize": True}


def glorot(layer: nn.Linear) -> None:
    """Begin a layer as the authors' did, whose framework's default it is: when training stops depends on it."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def accuracy(method: str, annotators: int, seed: int, starts: int, repeats: int) -> tuple[float, float]:
    """Test accuracy in percent on one annotation set, and the seconds it took."""
    began = time.monotonic()
    nn.Linear.reset_parameters = glorot  # type: ignore[method-assign]
    head, options = METHODS[method]
    data = SimulatedDataModule(num_annotators=annotators, seed=seed, holdout=0.0)
    em = method in ("DL-EM", "CMM")
    found = []
    for repeat in range(1 if em else repeats):
        trainer, model = train(
            data,
            head,
            epochs=50 * starts if em else 50,
            seed=1000 * seed + repeat,
            head_args=options,
            backbone=BACKBONE,
            callbacks=() if em else [Settled(0.03)],
            validate=False,
            restarts=starts if em else 1,
        )
        found.append(100 * test(trainer, model, data)["test/acc"])
    return float(np.mean(found)), time.monotonic() - began


def plot(path: Path, sizes: list[int], mean: dict[str, np.ndarray], spread: dict[str, np.ndarray], sets: int) -> None:
    """Accuracy against the number of annotators, a line a method; published figures as crosses."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = {"CMM": "#0072b2", "DL-EM": "#d55e00", "DL-DS": "#009e73", "hard MV": "#cc79a7", "soft MV": "#777777"}
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2))
    for name, colour in colours.items():
        axes.errorbar(
            sizes, mean[name], spread[name], color=colour, marker="o", ms=4, lw=1.8, capsize=3, elinewidth=0.8
        )
        axes.plot(sizes, [PUBLISHED[name][SIZES.index(size)] for size in sizes], "x", color=colour, ms=6)
        axes.annotate(name, (sizes[-1], mean[name][-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    axes.axhline(mean["Ideal"].mean(), color="black", lw=0.8, ls=":")
    axes.annotate("gold labels", (sizes[0], mean["Ideal"].mean()), (60, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(right=sizes[-1] * 1.9)
    axes.set(xlabel="annotators (five labels an item, however many there are)", ylabel="test accuracy, %")
    axes.set_title(f"mean and deviation over {sets} annotation sets; x published", fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams["svg.hashsalt"] = "lfc"
    figure.savefig(path, metadata={"Date": None})
    print(f"written: {path}")


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--annotators", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--sets", type=int, default=6, help="annotation sets (default 6)")
    parser.add_argument("--starts", type=int, default=20, help="starts of EM (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="networks on fixed labels, a set (default 3)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--plot", type=Path, default=OUT / "setup1.svg", help="where the picture goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    jobs = [
        (method, size, seed, args.starts, args.repeats)
        for size in sorted(args.annotators, reverse=True)
        for method in args.methods
        for seed in range(args.sets)
    ]
    results = dict(zip(jobs, parallel(accuracy, jobs, args.workers, "setup 1"), strict=True))
    table = {
        name: np.array([[results[name, s, seed, args.starts, args.repeats][0] for seed in range(args.sets)]
                        for s in args.annotators])
        for name in args.methods
    }  # fmt: skip
    rows = []
    for name, values in table.items():
        for size, found in zip(args.annotators, values, strict=True):
            published = PUBLISHED[name][SIZES.index(size)]
            tolerance = TOLERANCE[name] if name not in ("DL-DS", "DL-EM") or size <= 1500 else None
            off = found.mean() - published
            verdict = "" if tolerance is None else "within" if abs(off) <= tolerance else "OUTSIDE"
            seconds = np.mean([results[name, size, seed, args.starts, args.repeats][1] for seed in range(args.sets)])
            cells = [
                f"{found.mean():.1f} ± {found.std(ddof=1) if len(found) > 1 else 0:.1f}",
                f"{np.median(found):.1f}",
            ]
            rows.append([name, f"{size}", *cells, f"{published:.1f}", f"{off:+.1f}",
                         "" if tolerance is None else f"{tolerance}", verdict, f"{seconds:.0f}"])  # fmt: skip
    columns = ["method", "T", "test acc %", "median", "published", "difference", "tolerance", "", "seconds"]
    show("setup1", f"Setup (1), {args.sets} annotation sets, {args.starts} starts", columns, rows)
    if set(METHODS) <= set(args.methods):
        mean = {name: values.mean(1) for name, values in table.items()}
        plot(
            args.plot,
            args.annotators,
            mean,
            {name: values.std(1, ddof=min(args.sets - 1, 1)) for name, values in table.items()},
            args.sets,
        )


if __name__ == "__main__":
    main()
