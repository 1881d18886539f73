"""Two heads on one simulated crowd: majority vote, and SpeeLFC, which learns whom to believe about what.

Run it with ``make demo``, or ``python examples/demo.py``; it takes about a minute.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads do not help a network of this size

from rich.console import Console
from rich.table import Table

from lfc.cli import main

ROOT = Path(__file__).resolve().parents[1]
HEADS = ("MajorityVote", "SpeeLFC", "Gold")


def demo() -> None:
    console = Console()
    folders = {}
    for head in HEADS:
        console.rule(f"lfc fit --config configs/quickstart.yaml --model.head={head}")
        before = set((ROOT / "runs" / "demo").glob("*"))
        main(["fit", f"--config={ROOT}/configs/quickstart.yaml", f"--model.head={head}", f"--run.root={ROOT}/runs",
              "--run.experiment=demo"])  # fmt: skip
        (folders[head],) = set((ROOT / "runs" / "demo").glob("*")) - before
    table = Table(title="The same network on the same crowd", title_justify="left")
    for column, justify in (
        ("head", "left"),
        ("test accuracy", "right"),
        ("inferred labels", "right"),
        ("seconds", "right"),
    ):
        table.add_column(column, justify=justify)
    for head, folder in folders.items():
        scores = json.loads((folder / "metrics.json").read_text())
        cells = scores["test/acc"], scores["labels/acc"], scores["seconds"]
        table.add_row(
            f"{head} (trained on the truth)" if head == "Gold" else head,
            f"{cells[0]:.3f}",
            f"{cells[1]:.3f}",
            f"{cells[2]:.1f}",
        )
    console.rule()
    console.print(table)
    for head, folder in folders.items():
        console.print(f"{head:<13} {folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder}/",
                      highlight=False, soft_wrap=True)  # fmt: skip
    console.print(
        "\nNext, a crowd folder of yours (see the README):\n  lfc fit --config configs/labelme.yaml --data.path=DIR"
    )


if __name__ == "__main__":
    demo()
