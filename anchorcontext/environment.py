"""What this machine and this Python environment offer: for ``doctor`` and beside measurements."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from .kernels import cpu_library, engine_report, get_engine
from .words import counted

PACKAGE = "anchorcontext"
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackageState:
    """A package that we need, or that one of our extras brings."""

    name: str
    needed: str
    """Range of versions, as a specifier."""
    extra: str
    """The extra that brings it; empty: always needed."""
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether an installed version lies in the range; true of an optional one left out."""
        if self.installed is None:
            return bool(self.extra)
        return Requirement(f"{self.name}{self.needed}").specifier.contains(
            self.installed, prereleases=True
        )

    @property
    def advice(self) -> str:
        """The line that mends or adds it; empty where nothing has to be done."""
        if self.installed is not None and self.fits:
            return ""
        source = f"{PACKAGE}[{self.extra}]" if self.extra else f"{self.name}{self.needed}"
        return f"pip install '{source}'"


@dataclass(frozen=True)
class EngineState:
    """One attention engine on one kind of device."""

    name: str
    device: str
    dtype: str
    reason: str | None
    """Why it cannot serve; None when it can."""
    chosen: bool
    """Whether ``attention.engine: auto`` takes it."""


@dataclass(frozen=True)
class Environment:
    """Machine, devices, packages, engines and warnings."""

    machine: dict[str, str]
    devices: tuple[str, ...]
    packages: tuple[PackageState, ...]
    engines: tuple[EngineState, ...]
    warnings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether everything that is needed is there, in a version that fits."""
        return all(package.fits for package in self.packages)


def examine() -> Environment:
    """Look at this process's machine and environment; starts nothing, takes no memory on a GPU."""
    return Environment(
        machine=_machine(),
        devices=tuple(_devices()),
        packages=tuple(_packages()),
        engines=tuple(_engines()),
        warnings=tuple(_warnings()),
    )


def cores() -> str:
    """This machine's cores, in words."""
    return counted(os.cpu_count() or 1, "core")


def measured_on(device: torch.device | None = None) -> str:
    """Where and when a figure was taken: processor, torch's version, date; ``None``: the CPU."""
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}, {datetime.date.today()}"


def _machine() -> dict[str, str]:
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "process groups": ", ".join(backends) or "none",
    }


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        found.append(
            f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB, "
            f"sm_{device.major}{device.minor}"
        )
    return found


def _packages() -> list[PackageState]:
    found = []
    for line in importlib.metadata.requires(PACKAGE) or []:
        requirement = Requirement(line)
        extra = _extra_of(requirement)
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        found.append(PackageState(requirement.name, str(requirement.specifier), extra, installed))
    return found


def _extra_of(requirement: Requirement) -> str:
    marker = str(requirement.marker or "")
    return marker.split('extra == "')[1].split('"')[0] if "extra ==" in marker else ""


def _engines() -> list[EngineState]:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = []
    for kind in kinds:
        device = torch.device(kind)
        for dtype in DTYPES:
            auto = get_engine(device=device, dtype=dtype).name
            for name, reason in engine_report(device, dtype).items():
                found.append(
                    EngineState(name, kind, str(dtype).removeprefix("torch."), reason, name == auto)
                )
    return found


def _warnings() -> list[str]:
    found = []
    spec = importlib.util.find_spec("kernels")
    ours = Path(__file__).resolve().parent.parent / "kernels"
    if spec is not None and spec.origin and Path(spec.origin).resolve().parent == ours:
        found.append(
            f"the checkout {ours.parent} is on sys.path, where its folder kernels/ hides the "
            "Hugging Face package of that name: set PYTHONSAFEPATH=1, or start elsewhere"
        )
    if not torch.cuda.is_available():
        found.append("no GPU: everything runs on the CPU, in the cpu engine, over gloo")
    missing = cpu_library.why_not()
    if missing is not None:
        found.append(f"attention on the CPU goes through torch alone, which is slower: {missing}")
    return found
