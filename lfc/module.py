"""The LightningModule: backbone, then head; the only file that knows of ranks."""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
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


def split_task(inputs: Any) -> tuple[Any, Tensor | None]:
    """What the backbone reads, and the task ``(B,)`` of each item where a datamodule serves several."""
    if isinstance(inputs, dict) and "task" in inputs:
        return inputs["inputs"], inputs["task"]
    return inputs, None


@dataclass
class EM:
    """Where EM stands; a checkpoint keeps it."""

    round: int = 0
    """Rounds done since the last start."""
    epochs: int = 0
    """Epochs done in this round, or of fine-tuning."""
    objective: float = math.nan
    """Log-likelihood and log-prior that the last E-step found."""
    finetuning: bool = False
    over: bool = False
    """Whether the next epoch begins another start."""
    done: bool = False
    """Whether the last start is over."""
    start: int = 0
    """Which start this is, from 0."""
    best: float = -math.inf
    """What the best start ended with."""
    weights: dict[str, Tensor] | None = None
    """Where the best start ended."""


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
        restarts: How many times a head with EM starts from other random numbers, one after the other. Training ends
            with the best of them.
        restart_criterion: Which of them is the best: that of the greatest ``likelihood`` (with the priors), or of the
            greatest agreement of inferred labels with the ``majority`` vote, since a crowd explained best may be one
            whose classes have changed places.
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
        restarts: int = 1,
        restart_criterion: Literal["likelihood", "majority"] = "likelihood",
    ) -> None:
        super().__init__()
        if restarts > 1 and not (head.em_every or head.em_steps):
            raise UserError(f"--model.restarts={restarts}: {type(head).__name__} has no EM to restart; take 1")
        with warnings.catch_warnings():  # that modules are in the checkpoint already; see on_save_checkpoint
            warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`.*")
            self.save_hyperparameters(logger=False)
        self.backbone, self.head = backbone, head
        self.optimizer, self.lr_scheduler, self.lr_interval = optimizer, lr_scheduler, lr_interval
        self.lrs = {"backbone": backbone_lr, "head": head_lr, "annotators": annotator_lr}
        self.annotator_update = annotator_update
        self.restarts, self.restart_criterion = restarts, restart_criterion
        self.em = EM()
        self.recorded: dict[str, float] = {}
        """What was found of the last epoch: its mean loss, and where EM stands."""
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
        """The backbone's output ``(B, D)`` in float32, whatever its precision; then the task, if there are many."""
        inputs, task = split_task(inputs)
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=True):
                features = self.backbone(inputs).float()
        else:
            features = self.backbone(inputs).float()
        if task is None:
            return features
        return torch.cat([features, nn.functional.one_hot(task, self.head.num_tasks).float()], -1)

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
        # a head's buffers are equal on every rank; DDP would send them around in every step
        self._ddp_params_and_buffers_to_ignore = [f"head.{name}" for name, _ in self.head.named_buffers()]

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
            self.backbone.prepare(split_task(batch.to(self.device).inputs)[0] for batch in loader)
        with self._drawing():
            self.head.prepare(self._crowd)
        self.prepared.fill_(True)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Random numbers that depend on seed and start alone, so that every rank draws the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + self.em.start)
            yield

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0))

    @property
    def _crowd(self) -> CrowdBatch:
        """Every training annotation."""
        return self.data.crowd().to(self.device)

    @property
    def data(self) -> CrowdDataModule:
        """The datamodule being trained on."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, CrowdDataModule):
            raise UserError("CrowdClassifier needs a CrowdDataModule; pass it as trainer.fit(model, datamodule=data)")
        return data

    def on_train_start(self) -> None:
        """Lay out the rounds of EM over the epochs there are."""
        head, batches, epochs = self.head, int(self.trainer.num_training_batches), self.trainer.max_epochs or -1
        self._round_epochs = head.em_every or -(-head.em_steps // max(batches, 1))
        self._finetune_epochs = -(-head.finetune_steps // max(batches, 1))
        if not head.em_steps or head.em_every or head.em_rounds is None or epochs < 0:
            return
        wanted = head.em_rounds * self._round_epochs + self._finetune_epochs
        if wanted * self.restarts > epochs:
            share = epochs / self.restarts / wanted
            self._round_epochs = max(1, int(self._round_epochs * share))
            self._finetune_epochs = int(self._finetune_epochs * share)
            rank_zero_info(
                f"note: {type(head).__name__} would take {wanted * self.restarts} epochs; there are {epochs}, so a "
                f"round has {self._round_epochs} and fine-tuning {self._finetune_epochs} (--trainer.max_epochs)"
            )

    def on_train_epoch_start(self) -> None:
        """Make the epoch's randomness a function of seed and epoch, so that a resumed run is the same run."""
        torch.manual_seed((self._seed * 100_003 + self.current_epoch) * self.trainer.world_size + self.global_rank)
        self._loss = torch.zeros(2, device=self.device)  # summed loss, items
        if self.em.over:
            self._next_start()

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

    def on_train_batch_end(self, outputs: Any, batch: CrowdBatch, batch_idx: int) -> None:
        """After the last batch, before anything is validated or saved: no row is late, and EM has its say."""
        if not self.trainer.is_last_batch:
            return
        self.catch_up()
        total = cast(Tensor, self.trainer.strategy.reduce(self._loss, reduce_op="sum"))
        self._record({"train/loss": (total[0] / total[1]).item()})
        if (self.head.em_every or self.head.em_steps) and not self.em.done:
            self._em_epoch()

    def on_train_epoch_end(self) -> None:
        """Let callbacks see the mean loss over the epoch's items, whatever rank saw them."""
        self.log_dict(self.recorded, logger=False, rank_zero_only=True)

    def _record(self, scores: dict[str, float]) -> None:
        """Log at once: what a logger hears at the end of an epoch, a run killed while it saves has lost."""
        self.recorded = scores if "train/loss" in scores else self.recorded | scores
        for logger in self.loggers:
            logger.log_metrics(scores | {"epoch": self.current_epoch}, self.global_step - 1)

    def on_train_end(self) -> None:
        """Pass on the head's doubts."""
        for line in self.head.warnings():
            rank_zero_warn(line)

    # EM

    def _em_epoch(self) -> None:
        """An epoch is over: perhaps a round is, perhaps EM, perhaps this start, perhaps all."""
        em, head = self.em, self.head
        em.epochs += 1
        over = False
        if em.finetuning:
            over = em.epochs >= self._finetune_epochs
        elif em.epochs >= self._round_epochs:
            rows, objective = self.e_step()
            change = head.m_step(rows, self._crowd)
            em.round, em.epochs = em.round + 1, 0
            scores = {"train/em_objective": objective, "train/em_round": float(em.round)}
            self._record(scores | ({"train/em_start": float(em.start)} if self.restarts > 1 else {}))
            small = abs(objective - em.objective) <= head.em_tol * abs(em.objective)  # never at first: it is NaN
            converged = head.em_tol > 0 and small and (change is None or float(change) <= head.em_tol)
            em.objective = objective
            if converged or em.round == head.em_rounds:
                over = not self._finetune_epochs
                em.finetuning = head.finetuning = not over
        if over or (self.restarts > 1 and self.current_epoch + 1 == self.trainer.max_epochs):
            self._end_start()

    def _end_start(self) -> None:
        """This start has come to its end: the next epoch begins another, or training ends with the best."""
        em = self.em
        if self.restarts > 1 and (score := self._score()) > em.best:
            em.best = score
            em.weights = {name: value.detach().cpu().clone() for name, value in self.state_dict().items()}
        if em.start + 1 < self.restarts and self.current_epoch + 1 != self.trainer.max_epochs:
            em.over = True
            return
        if em.weights is not None:
            self.load_state_dict(em.weights)
            em.weights = None
        em.done = self.trainer.should_stop = True

    def _next_start(self) -> None:
        """Begin anew from other random numbers."""
        self.em = EM(start=self.em.start + 1, best=self.em.best, weights=self.em.weights)
        self.head.finetuning = False
        with self._drawing():
            self.backbone.restart()
            self.head.restart(self._crowd)
        self.trainer.strategy.setup_optimizers(self.trainer)

    def _score(self) -> float:
        """By what starts are compared."""
        if self.restart_criterion == "likelihood":
            return self.e_step()[1]
        agreed = torch.zeros(2, device=self.device)
        with self._inference():
            for batch in self._shard():
                votes = batch.votes(self.head.num_classes)
                label = self.head.posterior(self.features(batch.inputs), batch).argmax(-1, keepdim=True)
                most = votes.amax(-1)
                agreed[0] += ((votes.gather(1, label).squeeze(1) == most) & (most > 0)).sum()
                agreed[1] += (most > 0).sum()
        agreed = cast(Tensor, self.trainer.strategy.reduce(agreed, reduce_op="sum"))
        return (agreed[0] / agreed[1]).item()

    def e_step(self) -> tuple[Tensor, float]:
        """The head's E-step of every training item, ``(N, ...)``, and what EM maximises; equal on every rank."""
        table: Tensor | None = None
        objective = torch.zeros((), dtype=torch.float64)
        with self._inference():
            for batch in self._shard():
                features = self.features(batch.inputs)
                rows = self.head.e_step(features, batch)
                if table is None:
                    table = rows.new_zeros(self.head.num_items, *rows.shape[1:])
                table[batch.items] = rows
                objective += self.head.log_likelihood(features, batch).double().sum().cpu()
        reduce = partial(self.trainer.strategy.reduce, reduce_op="sum")
        total = cast(Tensor, reduce(objective)).item() + float(self.head.log_prior())
        return cast(Tensor, reduce(table)), total

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """No gradients, no dropout, float32."""
        training = [module for module in self.modules() if module.training]
        self.eval()
        with torch.no_grad(), self._float32():
            yield
        for module in training:
            module.training = True

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
        sizes = ("in_features", "num_classes", "num_annotators", "num_items", "num_tasks", "profile_features")
        checkpoint["lfc"] = {name: getattr(self.head, name) for name in sizes}
        checkpoint["lfc"]["backbone_in_features"] = getattr(self.data, "in_features", None)
        checkpoint["lfc"]["classes"] = list(self.data.classes)
        checkpoint["lfc"]["annotators"] = self.data.annotators_digest
        checkpoint["em"] = asdict(self.em)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on where EM stood."""
        self.em = EM(**checkpoint.get("em", {}))
        self.head.finetuning = self.em.finetuning

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
