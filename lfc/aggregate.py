"""``lfc aggregate``: labels without inputs, from annotations alone."""

import contextlib
import re
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console

from lfc.aggregation import GLAD, MMCE, Aggregator, DawidSkene, MajorityVote
from lfc.annotations import Duplicates, UnknownItems, read_crowd
from lfc.errors import UserError
from lfc.explain import explain, suggest
from lfc.report import Findings
from lfc.runs import new_folder, write_findings, write_metrics
from lfc.training import print_scores

METHODS: dict[str, type[Aggregator]] = {"mv": MajorityVote, "ds": DawidSkene, "glad": GLAD, "mmce": MMCE}
TOLD = {
    "labels.csv": "each item's label, and how sure it is",
    "annotators.csv": "how good each annotator is",
    "confusion.npz": "what they confuse",
    "metrics.json": "scores, iterations",
}


def run(argv: list[str]) -> None:
    """Aggregate a crowd folder or a bare table, write what was inferred, and say what came of it."""
    methods = METHODS | {plugin.name: plugin.load() for plugin in entry_points(group="lfc.aggregators")}
    method = _method(argv, methods)
    parser = ArgumentParser(
        prog="lfc aggregate",
        usage="lfc aggregate --method NAME PATH [--out DIR] [--option=value ...]",
        description=(
            "Infer each item's label and each annotator's quality from annotations alone: mv majority vote, ds "
            "Dawid-Skene, glad abilities and difficulties, mmce regularised minimax conditional entropy. "
            "`lfc aggregate --method ds --help` lists the options of a method."
        ),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", type=str, help="Crowd folder, or a bare table of item, annotator, label (csv, parquet)."
    )
    parser.add_argument("--method", choices=list(methods), default="ds", help="How labels are inferred.")
    parser.add_argument("--out", type=str | None, help="Folder to write to; runs/aggregate/NAME-METHOD by default.")
    parser.add_argument(
        "--duplicates", type=Duplicates, default="keep", help="Where one annotator labels an item twice."
    )
    parser.add_argument(
        "--unknown_items", type=UnknownItems, default="error", help="Where the items table lacks an item."
    )
    options = parser.add_class_arguments(methods[method])
    try:
        config = parser.parse_args(argv[1:])
    except ArgumentError as error:
        raise UserError(_explain(str(error), options)) from error
    aggregator = methods[method](**{name: config[name] for name in options})
    crowd = read_crowd(config.path, duplicates=config.duplicates, unknown_items=config.unknown_items, bare=True)
    console = Console()
    for note in crowd.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    began = time.monotonic()
    result = aggregator.fit(crowd)
    seconds = time.monotonic() - began
    index = crowd.annotations.counts.nonzero().squeeze(-1)
    found = Findings(
        crowd, index, result.posterior[index].float(), {k: v.float() for k, v in result.annotators.items()}
    )
    found.active[:] = found.labels > 0
    folder = Path(config.out) if config.out else new_folder(Path("runs"), "aggregate", f"{crowd.name}-{method}")
    write_findings(folder, found)
    scores = {name: value.item() for name, value in found.scores().items()}
    about: dict[str, Any] = {"method": method, "data": crowd.name, "seconds": seconds}
    about |= {"iterations": len(result.history), "converged": result.converged, "history": result.history}
    write_metrics(folder, about | scores)
    table = crowd.annotations
    text = f"{len(table.label):,} labels of {len(index):,} items by {int((found.labels > 0).sum()):,} annotators"
    console.print(f"{method} on {crowd.name}: {text}, {seconds:.1f} s", highlight=False, soft_wrap=True)
    if result.history:
        end = "converged" if result.converged else "not converged: raise --max_iter"
        console.print(f"{len(result.history)} iterations to {result.history[-1]:.3f}, {end}", highlight=False)
    if scores:
        print_scores("against gold", scores)
    with contextlib.suppress(ValueError):
        folder = folder.resolve().relative_to(Path.cwd())
    console.print(f"[bold]{folder}[/bold]/", soft_wrap=True)
    for name, meaning in TOLD.items():
        console.print(f"  {name:<22} {meaning}", highlight=False, soft_wrap=True)


def _method(argv: list[str], methods: dict[str, type[Aggregator]]) -> str:
    """Which method was asked for, found before its options are known."""
    given = "ds"
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if argument == "--method":
            given = following
        elif argument.startswith("--method="):
            given = argument.partition("=")[2]
    if given not in methods:
        raise UserError(f"--method={given}: no such method; {suggest(given, methods)}")
    return given


def _explain(message: str, options: list[str]) -> str:
    if "arguments are required: path" in message:
        return "nothing to aggregate; give a crowd folder or a table: lfc aggregate --method ds PATH"
    if match := re.search(r"unrecognized arguments: --(\w+)", message):
        known = [*options, "method", "out", "duplicates", "unknown_items"]
        return f"--{match[1]}: no such option; {suggest(match[1], known)}"
    if match := re.search(
        r'Parser key "(\w+)":.*Expected an? (?:<class \'(\w+)\'>|(.+?))\. Got value: (.+)', message, re.S
    ):
        return f"--{match[1]}={match[4]}: expected {match[2] or match[3]}"
    return explain(message)
