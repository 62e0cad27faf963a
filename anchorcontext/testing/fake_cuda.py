"""CUDA tensors without a GPU, for tests: they have shape, strides, dtype and device, and no values.

Two mistakes that CPU tensors do not show make a program fail, or wait, on a GPU: an operation on
tensors of two devices, and a value that crosses between device and host in the middle of a layer.
Under torch's ``FakeTensorMode`` the first raises, and so does every value that the host reads.
`fake_cuda` adds what that mode lets pass: copies between host and device, and indices on the host,
raise outside of `Device.crossing`; and launches of Triton kernels are checked and recorded in
place of being made.

Autograd asks C++ for the device a gradient is on. A build of torch without CUDA answers once the
forty lines below are loaded before it, which takes a process of its own (tests/test_fake_cuda.py)::

    python anchorcontext/testing/fake_cuda.py tests/kernels/fake_cuda_kernels_cases.py

Builds with CUDA bring their own answer and need a GPU for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar
from unittest import mock

NUM_DEVICES = 2
_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr c10::DeviceIndex kCount = %d;
thread_local c10::DeviceIndex current = 0;

c10::Device device() { return {c10::DeviceType::CUDA, current}; }

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  return index < 0 ? current : std::exchange(current, index);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream on(c10::Device d) { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return {c10::DeviceType::CUDA, exchange(d.index())};
  }
  void setDevice(c10::Device d) const override { exchange(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange(d.index()); }
  c10::Stream getStream(c10::Device d) const noexcept override { return on(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return on(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return on(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kCount; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { exchange(i); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return exchange(i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchange(i); }
};
}  // namespace
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
"""


class NoFakeCuda(Exception):
    """Why this machine or this torch cannot have CUDA tensors without a GPU."""


