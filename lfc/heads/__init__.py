"""Heads: what is learned from the annotations, one paper a file."""

from lfc.heads.base import AnnotatorTable, ConfusionHead, Head
from lfc.heads.crowd_layer import CrowdLayer
from lfc.heads.dl_em import DLEM
from lfc.heads.gold import Gold
from lfc.heads.majority import MajorityVote
from lfc.heads.spee_lfc import SpeeLFC, SpeeLFCD

__all__ = [
    "DLEM",
    "AnnotatorTable",
    "ConfusionHead",
    "CrowdLayer",
    "Gold",
    "Head",
    "MajorityVote",
    "SpeeLFC",
    "SpeeLFCD",
]
