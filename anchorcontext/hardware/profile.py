"""What a device and its links can do: named profiles, and the user's own by path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

PROFILES = Path(__file__).parent / "profiles"


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
    """The share of the peak that matrix products reach."""
    attention_fraction: float | None = None
    """The share that attention reaches; without it, that of matrix products."""
    seconds_per_tile: float = 0.0
    """What a tile of attention costs beyond its pairs, forward and backward."""

    def peak(self, dtype: str) -> float:
        """FLOP/s of the device at most; ``dtype`` is ``"bf16"`` or ``"fp32"``."""
        return self.peak_bf16_flops if dtype == "bf16" else self.peak_fp32_flops

    def flops(self, dtype: str) -> float:
        """FLOP/s that matrix products are assumed to reach."""
        return self.peak(dtype) * self.compute_fraction

    def attention_flops(self, dtype: str) -> float:
        """FLOP/s that attention is assumed to reach."""
        return self.peak(dtype) * (self.attention_fraction or self.compute_fraction)


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def profile_text(hardware: Hardware, remarks: Mapping[str, str], head: str) -> str:
    """A profile as YAML: ``head`` as comment lines, then one figure a line with its remark."""
    lines = [f"# {line}" for line in head.splitlines()]
    for key, value in asdict(hardware).items():
        if key == "name" or value is None:
            continue
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        remark = remarks.get(key)
        lines.append(f"{key}: {text}" + (f" # {remark}" if remark else ""))
    return "\n".join(lines) + "\n"


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
    optional = {field.name for field in fields(Hardware) if field.default is not MISSING}
    if not isinstance(values, dict):
        raise UserError(f"hardware {path}: holds no mapping; give the figures {', '.join(known)}")
    missing = [key for key in known if key not in values and key not in optional]
    unknown = [str(key) for key in values if key not in known]
    if missing or unknown:
        raise UserError(
            f"hardware {path}: lacks [{', '.join(missing)}], does not know [{', '.join(unknown)}]; "
            f"give exactly {', '.join(key for key in known if key not in optional)}, and "
            f"{' and '.join(sorted(optional))} where they were measured"
        )
    kind = values["kind"]
    if kind not in ("gpu", "cpu"):
        raise UserError(f"hardware {path}: kind = {kind!r} must be gpu or cpu; correct it")
    figures = {key: _positive(path, key, values[key]) for key in values if key != "kind"}
    for key in ("compute_fraction", "attention_fraction"):
        if figures.get(key, 0) > 1:
            raise UserError(
                f"hardware {path}: {key} = {figures[key]}: a share of the peak is at most 1; "
                "correct it"
            )
    devices = figures.pop("devices_per_node")
    return Hardware(name=path.stem, kind=kind, devices_per_node=int(devices), **figures)


def _positive(path: Path, key: str, value: Any) -> float:
    try:
        number = float(value)  # YAML 1.1 reads 312e12 as text
    except (TypeError, ValueError):
        number = -1.0
    if key == "seconds_per_tile" and number == 0:
        return 0.0
    if not 0 < number < float("inf") or (key == "devices_per_node" and number != int(number)):
        raise UserError(f"hardware {path}: {key} = {value!r} must be a positive number; correct it")
    return number
