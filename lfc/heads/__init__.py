"""Heads: what is learned from the annotations, one paper a file."""

from lfc.heads.base import AnnotatorTable, ConfusionHead, Head
from lfc.heads.cmm import CMM
from lfc.heads.crowd_layer import CrowdLayer
from lfc.heads.dl_em import DLEM
from lfc.heads.gold import Gold
from lfc.heads.lia import LIA
from lfc.heads.majority import MajorityVote
from lfc.heads.spee_lfc import SpeeLFC, SpeeLFCD
from lfc.heads.two_stage import TwoStage

__all__ = [
    "CMM",
    "DLEM",
    "LIA",
    "AnnotatorTable",
    "ConfusionHead",
    "CrowdLayer",
    "Gold",
    "Head",
    "MajorityVote",
    "SpeeLFC",
    "SpeeLFCD",
    "TwoStage",
]
