"""The sections of the config, one model a section, a file a group.

Rules that concern one key stand in its type (``types.py``); rules between keys in ``rules.py``.
"""

from __future__ import annotations

from anchorcontext.config.sections.attention import (
    AnchorSection,
    AttentionSection,
    LossSection,
    ParallelSection,
    PositionsSection,
    PrecisionSection,
)
from anchorcontext.config.sections.data import (
    DataSection,
    InterleaveSection,
    PackingSection,
    SourceSection,
    TrainTokenizerSection,
    UpsampleSection,
)
from anchorcontext.config.sections.evaluating import EvaluateSection
from anchorcontext.config.sections.model import ModelSection, RopeSection
from anchorcontext.config.sections.training import (
    CheckpointSection,
    GuardsSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    SnapshotsSection,
    SpikeSection,
    TrainSection,
)
from anchorcontext.config.sections.watching import (
    ParitySection,
    ProfileSection,
    WandbSection,
    WatchSection,
)

__all__ = [
    "AnchorSection",
    "AttentionSection",
    "CheckpointSection",
    "DataSection",
    "EvaluateSection",
    "GuardsSection",
    "InterleaveSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "PackingSection",
    "ParallelSection",
    "ParitySection",
    "PositionsSection",
    "PrecisionSection",
    "ProfileSection",
    "RopeSection",
    "RunSection",
    "ScheduleSection",
    "SnapshotsSection",
    "SourceSection",
    "SpikeSection",
    "TrainSection",
    "TrainTokenizerSection",
    "UpsampleSection",
    "WandbSection",
    "WatchSection",
]
