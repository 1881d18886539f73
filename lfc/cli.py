"""The command line: ``lfc fit --config configs/quickstart.yaml``.

Nothing heavy is imported here, so that ``lfc --help`` answers at once; :mod:`lfc.training` holds the commands.
"""

import difflib
import os
import sys
from collections.abc import Sequence

from lfc.errors import UserError

COMMANDS = {
    "fit": "train a head on a crowd, test the best epoch, and write a run folder",
    "validate": "score a checkpoint on the validation split",
    "test": "score a checkpoint on the test split, and infer the annotated items' labels",
    "predict": "classify the test split, or all items where there is none, into predictions.csv",
    "aggregate": "infer labels from annotations alone, without inputs: --method mv, ds, glad, mmce",
}
HELP = """\
lfc: learning from crowds. Train a classifier on what many fallible annotators said.

usage: lfc COMMAND --config FILE [--option=value ...]

commands:
{commands}

examples:
  lfc fit --config configs/quickstart.yaml                            a simulated crowd, nothing needed
  lfc fit --config configs/quickstart.yaml --model.head=SpeeLFCD      another head
  lfc fit --config configs/labelme.yaml --data.path=DIR               a crowd folder of yours
  lfc aggregate --method ds PATH                                      labels from a crowd folder or a bare table
  lfc predict --config runs/EXPERIMENT/RUN/config.yaml --ckpt_path=runs/EXPERIMENT/RUN/checkpoints/best.ckpt

more help:
  lfc fit --help                              every option
  lfc fit --model.head.help=SpeeLFC           the options of a head; likewise --model.backbone.help, --data.help
  lfc fit --config FILE --print_config        the whole config, nothing run
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake ends in one line and status 2, unless ``LFC_DEBUG`` asks for the traceback."""
    argv = list(sys.argv[1:] if args is None else args)
    try:
        _dispatch(argv)
    except UserError as error:
        if os.environ.get("LFC_DEBUG"):
            raise
        print(f"lfc: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("lfc: stopped; go on with the same command and --ckpt_path=last", file=sys.stderr)
        sys.exit(130)


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())), end="")
    elif argv[0] == "--version":
        from lfc import __version__

        print(f"lfc {__version__}")
    elif argv[0] in COMMANDS:
        if argv[0] == "aggregate":
            from lfc.aggregate import run
        else:
            from lfc.training import run
        run(argv)
    else:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"no command '{argv[0]}'; {hint}")


if __name__ == "__main__":
    main()
