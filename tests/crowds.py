"""Where the real crowds are, for the tests that read them."""

import os
from pathlib import Path

import numpy as np
import pytest


def shared(name: str) -> Path:
    """The crowd folder ``name`` under ``$LFC_DATA``, else ``../shared/data``; skips the test where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LFC_DATA", default)) / name
    if not folder.is_dir():
        pytest.skip(f"the crowd {name} is not there; set LFC_DATA to the folder that holds it")
    return folder


def write_crowd(folder: Path, seed: int = 0, gold: bool = True, valid: bool = True) -> Path:
    """A small crowd folder: 30 training items (one of them unlabelled), 10 to validate, 10 to test, 4 annotators."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    classes = rng.integers(3, size=50)
    np.save(folder / "features.npy", (np.eye(3)[classes] * 3 + rng.normal(size=(50, 3))).astype(np.float32))
    splits = ["train"] * 30 + (["valid"] * 10 if valid else ["test"] * 10) + ["test"] * 10
    names = ["cat", "dog", "owl"]
    items = [f"{i:03d},{split},{names[k] if gold else ''}" for i, (split, k) in enumerate(zip(splits, classes))]
    (folder / "items.csv").write_text("\n".join(["item,split,gold", *items]) + "\n")
    said = [
        f"{i:03d},{who},{names[classes[i]] if rng.random() < 0.8 else names[rng.integers(3)]}"
        for i in range(29)
        for who in rng.choice(["ann", "bob", "cyd", "dan"], size=3, replace=False)
    ]
    (folder / "annotations.csv").write_text("\n".join(["item,annotator,label", *said]) + "\n")
    (folder / "meta.json").write_text('{"name": "zoo", "classes": ["cat", "dog", "owl"]}')
    return folder
