"""The commands that train and use a model, on LightningCLI."""

import contextlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

import torch
import yaml
from jsonargparse import ArgumentError
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

from lfc.callbacks import BestCheckpoint, ProgressBar
from lfc.cli import COMMANDS
from lfc.datamodules import CrowdDataModule
from lfc.errors import UserError
from lfc.explain import KINDS, concrete, explain
from lfc.mirror import Mirror, Mode, resolve_mode
from lfc.module import CrowdClassifier
from lfc.report import prediction_rows
from lfc.runs import (
    History,
    last_folder,
    new_folder,
    peak_memory_mb,
    versions,
    write_atomically,
    write_metrics,
    write_report,
    write_table,
)

LINKS = (
    ("data", "num_classes", "model.head.init_args.num_classes"),
    ("data", "num_annotators", "model.head.init_args.num_annotators"),
    ("data", "num_items", "model.head.init_args.num_items"),
    ("data", "num_tasks", "model.head.init_args.num_tasks"),
    ("data", "profile_features", "model.head.init_args.profile_features"),
    ("data", "in_features", "model.backbone.init_args.in_features"),
)
HIDDEN = {
    "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
    "validate": {"model", "dataloaders", "datamodule", "weights_only", "verbose"},
    "test": {"model", "dataloaders", "datamodule", "weights_only", "verbose"},
    "predict": {"model", "dataloaders", "datamodule", "weights_only", "return_predictions"},
}
MONITORS = {"val/acc": "max", "val/nll": "min", "val/annotation_nll": "min"}


@dataclass
class RunOptions:
    """Where a run goes, how its best epoch is chosen, and who may look on.

    Args:
        root: Folder of all runs.
        experiment: Folder of this experiment's runs; by default the name of the config file.
        name: Folder of this run; by default the head and the seed. A number is added to one that is taken.
        monitor: What the best epoch is chosen by: ``val/acc``, ``val/nll``, ``val/annotation_nll`` (needs no gold) or
            ``none`` (the last epoch). ``auto`` takes ``val/acc`` where the validation split has gold, else
            ``val/annotation_nll``.
        patience: Epochs without improvement after which to stop; ``null`` trains to the end.
        wandb: Whether to log to Weights & Biases: ``online``, ``offline``, ``off``; ``auto`` is online where you are
            logged in, and offline elsewhere.
        project: Weights & Biases project.
        reveal_annotators: Whether Weights & Biases may see the annotators' own ids.
        upload_checkpoint: Whether Weights & Biases keeps the best checkpoint.
    """

    root: str = "runs"
    experiment: str | None = None
    name: str | None = None
    monitor: Literal["auto", "val/acc", "val/nll", "val/annotation_nll", "none"] = "auto"
    patience: int | None = None
    wandb: Mode = "auto"
    project: str = "lfc"
    reveal_annotators: bool = False
    upload_checkpoint: bool = True


