"""Learning from crowds: classifiers trained on the labels of many imperfect annotators.

A network here is a backbone (input to features) and a head (features and annotations to a loss; one method, one
head). The parts live in `lfc.heads`, `lfc.backbones` and `lfc.datamodules`; `lfc.module.CrowdClassifier` trains them
and `lfc --help` is the command line. Importing `lfc` itself imports nothing heavy.

Symbols, everywhere: `N` training items, `B` items in a batch, `A` annotations in a batch, `R` annotators, `K` classes,
`D` feature width.
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for, so that `import lfc` is instant."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lfc")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
