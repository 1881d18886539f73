"""Speed and memory of the aggregators beside crowd-kit's, as ratios within one run.

    python benchmarks/aggregation.py                             both tables, some minutes
    python benchmarks/aggregation.py --annotations 20000         a smaller crowd: 5 votes an item, 100 an annotator
    python benchmarks/aggregation.py --only speed --rounds 5     one of them: speed, memory

- ``speed``: majority vote, and an iteration of Dawid-Skene, at 1,000,000 annotations, 200,000 items, 10,000 annotators
  and 4 classes, which should take crowd-kit at least 25 and 20 times as long; and a whole fit of GLAD at 10,000
  annotations, at least 50 times. crowd-kit starts from a data frame of whole numbers, lfc from a crowd's table of them,
  which is in the order of items as every crowd's is, and, in rows of their own, from votes in no order. Labels are part
  of a fit, and so are lfc's confusion matrices. Both use one thread. An iteration is the time of several less that of
  one, over their number. The contenders take turns, and a ratio is one of medians.
- ``objective``, with ``speed``: whether both end equally well: the log-likelihood per annotation, with GLAD's priors,
  computed by lfc from the parameters that each has found; of Dawid-Skene after equally many iterations.
- ``memory``: the peak of one fit above what the process, with data and libraries, held before; each in a process of its
  own. Needs Linux.

Needs ``pip install 'crowd-kit'``. Seconds depend on the machine and on who else uses it, ratios less so.
"""

import argparse
import ctypes
import gc
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import console, quiet, show

from lfc.aggregation import GLAD, DawidSkene, MajorityVote, Votes
from lfc.aggregation.base import normalize_joint
from lfc.aggregation.dawid_skene import Parameters as Confusion
from lfc.aggregation.glad import Parameters as Abilities
from lfc.annotations import Annotations, Crowd

CLASSES, PER_ITEM, PER_ANNOTATOR = 4, 5, 100
GOALS = {"MajorityVote": (1_000_000, 25), "DawidSkene": (1_000_000, 20), "GLAD": (10_000, 50)}
"""At how many annotations crowd-kit should take how many times as long."""
METHODS = {"MajorityVote": MajorityVote, "DawidSkene": DawidSkene, "GLAD": GLAD}


