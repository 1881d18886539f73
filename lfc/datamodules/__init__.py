"""Datamodules: what serves inputs and annotations, one kind of input a file."""

from lfc.datamodules.base import CrowdDataModule
from lfc.datamodules.features import FeatureDataModule

__all__ = ["CrowdDataModule", "FeatureDataModule"]
