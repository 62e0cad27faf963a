"""What a device and its links can do: named profiles, and the user's own by path."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

PROFILES = Path(__file__).parent / "profiles"
DEFAULT = "h100"


@dataclass(frozen=True)
class Hardware:
    """One device of a cluster of equal nodes. Rates are bytes or FLOP a second of one device."""

    name: str
    kind: str
    """``gpu`` or ``cpu``; on a CPU an allocated buffer takes memory where it is touched."""
    peak_bf16_flops: float
    """Dense matrix products of bf16 with fp32 accumulation."""
    peak_fp32_flops: float
    memory_bytes: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    """To other devices of the node, each way."""
    network_bytes_per_second: float
    """To other nodes, each way."""
    devices_per_node: int
    seconds_per_message: float
    """What a message costs beyond its bytes."""
    compute_fraction: float
    """The share of the peak that matrix products and attention reach."""

    def flops(self, dtype: str) -> float:
        """FLOP/s that a step is assumed to reach; ``dtype`` is ``"bf16"`` or ``"fp32"``."""
        peak = self.peak_bf16_flops if dtype == "bf16" else self.peak_fp32_flops
        return peak * self.compute_fraction


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_hardware(name: str) -> Hardware:
    """A named profile, or the one in the YAML file ``name``.

    Raises:
        UserError: no such profile or file; a figure is missing, unknown or not positive.
    """
    if name in profile_names():
        path = PROFILES / f"{name}.yaml"
    else:
        path = Path(name)
        if not path.is_file():
            near = difflib.get_close_matches(name, profile_names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"hardware {name!r}: neither a file nor one of {', '.join(profile_names())}{hint}"
            )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"hardware {path}: cannot be read ({error})") from error
    return _checked(path, values)


def _checked(path: Path, values: Any) -> Hardware:
    known = [field.name for field in fields(Hardware) if field.name != "name"]
    if not isinstance(values, dict):
        raise UserError(f"hardware {path}: holds no mapping; give the figures {', '.join(known)}")
    missing = [key for key in known if key not in values]
    unknown = [str(key) for key in values if key not in known]
    if missing or unknown:
        raise UserError(
            f"hardware {path}: lacks [{', '.join(missing)}], does not know [{', '.join(unknown)}]; "
            f"give exactly {', '.join(known)}"
        )
    kind = values["kind"]
    if kind not in ("gpu", "cpu"):
        raise UserError(f"hardware {path}: kind = {kind!r} must be gpu or cpu; correct it")
    figures = {key: _positive(path, key, values[key]) for key in known if key != "kind"}
    if figures["compute_fraction"] > 1:
        raise UserError(
            f"hardware {path}: compute_fraction = {figures['compute_fraction']}: a share of the "
            "peak is at most 1"
        )
    devices = figures.pop("devices_per_node")
    return Hardware(name=path.stem, kind=kind, devices_per_node=int(devices), **figures)


def _positive(path: Path, key: str, value: Any) -> float:
    try:
        number = float(value)  # YAML 1.1 reads 312e12 as text
    except (TypeError, ValueError):
        number = 0.0
    whole = key != "devices_per_node" or number == int(number)
    if not (0 < number < float("inf") and whole):
        raise UserError(f"hardware {path}: {key} = {value!r} must be a positive number; correct it")
    return number