class CLI(LightningCLI):
    """Sizes flow from data to backbone to head, so no config states them twice; a run ends in its folder."""

    requested: str
    """The command, of which alone a parser is built: each takes half a second."""
    sizes: dict[str, int | None]
    """Of a checkpoint's model, which other data than its own must not change."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The one command that was asked for, and which of Lightning's arguments are not the user's to give."""
        return {CLI.requested: HIDDEN[CLI.requested]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the sizes; add the run's options and our defaults."""
        self.sizes = {}

        def size(attribute: str, target: str) -> Any:
            def compute(source: Any) -> Any:
                key = "backbone_in_features" if "backbone" in target else attribute
                return self.sizes[key] if key in self.sizes else getattr(source, attribute)

            return compute

        for source, attribute, target in LINKS:
            parser.link_arguments(source, target, compute_fn=size(attribute, target), apply_on="instantiate")
        parser.link_arguments(
            ("model.backbone", "data"),
            "model.head.init_args.in_features",
            compute_fn=lambda backbone, data: backbone.out_features + (data.num_tasks if data.num_tasks > 1 else 0),
            apply_on="instantiate",
        )
        parser.add_argument(
            "--run", type=RunOptions, default=RunOptions(), help="Where a run goes, and its best epoch."
        )

    # before the command

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint, since its model decides the sizes."""
        config = self.config[self.subcommand]
        path = config.get("ckpt_path")
        if path == "last":
            folder = last_folder(*self._place(config))
            if folder is None:
                raise UserError(f"--ckpt_path=last: no run to go on with in {Path(*self._place(config)[:2])}")
            config["ckpt_path"] = path = str(folder / "checkpoints" / "last.ckpt")
        elif path in ("best", "hpc", "registry"):
            raise UserError(f"--ckpt_path={path}: name the checkpoint's file")
        if self.subcommand != "fit" and path is None:
            raise UserError(f"lfc {self.subcommand} needs a trained model: --ckpt_path=runs/.../checkpoints/best.ckpt")
        if path is None:
            return
        if not Path(path).is_file():
            raise UserError(f"--ckpt_path={path}: no such file")
        try:
            saved = torch.load(path, weights_only=True, map_location="cpu")["lfc"]
        except Exception as error:
            raise UserError(f"--ckpt_path={path}: not a checkpoint of lfc ({type(error).__name__})") from error
        self.trained_classes, self.trained_annotators = saved.pop("classes"), saved.pop("annotators")
        self.sizes = {} if self.subcommand == "fit" else {k: v for k, v in saved.items() if k != "in_features"}

    def instantiate_classes(self) -> None:
        """Build data and model, then the trainer."""
        try:
            super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps what a link's function raises
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise

    def _place(self, config: Any) -> tuple[Path, str, str]:
        """Root, experiment and name of the run folder."""
        files = config.get("config") or []
        experiment = config.run.experiment or (Path(str(files[0])).stem if files else "default")
        head = str(config.model.head.class_path).rpartition(".")[-1]
        return Path(config.run.root), experiment, config.run.name or f"{head}-seed{config.seed_everything}"

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Lightning's trainer, with the run folder's history, W&B, checkpoints and progress bar."""
        config = self.config[self.subcommand]
        self.folder: Path | None = None
        self.mirror: Mirror | None = None
        self.checkpoint: ModelCheckpoint | None = None
        self.started = time.monotonic()
        data = self.datamodule
        if config.get("ckpt_path"):
            if self.subcommand != "predict" and data.annotators_digest != self.trained_annotators:
                raise UserError(
                    "the checkpoint's annotators are not those of the data; give the data it was trained on"
                )
            classes = data.table.classes
            if classes and classes != self.trained_classes:
                raise UserError(
                    f"the checkpoint knows the classes {_few(self.trained_classes)}, the data {_few(classes)}"
                )
            data.table.classes = self.trained_classes
        options = config.run
        if config.trainer.get("enable_progress_bar") is not False:
            kwargs["callbacks"] = [ProgressBar()]
        kwargs["use_distributed_sampler"] = False  # the datamodule's sampler knows of ranks
        if not config.trainer.get("enable_model_summary"):
            kwargs["enable_model_summary"] = False
        if self.subcommand == "fit" and not config.trainer.get("fast_dev_run"):
            self.folder = self._make_folder(config)
            try:
                self.checkpoint, *others = self._selection(options)
            except UserError:
                self._discard()
                raise
            kwargs["callbacks"] = [*kwargs.get("callbacks", []), *others, self.checkpoint, self._every_epoch()]
            kwargs["default_root_dir"] = str(self.folder)
            kwargs["logger"] = [History(self.folder), *self._wandb(config)]
        else:
            kwargs |= {"logger": False, "enable_checkpointing": False}
        user = self._get(self.config_init, "trainer")
        if user.get("callbacks"):
            kwargs["callbacks"] = [*kwargs.get("callbacks", []), *user["callbacks"]]
        if isinstance(user.get("logger"), list) or (user.get("logger") not in (None, True, False)):
            given = user["logger"] if isinstance(user["logger"], list) else [user["logger"]]
            kwargs["logger"] = [*(kwargs["logger"] or []), *given]
        return super().instantiate_trainer(**kwargs)

    def _make_folder(self, config: Any) -> Path:
        # the processes of one DDP run share the folder that the first of them made
        inherited = os.environ.get("LFC_RUN_FOLDER") if os.environ.get("LOCAL_RANK") else None
        if inherited:
            return Path(inherited)
        if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
            raise UserError("start lfc fit once, not once a process; --trainer.devices=2 starts the others")
        if any(name in str(config.trainer.strategy) for name in ("spawn", "fork", "notebook")):
            raise UserError(f"--trainer.strategy={config.trainer.strategy}: its processes keep their results; take ddp")
        if config.get("ckpt_path"):
            checkpoint = Path(config.ckpt_path).resolve()
            folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
            if folder is not None and checkpoint.name == "last.ckpt":
                self._announce(folder)
                return folder
        folder = new_folder(*self._place(config)).resolve()
        self._announce(folder)
        return folder

    @rank_zero_only
    def _discard(self) -> None:
        """Take away the folder of a run that never began."""
        if self.folder is not None and not (self.folder / "checkpoints").exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def _announce(self, folder: Path) -> None:
        os.environ["LFC_RUN_FOLDER"] = str(folder)
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
        settings = yaml.safe_load(text)
        settings["ckpt_path"] = None  # a config is for running again from the start
        settings["run"]["experiment"] = folder.parent.name
        write_atomically(folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))

    def _selection(self, options: RunOptions) -> list[Any]:
        """What keeps the best epoch, and what stops early."""
        data: CrowdDataModule = self.datamodule
        possible = {
            "val/acc": data.has_gold("valid"),
            "val/nll": data.has_gold("valid"),
            "val/annotation_nll": data.holdout > 0 or bool(data.table.annotations.counts[data.index["valid"]].any()),
        }
        monitor: str | None = options.monitor
        if monitor == "auto":
            monitor = next((name for name in ("val/acc", "val/annotation_nll") if possible[name]), "none")
        if monitor != "none" and not possible[str(monitor)]:
            remedy = "--data.holdout=0.1" if monitor == "val/annotation_nll" else "--run.monitor=val/annotation_nll"
            raise UserError(f"--run.monitor={monitor}: the data has nothing to measure it on; take {remedy}")
        monitor = None if monitor == "none" else monitor
        self.monitor = monitor
        mode = MONITORS[monitor] if monitor else "min"
        assert self.folder is not None
        checkpoint = BestCheckpoint(
            dirpath=self.folder / "checkpoints",
            filename="best",
            monitor=monitor,
            mode=mode,
            save_on_train_epoch_end=True,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        if options.patience is None:
            return [checkpoint]
        if monitor is None:
            raise UserError("--run.patience needs something to watch; set --run.monitor, or --data.holdout=0.1")
        return [checkpoint, EarlyStopping(monitor, mode=mode, patience=options.patience)]

    def _every_epoch(self) -> ModelCheckpoint:
        """What keeps the last epoch; its checkpoint is the later one, so it knows which epoch is the best so far."""
        assert self.folder is not None
        return ModelCheckpoint(
            dirpath=self.folder / "checkpoints",
            filename="last",
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def _wandb(self, config: Any) -> list[Any]:
        mode = resolve_mode(config.run.wandb)
        if mode == "off" or config.trainer.get("logger") is False or cast(Any, rank_zero_only).rank != 0:
            return []
        _, experiment, _ = self._place(config)
        head = str(config.model.head.class_path).rpartition(".")[-1]
        assert self.folder is not None
        settings = yaml.safe_load((self.folder / "config.yaml").read_text())
        flat = {"head": head, "dataset": self.datamodule.table.name, "seed": config.seed_everything}
        self.mirror = Mirror(
            self.folder, mode, project=config.run.project, experiment=experiment, head=head, config=flat | settings
        )
        return [self.mirror.logger]

    # the commands

    def fit(self, **kwargs: Any) -> None:
        """Train, test the best epoch, write the run folder, and say what came of it."""
        if self.folder is None:  # a trial of a few batches leaves nothing behind
            self.trainer.fit(**kwargs)
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)
            return
        try:
            self._fit(**kwargs)
        except UserError:  # found while the data was set up: nothing was trained, so nothing is left behind
            self._discard()
            raise
        finally:
            os.environ.pop("LFC_RUN_FOLDER", None)  # the next run of this process makes its own
            if self.mirror is not None:
                self.mirror.finish(getattr(self, "summary", {}))

    def _fit(self, **kwargs: Any) -> None:
        if kwargs.get("ckpt_path"):
            saved = torch.load(kwargs["ckpt_path"], weights_only=True, map_location="cpu")
            for logger in self.trainer.loggers:
                if isinstance(logger, History):
                    logger.resume(saved["epoch"] + 1)
        self._introduce()
        self.trainer.fit(**kwargs, weights_only=True)
        assert self.folder is not None and self.checkpoint is not None
        if self.trainer.interrupted:
            raise KeyboardInterrupt
        seconds = time.monotonic() - self.started
        best = self.checkpoint.best_model_path
        epochs = self.trainer.current_epoch
        final = {key: value for key, value in self.trainer.callback_metrics.items() if key == "train/loss"}
        chosen = torch.load(best, weights_only=True, map_location="cpu")
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best, verbose=False, weights_only=True)
        if not self.trainer.is_global_zero:
            return
        config = self.config[self.subcommand]
        history = next(logger for logger in self.trainer.loggers if isinstance(logger, History))
        metrics = {
            "head": type(self.model.head).__name__,
            "backbone": type(self.model.backbone).__name__,
            "data": self.datamodule.table.name,
            "seed": config.seed_everything,
            "epochs": epochs,
            "best_epoch": chosen["epoch"],
            "monitor": self.monitor,
            **final,
            **history.scores(chosen["epoch"], "val/"),
            **self.trainer.callback_metrics,
            "seconds": round(seconds, 2),
            "peak_memory_mb": peak_memory_mb(),
            "versions": versions(),
        }
        metrics = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        report = self.model.report
        write_report(self.folder, report)
        write_metrics(self.folder, metrics)
        self.summary = {key: value for key, value in metrics.items() if "/" in key}
        if self.mirror is not None:
            keep = Path(best) if config.run.upload_checkpoint else None
            self.mirror.send(report, config.run.reveal_annotators, keep)
        print_closing_table(metrics, self.folder)

    @rank_zero_only
    def _introduce(self) -> None:
        table, train = self.datamodule.table, self.datamodule.index["train"]
        labels = int(table.annotations.counts[train].sum())
        parameters = sum(p.numel() for p in self.model.parameters())
        Console().print(
            f"{type(self.model.head).__name__} on {table.name}: {len(train):,} training items, "
            f"{labels:,} labels by {len(table.annotators):,} annotators, {len(table.classes)} classes "
            f"({_few(table.classes)}); {type(self.model.backbone).__name__}, {parameters:,} parameters; "
            f"best epoch by {self.monitor or 'being the last'}",
            highlight=False,
        )

    def validate(self, **kwargs: Any) -> None:
        """Score a checkpoint on the validation split."""
        self._score(self.trainer.validate, kwargs)

    def test(self, **kwargs: Any) -> None:
        """Score a checkpoint on the test split and the annotated items."""
        self._score(self.trainer.test, kwargs)

    def _score(self, function: Any, kwargs: dict[str, Any]) -> None:
        function(**kwargs, verbose=False, weights_only=True)
        if self.trainer.is_global_zero:
            scores = {key: value.item() for key, value in self.trainer.callback_metrics.items()}
            if not scores:
                raise UserError("nothing to score: the data has no gold labels and no annotations there")
            print_scores(f"{self.subcommand}", scores)

    def predict(self, **kwargs: Any) -> None:
        """Write ``predictions.csv`` into a folder of its own."""
        if self.trainer.num_devices * self.trainer.num_nodes > 1:
            raise UserError("lfc predict runs in one process; set --trainer.devices=1")
        config = self.config[self.subcommand]
        batches = self.trainer.predict(**kwargs, return_predictions=True, weights_only=True)
        split = self.datamodule.predict_split
        probabilities = torch.zeros(len(self.datamodule.datasets[split]), self.model.head.num_classes)
        for items, p in batches or []:
            probabilities[items] = p.float().cpu()
        root, experiment, _ = self._place(config)
        folder = new_folder(root, experiment, config.run.name or "predict")
        write_table(folder / "predictions.csv", prediction_rows(self.datamodule, split, probabilities))
        Console().print(f"{len(probabilities)} predictions in {folder / 'predictions.csv'}", soft_wrap=True)


