"""Attention across ranks: a plan bound to a process group, shards, and the exchange of keys."""

from .attention import distributed_attention
from .mesh import Mesh, build_mesh
from .meter import Meter
from .plan import Plan, make_plan
from .rotation import check_positions, plan_rotations
from .sharding import LocalShard, shard, unshard

__all__ = [
    "LocalShard",
    "Mesh",
    "Meter",
    "Plan",
    "build_mesh",
    "check_positions",
    "distributed_attention",
    "make_plan",
    "plan_rotations",
    "shard",
    "unshard",
]
