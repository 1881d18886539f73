"""LIA against its paper: accuracy of inferred labels as annotations get fewer, and two tasks learned together.

Transductive: the items' true labels are to be recovered from at most R random annotations each and the items' features
(BlueBirds: VGG16; RTE and the medical relations: MiniLM). The networks, their optimiser (AMSGrad, .001, betas .9 and
.99) and the schedule (rounds of EM, then fine-tuning) are the paper's; the number of gradient steps is an option, since
the paper's thousand a round takes a minute a run.

    python benchmarks/lia.py --only bluebirds rte --seeds 3        # LIA, LIA-E, majority vote, Dawid-Skene, MMCE
    python benchmarks/lia.py --only medical                        # LIA-ML against two single-task LIAs
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import data_folder, minilm_folder, parallel, plus_minus, show, test, train

from lfc.aggregation import MMCE, Aggregator, DawidSkene, MajorityVote
from lfc.backbones import ItemEmbedding
from lfc.datamodules import CrowdDataModule, FeatureDataModule, ItemDataModule, MultiTaskDataModule
from lfc.heads import LIA

PUBLISHED = {  # majority vote, MMCE, LIA-E, LIA
    ("bluebirds", 2): (63.9, 66.9, 65.1, 71.5),
    ("bluebirds", 5): (71.1, 73.9, 73.0, 76.2),
    ("bluebirds", 10): (74.4, 76.5, 78.1, 83.1),
    ("bluebirds", 20): (76.4, 78.5, 77.2, 90.0),
    ("bluebirds", 39): (75.9, 79.6, 78.9, 93.0),
    ("rte", 2): (72.8, 75.3, 76.7, 78.0),
    ("rte", 5): (84.8, 88.5, 84.3, 89.1),
    ("rte", 10): (90.0, 92.7, 91.6, 93.1),
}
TEXTS = {
    "rte": ("text", "hypothesis"),
    "medical_cause": ("text", "term1", "term2"),
    "medical_treat": ("text", "term1", "term2"),
}
AGGREGATORS: dict[str, Aggregator] = {"MAJ": MajorityVote(), "DS": DawidSkene(), "MMCE": MMCE(gamma=1.0)}
METHODS = ("MAJ", "MMCE", "DS", "LIA-E", "LIA")


def folder_of(given: str | None, name: str) -> Path | None:
    """The crowd folder, with features."""
    folder = data_folder(given, name)
    return folder if folder is None or name not in TEXTS else minilm_folder(folder, TEXTS[name])


def lia(data: CrowdDataModule, seed: int, steps: int, width: int, items: bool = False) -> Any:
    """A LIA trained as the paper's; its findings."""
    labels = data.table.annotations.counts.float().mean().item()
    data.batch_size = max(1, round(1024 / labels))  # the paper's batches are of 1024 annotations
    _, model = trained = train(
        data,
        LIA,
        epochs=100_000,
        seed=seed,
        head_args={"hidden": [width] * 4, "embedding": width, "em_steps": steps, "finetune_steps": steps},
        backbone={"hidden": [], "standardize": True},
        body=ItemEmbedding(data.in_features, size=width) if items else None,
        validate=False,
        optimizer=partial(torch.optim.Adam, lr=1e-3, betas=(0.9, 0.99), amsgrad=True),
    )
    test(*trained, data)
    return model.report


def recovered(path: str, method: str, redundancy: int, seed: int, steps: int) -> float:
    """Accuracy of the inferred labels in percent; of ties, half."""
    make = ItemDataModule if method == "LIA-E" else FeatureDataModule
    data = make(path, holdout=0.0, redundancy=redundancy, split_seed=seed)
    if method in AGGREGATORS:
        posterior, gold = AGGREGATORS[method].fit(data.table).posterior, data.table.gold
    else:
        report = lia(data, seed, steps, 16, items=method == "LIA-E")
        posterior, gold = report.posterior.double(), report.gold
    best = posterior >= posterior.amax(-1, keepdim=True) - 1e-9
    right = best.gather(1, gold[:, None]).squeeze(1).double() / best.sum(-1)
    return 100 * right.mean().item()


def medical(paths: list[str], together: bool, redundancy: int, seed: int, steps: int) -> list[float]:
    """Accuracy in percent on the items of each task with gold."""
    options: dict[str, Any] = {"holdout": 0.0, "redundancy": redundancy, "split_seed": seed}
    if together:
        reports = [lia(MultiTaskDataModule(paths, **options), seed, steps, 32)]
    else:
        reports = [lia(FeatureDataModule(path, **options), seed, steps, 32) for path in paths]
    right: dict[str, list[bool]] = {path: [] for path in paths}
    for report, owner in zip(reports, [None] if together else paths, strict=True):
        for row, gold in enumerate(report.gold.tolist()):
            if gold >= 0:
                name = report.crowd.items[report.index[row]]
                path = owner or next(p for p in paths if name.startswith(Path(p).name + "/"))
                right[path].append(bool(report.posterior[row].argmax() == gold))
    return [100 * float(np.mean(right[path])) for path in paths]


def main() -> None:
    """Run the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that holds the crowd folders; $LFC_DATA or ../shared/data")
    parser.add_argument(
        "--only", nargs="+", default=["bluebirds", "rte", "medical"], choices=["bluebirds", "rte", "medical"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="gradient steps a round of EM, and of fine-tuning")
    parser.add_argument("--redundancy", type=int, nargs="+", help="annotations an item; the paper's by default")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    for name in ("bluebirds", "rte"):
        folder = folder_of(args.data, name) if name in args.only else None
        if folder is None:
            continue
        levels = args.redundancy or [r for data, r in PUBLISHED if data == name]
        jobs = [
            (str(folder), method, level, seed, args.steps)
            for level in levels
            for method in args.methods
            for seed in range(args.seeds)
        ]
        found = dict(zip(jobs, parallel(recovered, jobs, args.workers, name), strict=True))
        rows = []
        for level in levels:
            published = dict(zip(("MAJ", "MMCE", "LIA-E", "LIA"), PUBLISHED.get((name, level), ()), strict=False))
            cells = []
            for method in args.methods:
                values = [found[str(folder), method, level, seed, args.steps] for seed in range(args.seeds)]
                cells.append(plus_minus(values) + (f" ({published[method]})" if method in published else ""))
            rows.append([str(level), *cells])
        title = f"{name}: accuracy of inferred labels, %, {args.seeds} seeds, {args.steps} steps (published)"
        show(f"lia_{name}", title, ["labels an item", *args.methods], rows)
    if "medical" in args.only:
        folders = [folder_of(args.data, name) for name in ("medical_cause", "medical_treat")]
        if None in folders:
            return
        paths = [str(folder) for folder in folders]
        levels = args.redundancy or [2, 5, 10]
        jobs = [
            (paths, together, r, seed, args.steps)
            for r in levels
            for together in (False, True)
            for seed in range(args.seeds)
        ]
        results = parallel(medical, jobs, args.workers, "medical")
        rows = []
        for task, name in enumerate(("cause", "treat")):
            for level in levels:
                both = [
                    np.array(
                        [
                            result[task]
                            for job, result in zip(jobs, results, strict=True)
                            if job[1:3] == (together, level)
                        ]
                    )
                    for together in (False, True)
                ]
                rows.append([name, str(level), *map(plus_minus, both), plus_minus(both[1] - both[0], sign="+")])
        title = f"medical relations: accuracy on items with gold, %, {args.seeds} seeds, {args.steps} steps"
        show("lia_medical", title, ["task", "labels an item", "LIA", "LIA-ML", "difference"], rows)


if __name__ == "__main__":
    main()
