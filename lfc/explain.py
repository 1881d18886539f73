"""Turns what the option parser says of a mistake into a line that names the option and the remedy."""

import difflib
import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from lfc import aggregation, backbones, datamodules, heads
from lfc.aggregation import Aggregator
from lfc.backbones import Backbone
from lfc.datamodules import CrowdDataModule
from lfc.heads import Head

KINDS: dict[str, tuple[str, type]] = {
    "model.head": ("head", Head),
    "model.head.aggregator": ("aggregator", Aggregator),
    "model.backbone": ("backbone", Backbone),
    "data": ("datamodule", CrowdDataModule),
}


def concrete(base: type) -> dict[str, type]:
    """Every class one can choose that is a ``base``, by short name: ours and those of plug-ins that were imported.

    >>> concrete(Backbone)["MLP"]
    <class 'lfc.backbones.mlp.MLP'>
    """
    ours = {
        name: getattr(module, name)
        for module in (heads, aggregation, backbones, datamodules)
        for name in module.__all__
    }
    found: list[Any] = [
        cls for cls in (*ours.values(), *_subclasses(base)) if isinstance(cls, type) and issubclass(cls, base)
    ]
    return {cls.__name__: cls for cls in found if not inspect.isabstract(cls)}


def _subclasses(base: type) -> Iterable[type]:
    cls: type
    for cls in type.__subclasses__(base):
        yield cls
        yield from _subclasses(cls)


def suggest(wrong: str, known: Iterable[str]) -> str:
    """What was probably meant, or all there is.

    >>> suggest("SpeLFC", ["Gold", "SpeeLFC"])
    "did you mean 'SpeeLFC'?"
    >>> suggest("x", ["Gold", "SpeeLFC"])
    'there are Gold, SpeeLFC'
    """
    names = sorted(known)
    near = difflib.get_close_matches(wrong, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"


def explain(message: str) -> str:
    """One line for a user, from several for a developer."""
    text = " ".join(message.split())
    keys = re.findall(r'Parser key "([^"]+)"', text)
    option = "--" + ".".join(keys)
    if "NestedArg" in text:
        return f"{option}: options follow the config they change; put --config first"
    if "arguments are required: fit." in text or re.search(r"required: \w+\.model", text):
        return "no model and no data; add --config FILE, such as --config configs/quickstart.yaml"
    if match := re.search(r"File does not exist: '?([^']+)'?", text):
        return f"{option}: no such file: {match[1]}"
    if match := re.search(r"Expected a dot import path string: (\S+)", text):
        kind, base = KINDS.get(".".join(keys), ("class", None))
        known = [name for _, one in KINDS.values() for name in concrete(one)] if base is None else concrete(base)
        hint = suggest(match[1], known)
        if not keys:  # asked for the help of a class
            return f"{match[1]}: no such class; {hint}"
        return f"{option}={match[1]}: no such {kind}; {hint}"
    owner = re.search(r"Problem with given class_path '([\w.]+)'", text)
    if match := re.search(r"Option '([\w.]+)' is not accepted", text):
        return f"{option}.{match[1]}: no such option; {_options(owner and owner[1], match[1])}"
    if match := re.search(r"the following arguments are required: ([\w, ]+?)(?: -|$)", text):
        name = owner[1].rpartition(".")[-1] if owner else "it"
        return f"{option}: {name} needs {match[1]}; add " + " ".join(f"{option}.{a}=..." for a in match[1].split(", "))
    if match := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        return f"{match[1]}: no such option; see lfc COMMAND --help"
    if match := re.search(r"Expected a typing.Literal\[(.+?)\]\.? Got value: (.+)$", text):
        return f"{option}={match[2][:60]}: expected one of {match[1]}"
    if match := re.search(r"Given value: (.+)$", text):
        wanted = re.findall(r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|(.+?))(?= - | Given|\.|$)", text)
        kinds = dict.fromkeys((cls or other).replace("NoneType", "null") for cls, other in wanted)
        return f"{option}={match[1][:60]}: expected {' or '.join(kinds) or 'another value'}"
    return text


def _options(path: str | None, wrong: str) -> str:
    """The options of a class, its parents' included, other than those the data sets."""
    if path is None:
        return "see --help"
    module, _, name = path.rpartition(".")
    names: set[str] = set()
    for cls in getattr(import_module(module), name).__mro__:
        if "__init__" in vars(cls) and cls.__module__.partition(".")[0] not in (
            "torch",
            "pytorch_lightning",
            "builtins",
        ):
            parameters = inspect.signature(cls.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    linked = {
        "self",
        "crowd",
        "in_features",
        "num_classes",
        "num_annotators",
        "num_items",
        "num_tasks",
        "profile_features",
    }
    return suggest(wrong, names - linked) if names - linked else "it has none"
