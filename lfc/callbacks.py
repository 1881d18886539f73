"""What goes on beside training: the progress bar, and keeping the best epoch."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar
from torch import Tensor


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best epoch and, of equals, the latest: a small split is soon all right while training goes on."""

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether this epoch is at least as good as the best so far."""
        equal = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return equal or super().check_monitor_top_k(trainer, current)


class ProgressBar(RichProgressBar):
    """Lightning's rich bar, drawn now and then, since a bar that is drawn every step costs more than a small network.

    Args:
        refresh_rate: Steps between drawings.
        leave: Whether to leave a finished epoch's bar on the screen.
    """

    def __init__(self, refresh_rate: int = 20, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Lightning's columns but the clock, so that the scores fit on the line."""
        return [column for column in super().configure_columns(trainer) if "Time" not in type(column).__name__]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The latest scores under short names."""
        shown = {"train/loss": "loss", "val/acc": "acc", "val/annotation_nll": "nll"}
        scores = trainer.callback_metrics
        return {short: f"{scores[name].item():.3f}" for name, short in shown.items() if name in scores}