def print_closing_table(metrics: dict[str, Any], folder: Path) -> None:
    """The scores of a run, and where everything is."""
    print_scores(f"{metrics['head']} on {metrics['data']}, seed {metrics['seed']}", metrics)
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(Path.cwd())
    console = Console()
    console.print(f"[bold]{folder}[/bold]/", soft_wrap=True)
    told = {
        "metrics.json": "these scores and more",
        "history.csv": "every epoch",
        "labels.csv": "the annotated items' inferred labels",
        "annotators.csv": "how good each annotator is",
        "confusion.npz": "what they confuse",
        "predictions.csv": "the test split",
        "checkpoints/best.ckpt": f"epoch {metrics['best_epoch']}, by {metrics['monitor'] or 'being the last'}",
        "config.yaml": "to run it again",
    }
    for name, text in told.items():
        if (folder / name).exists():
            console.print(f"  {name:<22} {text}", highlight=False, soft_wrap=True)


MEANING = {
    "train/loss": "mean training loss, last epoch",
    "val/acc": "accuracy on the validation split, best epoch",
    "val/nll": "negative log-likelihood there",
    "val/annotation_nll": "of held-out annotations, no gold needed",
    "test/acc": "accuracy on the test split",
    "test/f1": "macro F1",
    "test/nll": "negative log-likelihood",
    "test/ece": "calibration error",
    "test/kl": "divergence from the human label distribution",
    "test/manhattan": "distance from the human label distribution",
    "labels/acc": "annotated items' inferred labels against gold",
    "labels/majority_acc": "the same of a plain majority vote",
    "annotators/i_js": "annotators' matrices against gold, 0 is best",
    "annotators/g_js": "the crowd's matrix against gold, 0 is best",
    "annotators/auroc": "finding the wrong labels, 1 is best",
}