def load_device() -> None:
    """Give a torch without CUDA devices that hold no memory; before torch is imported.

    Raises:
        NoFakeCuda: torch is imported already or built with CUDA, or no C++ compiler works.
    """
    if "torch" in sys.modules:
        raise NoFakeCuda("torch is imported already")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch_folder = Path(spec.submodule_search_locations[0])
    libraries = torch_folder / "lib"
    if (libraries / "libtorch_cuda.so").exists():
        raise NoFakeCuda("this torch is built with CUDA")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    options = f"-std=c++20 -O0 -shared -fPIC -I{torch_folder / 'include'} -x c++ -".split()
    links = f"-L{libraries} -lc10 -ltorch_cpu -Wl,-rpath,{libraries}".split()
    with tempfile.TemporaryDirectory(prefix="anchorcontext-") as folder:
        path = str(Path(folder) / "fake_cuda.so")
        try:
            done = subprocess.run(
                [*compiler, *options, "-o", path, *links],
                input=_SOURCE % NUM_DEVICES,
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoFakeCuda(f"no C++ compiler: {error}") from error
        if done.returncode:
            raise NoFakeCuda(f"{shlex.join(compiler)} fails: {done.stderr.strip()[:500]}")
        ctypes.CDLL(path)


@dataclass
class Launch:
    """One launch of a Triton kernel that was recorded."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


@dataclass
class Device:
    """What `fake_cuda` yields."""

    launches: list[Launch] = field(default_factory=list)
    current: int = 0
    """The current CUDA device."""
    copies: int = 0
    """Copies between host and device so far, those in the background included."""
    open: bool = False
    """Whether the host may wait for copies."""

    @contextlib.contextmanager
    def crossing(self) -> Iterator[None]:
        """Let the host wait for copies, as at the start of a micro-batch."""
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), *, watch: bool = True) -> Iterator[Device]:
    """In here, ``device="cuda"`` makes tensors without values on a device of ``capability``.

    Without ``watch`` copies between host and device pass: torch.compile compiles nothing while they
    are looked for.

    Tensors made before are unknown in here, and the other way round.
    """
    import torch

    class Unseeded(torch.Generator):
        def __new__(cls, device: Any = None) -> Unseeded:
            return super().__new__(cls)  # on the host: there is no state on the device

    found = Device()
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: NUM_DEVICES),
            (torch.cuda, "current_device", lambda: found.current),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device", type("device", (_Current,), {"found": found})),
            (torch.cuda, "Event", _Event),
            (torch, "Generator", Unseeded),
            (torch.Tensor, "pin_memory", lambda tensor: tensor),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_recorded_launches(found))
        for mode in _modes(found)[: 2 if watch else 1]:
            stack.enter_context(mode)
        yield found


class _Current:
    """``torch.cuda.device``."""

    found: ClassVar[Device]

    def __init__(self, device: Any) -> None:
        import torch

        self._index = device if isinstance(device, int) else torch.device(device).index or 0

    def __enter__(self) -> None:
        self._before, self.found.current = self.found.current, self._index

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.found.current = self._before


class _Event:
    """``torch.cuda.Event``; a millisecond lies between any two."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        """Nothing runs that could be waited for."""

    synchronize = record

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return 1.0


def _modes(found: Device) -> list[Any]:
    """FakeTensorMode, and before it one that looks for values that cross."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Fake(FakeTensorMode):
        @property
        def avoid_device_init(self) -> bool:
            return True  # torch.cuda.is_available says otherwise

    class Crossings(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            # A number on the host goes into a kernel by value; only copies of it cross.
            copies = any(word in str(func) for word in ("copy", "device_put"))
            devices = {x.device.type for x in [*given, *made] if copies or x.dim()}
            if not {"cpu", "cuda"} <= devices:
                return result
            found.copies += 1
            by_itself = copies and ((kwargs or {}).get("non_blocking") or args[-1] is True)
            if not by_itself and not found.open:
                shown = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in [*given, *made])
                raise AssertionError(f"{func} crosses between host and device: {shown}")
            return result

    return [Fake(allow_non_fake_inputs=False), Crossings()]


@contextlib.contextmanager
def _recorded_launches(found: Device) -> Iterator[None]:
    """Triton's launches, checked and recorded; tuning launches each candidate once."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        missing = set(self.arg_names) - set(arguments)
        assert not missing, f"{self.__name__} is launched without {missing}"
        fits = [0 < size < limit for size, limit in zip(grid, (2**31, 2**16, 2**16), strict=False)]
        assert all(fits) and len(grid) <= 3, f"{self.__name__}: grid {grid}"
        for name in arguments:
            if name.endswith("_ptr"):
                _check_pointer(self.__name__, name, arguments, found.current)
        found.launches.append(Launch(self.__name__, tuple(grid), arguments))

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch("triton.testing.do_bench", lambda launch, **_: launch() or 1.0),
    ):
        yield


# Pointers that a kernel reads only where a constant says so, and others stand in for elsewhere.
_READ_IF = {
    "ANCHOR": ("k0_ptr", "v0_ptr", "ds0_ptr"),
    "ROPE": ("q_cos_ptr", "q_sin_ptr", "k_cos_ptr", "k_sin_ptr"),
    "SCATTERED": ("rows_ptr",),
}


def _check_pointer(kernel: str, name: str, arguments: dict[str, Any], current: int) -> None:
    """A pointer is a tensor on the current device; its strides are the arguments that bear its
    name (``q_ptr``: ``q_row``, ``q_head``), in the dimensions behind those it is contiguous."""
    tensor, stem = arguments[name], name.removesuffix("_ptr")
    shown = f"{kernel}: {name} {tuple(tensor.shape)} by {tensor.stride()} on {tensor.device}"
    assert tensor.device.type == "cuda", shown
    assert tensor.device.index == current, f"{shown} in a launch on cuda:{current}"
    off = [flag for flag in _READ_IF if not arguments.get(flag, True)]
    if any(name in _READ_IF[flag] for flag in off) or not tensor.numel():
        return
    sides = [f"{stem}_{side}" for side in ("row", "head")]
    said = [arguments[side] for side in sides if side in arguments]
    inner = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(said), tensor.dim())]
    for size, stride, read in zip(tensor.shape, tensor.stride(), said + inner, strict=True):
        assert stride == read or size <= 1, f"{shown}, read by {said + inner}"


def main(arguments: list[str]) -> int:
    """Run pytest with ``arguments`` in this process, with the devices."""
    try:
        load_device()
    except NoFakeCuda as why:
        sys.stdout.write(f"no fake CUDA: {why}\n")
        return NO_FAKE_CUDA
    import pytest

    return pytest.main(["-q", "-p", "no:cacheprovider", *arguments])


NO_FAKE_CUDA = 77
"""Exit status of `main` where there are no such devices."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
