"""The plan: which rank holds, sends and computes what, as data made once per micro-batch."""

from .backends import BACKENDS, plan_batch
from .batch import EXCHANGES, BatchPlan
from .choice import Candidate, Choice
from .cost import CostModel
from .heads import check_heads
from .layout import LAYOUTS
from .pieces import Pieces
from .ring_flash_attn import RingFlashAttnPlan
from .steps import Anchors, Message, RankPlan, Rows, Step, Transfer

__all__ = [
    "BACKENDS",
    "EXCHANGES",
    "LAYOUTS",
    "Anchors",
    "BatchPlan",
    "Candidate",
    "Choice",
    "CostModel",
    "Message",
    "Pieces",
    "RankPlan",
    "RingFlashAttnPlan",
    "Rows",
    "Step",
    "Transfer",
    "check_heads",
    "plan_batch",
]
