"""Backbones: what turns inputs into features, one family a file."""

from lfc.backbones.base import Backbone
from lfc.backbones.item_embedding import ItemEmbedding
from lfc.backbones.mlp import MLP

__all__ = ["MLP", "Backbone", "ItemEmbedding"]
