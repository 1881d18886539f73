"""What goes on beside training: the progress bar."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's rich bar, drawn now and then, since a bar that is drawn every step costs more than a small network.

    Args:
        refresh_rate: Steps between drawings.
        leave: Whether to leave a finished epoch's bar on the screen.
    """

    def __init__(self, refresh_rate: int = 20, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The latest scores under short names."""
        shown = {"train/loss": "loss", "val/acc": "acc", "val/annotation_nll": "nll"}
        scores = trainer.callback_metrics
        return {short: f"{scores[name].item():.3f}" for name, short in shown.items() if name in scores}