def print_scores(title: str, metrics: dict[str, Any]) -> None:
    """Scores with what they mean."""
    table = Table(title=title, title_justify="left", show_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("score", style="bold", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("")
    order = {name: rank for rank, name in enumerate(MEANING)}
    for name in sorted((key for key in metrics if "/" in key), key=lambda key: order.get(key, len(order))):
        table.add_row(name, f"{metrics[name]:.4f}", MEANING.get(name, ""))
    if "seconds" in metrics:
        table.add_row(
            "seconds",
            f"{metrics['seconds']:.1f}",
            f"{metrics['epochs']} epochs, peak memory {metrics['peak_memory_mb']} MB",
        )
    Console().print(table)


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names)})" if len(names) > 5 else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what Lightning says to its own developers."""
    for name in ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_only_notes)
    with warnings.catch_warnings():
        if not os.environ.get("LFC_DEBUG"):
            for message in (
                ".*does not have many workers.*",
                ".*The number of training batches.*",
                ".*available but not used.*",
                ".*is an instance of `nn.Module`.*",
                ".*exists and is not empty.*",
                ".*using uninitialized storage.*",
                ".*jsonargparse.*",
                ".*deprecated.*",
                ".*The ``compute`` method of metric.*",
                ".*LightningCLI's args parameter.*",
                ".*callbacks used to create the checkpoint.*",
                ".*sync_dist=True.*",  # scores are equal on every rank already
            ):
                warnings.filterwarnings("ignore", message=message)
        yield


