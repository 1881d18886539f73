"""LabelMe: Table 3 of the Crowd Mixture Model's paper, with annotators known and with annotators unknown.

Images of eight classes, as 512 averaged VGG16 features; 1000 training items, 2547 labels by 59 annotators. The network
is the paper's (512-128-8, ReLU, dropout .5, Glorot start, Adam 1e-3, batches of 64, no scaling), stopped as in
`setup1.py`. In the global setting nobody knows who gave which label: every label is by an annotator of its own.

    python benchmarks/labelme.py --data DIR      # DIR holds the crowd folder labelme
"""

import argparse
import os

import numpy as np
import torch
from common import Settled, data_folder, parallel, show, test, train
from setup1 import METHODS, glorot
from torch import nn

from lfc.annotations import Annotations
from lfc.datamodules import FeatureDataModule

NONE = float("nan")
PUBLISHED = {
    ("individual", "soft MV"): (83.32, 81.69, 0.216, 0.024),
    ("individual", "hard MV"): (80.34, 79.95, 0.225, 0.035),
    ("individual", "DL-DS"): (84.30, 83.57, 0.153, 0.036),
    ("individual", "DL-EM"): (85.18, 83.07, 0.295, 0.259),
    ("individual", "CMM"): (84.58, 83.10, 0.234, 0.054),
    ("individual", "Ideal"): (97.90, 92.09, NONE, NONE),
    ("global", "DL-DS"): (12.63, 14.08, NONE, 0.473),
    ("global", "DL-EM"): (78.02, 75.92, NONE, 0.467),
    ("global", "CMM"): (84.58, 83.10, NONE, 0.054),
}
TOLERANCE = (1.5, 1.5, 0.02, 0.02)


def scores(path: str, setting: str, method: str, seed: int, starts: int) -> tuple[float, float, float, float]:
    """Training and test accuracy of the network in percent, I-JS and G-JS."""
    nn.Linear.reset_parameters = glorot  # type: ignore[method-assign]
    data = FeatureDataModule(path, holdout=0.0)
    if setting == "global":
        said = data.table.annotations
        data.table.annotators = [f"{a:05d}" for a in range(len(said.label))]
        data.table.annotations = Annotations(said.offsets, torch.arange(len(said.label)), said.label)
    head, options = METHODS[method]
    em = method in ("DL-EM", "CMM")
    trainer, model = train(
        data,
        head,
        epochs=50 * starts if em else 50,
        seed=seed,
        head_args=options,
        backbone={"hidden": [128], "dropout": 0.5},
        callbacks=() if em else [Settled(0.03)],
        validate=False,
        restarts=starts if em else 1,
    )
    found = test(trainer, model, data)
    index = data.index["train"]
    with torch.no_grad():
        predicted = model.eval()(torch.as_tensor(np.asarray(data.features[index.numpy()], dtype=np.float32))).argmax(-1)
    right = 100 * (predicted == data.table.gold[index]).float().mean().item()
    known = method != "Ideal"
    i_js = found["annotators/i_js"] if known and setting == "individual" else NONE
    return right, 100 * found["test/acc"], i_js, found["annotators/g_js"] if known else NONE


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder that holds the crowd folder labelme; $LFC_DATA or ../shared/data")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--starts", type=int, default=8, help="starts of EM (default 8)")
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    folder = data_folder(args.data, "labelme")
    if folder is None:
        return
    cells = [cell for cell in PUBLISHED if cell[1] in args.only]
    jobs = [(str(folder), *cell, seed, args.starts) for cell in cells for seed in range(args.repeats)]
    found = np.array(parallel(scores, jobs, args.workers, "labelme")).reshape(len(cells), args.repeats, 4)
    rows = []
    for cell, values in zip(cells, found, strict=True):
        mean, published = values.mean(0), np.array(PUBLISHED[cell])
        off = [bool(d > t) for d, t in zip(abs(mean - published), TOLERANCE, strict=True)]
        texts = [
            "-" if np.isnan(m) else f"{m:.1f} ({p:.1f})" if i < 2 else f"{m:.3f} ({p:.3f})"
            for i, (m, p) in enumerate(zip(mean, published, strict=True))
        ]
        names = [name for name, bad in zip(("train", "test", "I-JS", "G-JS"), off, strict=True) if bad]
        rows.append([*cell, *texts, "within" if not names else "OUTSIDE: " + ", ".join(names)])
    title = f"LabelMe, mean of {args.repeats} runs (published); {args.starts} starts; tolerance 1.5 points and .02"
    show("labelme", title, ["annotators", "method", "train %", "test %", "I-JS", "G-JS", ""], rows)


if __name__ == "__main__":
    main()
