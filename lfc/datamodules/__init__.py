"""Datamodules: what serves inputs and annotations, one kind of input a file."""

from lfc.datamodules.base import CrowdDataModule
from lfc.datamodules.features import FeatureDataModule
from lfc.datamodules.items import ItemDataModule
from lfc.datamodules.multi_task import MultiTaskDataModule
from lfc.datamodules.simulated import SimulatedDataModule

__all__ = ["CrowdDataModule", "FeatureDataModule", "ItemDataModule", "MultiTaskDataModule", "SimulatedDataModule"]
