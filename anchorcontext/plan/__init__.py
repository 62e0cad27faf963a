"""The plan: which rank holds, sends and computes what, as data made once per micro-batch."""

from .batch import EXCHANGES, BatchPlan
from .cost import CostModel
from .heads import check_heads
from .layout import LAYOUTS
from .pieces import Pieces
from .steps import Anchors, Message, RankPlan, Rows, Step, Transfer

__all__ = [
    "EXCHANGES",
    "LAYOUTS",
    "Anchors",
    "BatchPlan",
    "CostModel",
    "Message",
    "Pieces",
    "RankPlan",
    "Rows",
    "Step",
    "Transfer",
    "check_heads",
]
