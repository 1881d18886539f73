"""The LightningModule: backbone, then head; the only file that knows of ranks."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, cast

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lfc.backbones.base import Backbone
from lfc.batch import CrowdBatch
from lfc.datamodules.base import CrowdDataModule
from lfc.errors import UserError
from lfc.heads.base import AnnotatorTable, Head
from lfc.metrics import Scores
from lfc.optim import Chained, RowAdam
from lfc.report import Report

MANY_ANNOTATORS = 10_000
"""From here on a dense update of every annotator costs more than the rest of the step."""


class CrowdClassifier(LightningModule):
    """A classifier learned from annotations: the backbone makes features, the head makes a loss of them.

    Args:
        backbone: Turns inputs into features.
        head: Turns features and annotations into a loss.
        optimizer: Any optimiser of ``torch.optim``; its ``lr`` is that of all parameters without a rate of their own.
        lr_scheduler: Any scheduler of ``torch.optim.lr_scheduler``.
        lr_interval: Whether the scheduler steps every ``epoch`` or every ``step``.
        backbone_lr: Learning rate of the backbone, if another.
        head_lr: Learning rate of the head's network, if another.
        annotator_lr: Learning rate of the annotators' parameters, if another. They know no weight decay.
        annotator_update: How the annotators' parameters are updated: ``dense`` as all others, every annotator in every
            step, or ``rows``, only those of the batch (:class:`lfc.optim.RowAdam`, which makes up for the steps a row
            was absent). ``auto`` takes ``rows`` for Adam and AdamW from ten thousand annotators on.
    """

    prepared: Tensor

    def __init__(
        self,
        backbone: Backbone,
        head: Head,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        backbone_lr: float | None = None,
        head_lr: float | None = None,
        annotator_lr: float | None = None,
        annotator_update: Literal["auto", "dense", "rows"] = "auto",
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():  # that modules are in the checkpoint already; see on_save_checkpoint
            warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`.*")
            self.save_hyperparameters(logger=False)
        self.backbone, self.head = backbone, head
        self.optimizer, self.lr_scheduler, self.lr_interval = optimizer, lr_scheduler, lr_interval
        self.lrs = {"backbone": backbone_lr, "head": head_lr, "annotators": annotator_lr}
        self.annotator_update = annotator_update
        self.register_buffer("prepared", torch.tensor(False))
        self.val_scores, self.test_scores = Scores(head.num_classes), Scores(head.num_classes, full=True)
        self.report: Report | None = None
        """What the last test found of the annotated items and the annotators."""

    # the model

    def forward(self, inputs: Any) -> Tensor:
        """``log p(class | input)``, ``(B, K)``."""
        with self._float32():
            return self.head(self.features(inputs))

    def features(self, inputs: Any) -> Tensor:
        """The backbone's output ``(B, D)`` in float32, whatever precision it runs in."""
        if not torch.is_autocast_enabled(self.device.type):
            return self.backbone(inputs).float()
        with torch.autocast(self.device.type, enabled=True):
            return self.backbone(inputs).float()

    def _float32(self) -> torch.autocast:
        """Heads work in log space, which half precision ruins."""
        return torch.autocast(self.device.type, enabled=False)

    # training

    def setup(self, stage: str) -> None:
        """Say which gradients will be sparse; DDP asks before there is an optimiser."""
        if stage == "fit" and self.tables:
            by_row = self._by_row(self.optimizer([nn.Parameter(torch.zeros(1))]))
            for table in self.tables:
                table.sparse = by_row

    def on_fit_start(self) -> None:
        """Let backbone and head look at the data once; a resumed run has that in its checkpoint."""
        data = self.data
        if self.head.needs_gold and not data.has_gold("train"):
            name = type(self.head).__name__
            raise UserError(f"{name} is trained on gold labels and no training item has one; choose another head")
        if self.prepared:
            return
        if type(self.backbone).prepare is not Backbone.prepare:
            loader = data.loader("train", rank=0, world=1)
            self.backbone.prepare(batch.to(self.device).inputs for batch in loader)
        self.head.prepare(data.crowd().to(self.device))
        self.prepared.fill_(True)

    @property
    def data(self) -> CrowdDataModule:
        """The datamodule being trained on."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, CrowdDataModule):
            raise UserError("CrowdClassifier needs a CrowdDataModule; pass it as trainer.fit(model, datamodule=data)")
        return data

    def on_train_epoch_start(self) -> None:
        """Make the epoch's randomness a function of seed and epoch, so that a resumed run is the same run; do EM."""
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        torch.manual_seed((seed * 100_003 + self.current_epoch) * self.trainer.world_size + self.global_rank)
        self._loss = torch.zeros(2, device=self.device)  # summed loss, items
        if self.head.em_every and self.current_epoch % self.head.em_every == 0:
            self.head.m_step(self.e_step(), self.data.crowd().to(self.device))

    def training_step(self, batch: CrowdBatch, batch_idx: int) -> Tensor:
        """The head's loss of a batch."""
        features = self.features(batch.inputs)
        with self._float32():
            loss = self.head.loss(features, batch)
        with torch.no_grad():
            self._loss[0] += loss.detach() * len(batch)
            self._loss[1] += len(batch)
        if (batch_idx + 1) % cast(Any, self.trainer).log_every_n_steps == 0:
            for logger in self.loggers:  # self.log would cost half a millisecond in every step
                logger.log_metrics({"train/batch_loss": loss.item(), "epoch": self.current_epoch}, self.global_step)
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the mean loss over the epoch's items, whatever rank saw them; no row is late, even without validation."""
        self.catch_up()
        total = self.trainer.strategy.reduce(self._loss, reduce_op="sum")
        self.log("train/loss", cast(Tensor, total)[0] / cast(Tensor, total)[1], rank_zero_only=True)

    @torch.no_grad()
    def e_step(self) -> Tensor:
        """The head's E-step of every training item, ``(N, ...)``, equal on every rank."""
        table: Tensor | None = None
        self.eval()
        for batch in self._shard():
            rows = self.head.e_step(self.features(batch.inputs), batch)
            if table is None:
                table = rows.new_zeros(self.head.num_items, *rows.shape[1:])
            table[batch.items] = rows
        self.train()
        return cast(Tensor, self.trainer.strategy.reduce(table, reduce_op="sum"))

    def _shard(self) -> Iterator[CrowdBatch]:
        """This rank's share of the training items, each once, in order."""
        for batch in self.data.loader("train"):
            yield batch.to(self.device)

    # evaluation

    def on_validation_start(self) -> None:
        """Bring every annotator's row to the present step before it is scored and saved."""
        self.catch_up()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save rows that are up to date, and the sizes and classes that a later command needs."""
        if any(isinstance(value, nn.Module) for value in checkpoint.get("hyper_parameters", {}).values()):
            del checkpoint["hyper_parameters"]  # built in Python, not by the command line: only pickle could hold it
        sizes = ("in_features", "num_classes", "num_annotators", "num_items")
        checkpoint["lfc"] = {name: getattr(self.head, name) for name in sizes}
        checkpoint["lfc"]["backbone_in_features"] = getattr(self.data, "in_features", None)
        checkpoint["lfc"]["classes"] = list(self.data.classes)
        checkpoint["lfc"]["annotators"] = self.data.annotators_digest

    def validation_step(self, batch: CrowdBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch against its gold labels, and under the head its annotations, none of which were trained on."""
        features = self.features(batch.inputs)
        with self._float32():
            if batch.gold is not None:
                self.val_scores.update(self.head(features), batch)
            self.val_scores.update_annotations(self.head.annotation_log_prob(features, batch))

    def on_validation_epoch_end(self) -> None:
        """Log the validation scores."""
        self.log_dict(self.val_scores.compute("val"), rank_zero_only=True)
        self.val_scores.reset()

    def on_test_start(self) -> None:
        """Begin a new report."""
        self.report = Report(self.data, self.head, self.device)

    def test_step(self, batch: CrowdBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of the test split, or infer the labels of annotated items and what they say of annotators."""
        assert self.report is not None
        features = self.features(batch.inputs)
        with self._float32():
            if self.data.test_splits[dataloader_idx] == "test":
                log_probs = self.head(features)
                self.test_scores.update(log_probs, batch)
                self.report.predictions[batch.items] = log_probs.exp()
            else:
                self.report.update(self.head, features, batch)

    def on_test_epoch_end(self) -> None:
        """Complete the report over all ranks and log its scores."""
        assert self.report is not None
        self.report.reduce(lambda tensor, how: cast(Tensor, self.trainer.strategy.reduce(tensor, reduce_op=how)))
        scores = self.test_scores.compute("test") | self.report.scores()
        self.log_dict(scores, rank_zero_only=True)
        self.test_scores.reset()

    def predict_step(self, batch: CrowdBatch, batch_idx: int, dataloader_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Which items, ``(B,)``, and ``p(class | input)``, ``(B, K)``."""
        return batch.items, self(batch.inputs).exp()

    # optimisation

    @property
    def tables(self) -> list[AnnotatorTable]:
        """The head's tables of annotators' parameters."""
        return [module for module in self.head.modules() if isinstance(module, AnnotatorTable)]

    def catch_up(self) -> None:
        """Bring every row of the annotators' tables to the present step, where they are updated by row."""
        for table in self.tables:
            if table.before_read is not None:
                table.before_read(None)

    def configure_optimizers(self) -> Any:
        """One optimiser over backbone, head and annotators, each with its rate, and its scheduler."""
        tables = [table.weight for table in self.tables if table.weight.requires_grad]
        ids = {id(weight) for weight in tables}
        parts = {
            "backbone": [p for p in self.backbone.parameters() if p.requires_grad],
            "head": [p for p in self.head.parameters() if p.requires_grad and id(p) not in ids],
        }
        optimizer = self.optimizer([self._group(name, part) for name, part in parts.items() if part])
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and optimizer.defaults["foreach"] is None:
            for group in optimizer.param_groups:
                group["fused"] = True if group["fused"] is None else group["fused"]
        if tables and self._by_row(optimizer):
            rate = optimizer.defaults["lr"] if self.lrs["annotators"] is None else self.lrs["annotators"]
            rows = RowAdam(tables, lr=rate, betas=optimizer.defaults["betas"], eps=optimizer.defaults["eps"])
            for table in self.tables:
                table.sparse, table.before_read = True, partial(rows.advance, table.weight)
            optimizer = Chained([rows, optimizer])
        elif tables:
            group = self._group("annotators", tables)
            fused = optimizer.param_groups[0].get("fused")
            extra = {"fused": fused} if fused is not None else {}
            optimizer.add_param_group(
                group | extra | ({"weight_decay": 0.0} if "weight_decay" in optimizer.defaults else {})
            )
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        settings: dict[str, Any] = {"scheduler": scheduler, "interval": self.lr_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            settings["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def _group(self, name: str, params: list[Any]) -> dict[str, Any]:
        return {"params": params} | ({} if self.lrs[name] is None else {"lr": self.lrs[name]})

    def _by_row(self, optimizer: Optimizer) -> bool:
        """Whether the annotators' tables are to be updated by row."""
        trainer = self._trainer  # None in a bare loop
        obstacles = {
            "rows are updated as Adam does, so the optimizer must be Adam or AdamW": not isinstance(
                optimizer, torch.optim.Adam | torch.optim.AdamW
            )
            or optimizer.defaults.get("amsgrad", False),
            "gradient clipping does not know sparse gradients": bool(trainer and trainer.gradient_clip_val),
            "this strategy does not know sparse gradients": trainer is not None
            and not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy),
            "NCCL does not sum sparse gradients": trainer is not None
            and isinstance(trainer.strategy, DDPStrategy)
            and trainer.strategy.root_device.type == "cuda",
        }
        reasons = [reason for reason, holds in obstacles.items() if holds]
        if self.annotator_update == "rows" and reasons:
            raise UserError(f"--model.annotator_update=rows: {reasons[0]}; take --model.annotator_update=dense")
        if self.annotator_update == "auto":
            return not reasons and self.head.num_annotators >= MANY_ANNOTATORS
        return self.annotator_update == "rows"
