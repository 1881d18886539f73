"""Label aggregation: one class an item from the votes alone, one method a file."""

from lfc.aggregation.base import Aggregation, Aggregator, Votes
from lfc.aggregation.dawid_skene import DawidSkene
from lfc.aggregation.glad import GLAD
from lfc.aggregation.majority import MajorityVote
from lfc.aggregation.mmce import MMCE

__all__ = ["GLAD", "MMCE", "Aggregation", "Aggregator", "DawidSkene", "MajorityVote", "Votes"]