def draw(annotations: int) -> Votes:
    """Votes in no order by annotators who are right in 40 to 90 % of cases."""
    g = torch.Generator().manual_seed(0)
    items, annotators = max(1, annotations // PER_ITEM), max(1, annotations // PER_ANNOTATOR)
    item = torch.arange(annotations)[torch.randperm(annotations, generator=g)] % items
    annotator = torch.randint(annotators, (annotations,), generator=g)
    skill = 0.4 + 0.5 * torch.rand(annotators, generator=g)
    gold = torch.randint(CLASSES, (items,), generator=g)[item]
    wrong = (gold + torch.randint(1, CLASSES, (annotations,), generator=g)) % CLASSES
    label = torch.where(torch.rand(annotations, generator=g) < skill[annotator], gold, wrong)
    return Votes(item, annotator, label, items, annotators, CLASSES)


def as_crowd(votes: Votes) -> Crowd:
    table = Annotations.from_long(votes.item, votes.annotator, votes.label, votes.num_items)
    unknown = torch.zeros(votes.num_items, dtype=torch.long)
    names = [[str(i) for i in range(n)] for n in (votes.num_items, votes.num_annotators, votes.num_classes)]
    return Crowd(*names, table, unknown, unknown - 1)


def as_frame(votes: Votes) -> Any:
    import pandas

    return pandas.DataFrame({"task": votes.item, "worker": votes.annotator, "label": votes.label})


def ours(method: str, source: Crowd | Votes, **options: Any) -> Any:
    if isinstance(source, Votes):  # anew, so that nothing is known of their order
        sizes = source.num_items, source.num_annotators, source.num_classes
        source = Votes(source.item, source.annotator, source.label, *sizes)
    result = METHODS[method](**options).fit(source)
    assert len(result.label) == len(result.posterior)
    return result


def theirs(method: str, frame: Any, **options: Any) -> Any:
    import crowdkit.aggregation

    return getattr(crowdkit.aggregation, method)(**options).fit(frame)


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def race(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of each contender's times, in turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            took = run()
            if number:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def per_iteration(fit: Callable[[int], Any], extra: int) -> float:
    return (seconds(lambda: fit(1 + extra)) - seconds(lambda: fit(1))) / extra


def speed(annotations: int, glad_annotations: int, rounds: int) -> None:
    rows = []
    votes = draw(annotations)
    crowd, frame = as_crowd(votes), as_frame(votes)
    whole = race(
        {
            "lfc": lambda: seconds(lambda: ours("MajorityVote", crowd)),
            "lfc, votes in no order": lambda: seconds(lambda: ours("MajorityVote", votes)),
            "crowd-kit": lambda: seconds(lambda: theirs("MajorityVote", frame)),
        },
        rounds,
    )
    rows += lines("MajorityVote", "fit", annotations, whole)
    steps = race(
        {
            "lfc": lambda: per_iteration(lambda n: ours("DawidSkene", crowd, max_iter=n, tol=0), 10),
            "crowd-kit": lambda: per_iteration(lambda n: theirs("DawidSkene", frame, n_iter=n, tol=-math.inf), 2),
        },
        rounds,
    )
    rows += lines("DawidSkene", "iteration", annotations, steps)
    fits = race(
        {
            "lfc": lambda: seconds(lambda: ours("DawidSkene", crowd)),
            "lfc, votes in no order": lambda: seconds(lambda: ours("DawidSkene", votes)),
            "crowd-kit": lambda: seconds(lambda: theirs("DawidSkene", frame)),
        },
        rounds,
    )
    rows += lines("DawidSkene", "fit", annotations, fits, goal=False)
    small = draw(glad_annotations)
    small_crowd, small_frame = as_crowd(small), as_frame(small)
    fits = race(
        {
            "lfc": lambda: seconds(lambda: ours("GLAD", small_crowd)),
            "crowd-kit": lambda: seconds(lambda: theirs("GLAD", small_frame)),
        },
        rounds,
    )
    rows += lines("GLAD", "fit", glad_annotations, fits)
    columns = ["method", "what", "annotations", "by", "ms", "crowd-kit takes", "goal", "met"]
    show("aggregation-speed", f"Aggregators beside crowd-kit's, {CLASSES} classes", columns, rows)
    objective({"MajorityVote": (votes, crowd, frame), "DawidSkene": (votes, crowd, frame)}, {"GLAD": small})


def lines(method: str, what: str, annotations: int, times: dict[str, float], goal: bool = True) -> list[list[str]]:
    size, wanted = GOALS[method]
    rows = []
    for name, took in times.items():
        ratio = times["crowd-kit"] / took
        aimed = goal and name == "lfc" and annotations == size
        ends = [f"{wanted} x", "yes" if ratio >= wanted else "no"] if aimed else ["", ""]
        rows.append([method, what, f"{annotations:,}", name, f"{1e3 * took:.1f}", f"{ratio:.1f} x", *ends])
    return rows


def objective(large: dict[str, tuple[Votes, Crowd, Any]], small: dict[str, Votes]) -> None:
    rows = []
    votes, crowd, frame = large["MajorityVote"]
    mine, other = ours("MajorityVote", crowd).posterior, theirs("MajorityVote", frame).probas_
    apart = (mine - torch.tensor(other.sort_index().sort_index(axis=1).to_numpy())).abs().max().item()
    rows.append(["MajorityVote", "greatest difference of shares", "", "", f"{apart:.1e}"])

    peer = theirs("DawidSkene", frame)
    found = ours("DawidSkene", crowd, max_iter=len(peer.loss_history_) + 1, tol=0)  # its M-steps: one before, then each
    said = peer.errors_.reindex(
        [(r, l) for r in range(votes.num_annotators) for l in range(CLASSES)], fill_value=0.0
    ).sort_index(axis=1)
    said = torch.tensor(said.to_numpy()).view(-1, CLASSES, CLASSES)
    model = Confusion(torch.tensor(peer.priors_.sort_index().to_numpy()), said, said.log())
    rows.append(compare("DawidSkene", votes, found, DawidSkene(), model))

    votes = small["GLAD"]
    found, peer = ours("GLAD", votes), theirs("GLAD", as_frame(votes))
    alpha = peer.alphas_.reindex(range(votes.num_annotators), fill_value=1.0)
    beta = peer.betas_.reindex(range(votes.num_items), fill_value=1.0)
    abilities = Abilities(torch.tensor(alpha.to_numpy()), torch.tensor(beta.to_numpy()))
    rows.append(compare("GLAD", votes, found, GLAD(), abilities))
    columns = ["method", "what", "lfc", "crowd-kit", "difference"]
    show("aggregation-objective", "What each ends with", columns, rows)


def compare(method: str, votes: Votes, found: Any, aggregator: Any, model: Any) -> list[str]:
    joint, log_prior = aggregator._e_step(votes, model)
    _, likelihood = normalize_joint(joint, joint.clone())
    peer = (float(likelihood.sum()) + log_prior) / len(votes)
    mine = found.history[-1] / len(votes)
    what = f"objective per annotation, lfc after {len(found.history)} iterations"
    return [method, what, f"{mine:.6f}", f"{peer:.6f}", f"{mine - peer:+.6f}"]


def held(key: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def measure(library: str, method: str, annotations: int) -> None:
    """Print the peak of one fit, above what was held before; called in a process of its own."""
    votes = draw(annotations)
    source = as_crowd(votes) if library == "lfc" else as_frame(votes)
    run = ours if library == "lfc" else theirs
    tiny = draw(200)
    run(method, as_crowd(tiny) if library == "lfc" else as_frame(tiny))  # what is imported at the first call
    del votes
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the data took in the making is not there to be used again
    before = held("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    run(method, source)
    print(json.dumps(held("VmHWM") - before))


def memory(annotations: int, glad_annotations: int) -> None:
    if not Path("/proc/self/clear_refs").exists():
        console.print("memory: there is no /proc/self/clear_refs here, so peaks cannot be measured; use Linux")
        return
    rows = []
    sizes = {"MajorityVote": annotations, "DawidSkene": annotations, "GLAD": glad_annotations}
    for method, size in sizes.items():
        peak = {}
        for library in ("lfc", "crowd-kit"):
            command = [sys.executable, __file__, "--measure", library, method, "--annotations", str(size)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peak[library] = json.loads(done.stdout.splitlines()[-1]) / 2**20
        more = "yes" if peak["lfc"] <= peak["crowd-kit"] else "no"
        rows.append([method, f"{size:,}", *(f"{peak[name]:.1f}" for name in ("lfc", "crowd-kit")), more])
    columns = ["method", "annotations", "lfc MB", "crowd-kit MB", "not more"]
    show("aggregation-memory", "Peak memory of a fit, beyond data and libraries", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ("speed", "memory")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables, help="which tables; speed has objective")
    parser.add_argument("--annotations", type=int, default=1_000_000, help="of majority vote and Dawid-Skene")
    parser.add_argument("--glad-annotations", type=int, default=10_000, help="of GLAD")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender, after one to warm up")
    parser.add_argument("--measure", nargs=2, metavar=("LIBRARY", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.measure:
        measure(*options.measure, options.annotations)
        return
    try:
        import crowdkit.aggregation  # noqa: F401
    except ImportError:
        raise SystemExit(
            "crowd-kit is not installed, so there is nothing to compare with: pip install crowd-kit"
        ) from None
    if "speed" in options.only:
        speed(options.annotations, options.glad_annotations, options.rounds)
    if "memory" in options.only:
        memory(options.annotations, options.glad_annotations)


if __name__ == "__main__":
    main()