def _only_notes(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.getMessage().startswith("note:")


def _help(command: str) -> dict[str, Any]:
    """What ``lfc COMMAND --help`` says before it lists the options."""
    kinds = {kind: ", ".join(sorted(concrete(base))) for kind, base in KINDS.values()}
    return {
        "exit_on_error": False,
        "usage": f"lfc {command} --config FILE [--option=value ...]",
        "description": (
            f"{COMMANDS[command].capitalize()}. Most used: --model.head ({kinds['head']}), --model.backbone "
            f"({kinds['backbone']}), --data ({kinds['datamodule']}) and their options, listed by "
            "--model.head.help=NAME, --model.backbone.help=NAME and --data.help=NAME; --data.path, "
            "--trainer.max_epochs, --model.optimizer.lr, --seed_everything, and those of --run at the end. "
            "A config file holds the same names; --config comes first."
        ),
    }


def run(argv: list[str]) -> None:
    """One command of :data:`lfc.cli.COMMANDS`."""
    CLI.requested = argv[0]
    for group in ("heads", "backbones", "datamodules", "aggregators"):
        for plugin in entry_points(group=f"lfc.{group}"):
            plugin.load()
    with _quiet():
        try:
            CLI(
                CrowdClassifier,
                CrowdDataModule,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                seed_everything_default=0,
                save_config_callback=None,
                # without allow_abbrev=False a misspelt option might pass for another
                parser_kwargs={"exit_on_error": False, "allow_abbrev": False, CLI.requested: _help(CLI.requested)},
                args=argv,
            )
        except ArgumentError as error:
            raise UserError(explain(str(error))) from error
        except MisconfigurationException as error:
            raise UserError(str(error)) from error
