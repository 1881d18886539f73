"""Weights & Biases: a mirror of the run folder for people to look at; never the only record, and never in the way."""

import os
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_info

from lfc.report import Report

Mode = Literal["auto", "online", "offline", "off"]


def resolve_mode(mode: Mode) -> Literal["online", "offline", "off"]:
    """What the user asked for, else what ``WANDB_MODE`` says, else online where they are logged in."""
    said = os.environ.get("WANDB_MODE", "") if mode == "auto" else mode
    if said in ("off", "disabled"):
        return "off"
    if said in ("online", "shared"):
        return "online"
    if said in ("offline", "dryrun"):
        return "offline"
    import wandb

    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except Exception:  # a broken settings file must not stop a training
        return "offline"


class Mirror:
    """One W&B run of our own, so that two runs of a process stay apart.

    Args:
        folder: The run folder; an offline run is kept in it.
        mode: See :func:`resolve_mode`.
        project: W&B project.
        experiment: W&B group.
        head: W&B job type.
        config: Flat and nested settings to show.
    """

    def __init__(
        self,
        folder: Path,
        mode: Literal["online", "offline"],
        *,
        project: str,
        experiment: str,
        head: str,
        config: dict[str, Any],
    ) -> None:
        import wandb

        def start(mode: Literal["online", "offline"]) -> Any:
            settings = wandb.Settings(silent=True, console="off", init_timeout=15, disable_git=True, save_code=False)
            return wandb.init(
                project=project,
                group=experiment,
                name=folder.name,
                job_type=head,
                dir=folder,
                config=config,
                mode=mode,
                reinit="create_new",
                settings=settings,
            )

        try:
            self.run = start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            rank_zero_info(f"note: W&B cannot be reached ({type(error).__name__}); logging offline")
            wandb.teardown()
            self.run = start("offline")
        self.logger = WandbLogger(experiment=self.run)

    def send(self, report: Report, reveal: bool, best: Path | None) -> None:
        """The annotators under pseudonyms, pictures of the busiest ones' matrices, and the best checkpoint.

        Args:
            report: What a test found.
            reveal: Whether to send the annotators' own ids.
            best: The checkpoint to keep, if any.
        """
        import wandb

        header, *rows = report.annotator_rows(pseudonyms=not reveal)
        self.run.log({"annotators": wandb.Table(columns=header, data=[[str(cell) for cell in row] for row in rows])})
        if "confusion" in report.known:
            busiest = report.labels.argsort(descending=True, stable=True)[:6]
            pictures = [
                wandb.Image(heat_map(report.known["confusion"][r]), caption=rows[r][0]) for r in busiest.tolist()
            ]
            self.run.log({"confusion": pictures})
        if best is not None:
            artifact = wandb.Artifact(f"{self.run.name}-best".replace("/", "-"), type="model")
            artifact.add_file(str(best))
            self.run.log_artifact(artifact)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the final scores and end the run."""
        self.run.summary.update(summary)
        self.run.finish()


def heat_map(matrix: Any, cell: int = 24) -> Any:
    """A matrix of probabilities as a grey picture, dark where it is likely; true classes down, labels across."""
    from PIL import Image

    shades = (255 - matrix.clamp(0, 1) * 255).byte().numpy()
    return Image.fromarray(shades).resize((shades.shape[1] * cell, shades.shape[0] * cell), Image.Resampling.NEAREST)
