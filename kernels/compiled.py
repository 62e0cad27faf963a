"""C sources of this folder, compiled by the machine's own compiler at first use.

``load("cpu_kernels")`` compiles ``cpu_kernels.c`` for the processor at hand and keeps the result in
``$XDG_CACHE_HOME/anchorcontext`` (``~/.cache`` by default), under a name made of the source and of
all that the compiler says about itself and the processor: an upgrade, or another kind of node over
a shared home, compiles anew. ``$CC`` names the compiler (default ``cc``); ``CC=false`` switches all
of this off. Callers go on without where there is no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

_OPTIONS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
_SECONDS = 300


class CompilerError(Exception):
    """Why there is no compiled form, in a sentence."""


def load(name: str) -> ctypes.CDLL:
    """The library made of ``name.c``.

    Raises:
        CompilerError: no compiler, or it fails.
    """
    result = _load_once(name)
    if isinstance(result, CompilerError):
        raise result
    return result


@functools.cache
def _load_once(name: str) -> ctypes.CDLL | CompilerError:
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        native, facts = _describe(compiler)
        digest = hashlib.blake2b(facts + source.read_bytes(), digest_size=12).hexdigest()
        command = [*compiler, *_OPTIONS, *native]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anchorcontext"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _open(command, source, folder / f"{name}-{digest}.so")
        except OSError:  # a home that is read-only, full, or forbids to map code
            with tempfile.TemporaryDirectory(prefix="anchorcontext-") as own:
                return _open(command, source, Path(own) / f"{name}.so")
    except (OSError, RuntimeError) as error:  # no home
        return CompilerError(f"{shlex.join(compiler)} cannot be used: {error}")
    except CompilerError as error:
        return error


def _describe(compiler: list[str]) -> tuple[list[str], bytes]:
    """The option for this processor, where the compiler has one, and its predefined macros."""
    errors = []
    for native in (["-march=native"], ["-mcpu=native"], []):
        done = _run([*compiler, *native, "-dM", "-E", "-x", "c", os.devnull])
        if done.returncode == 0 and b"__STDC__" in done.stdout:
            return native, done.stdout
        errors.append(done.stderr.decode(errors="replace").strip())
    raise CompilerError(f"{shlex.join(compiler)} is no C compiler that runs here: {errors[-1]}")


def _open(command: list[str], source: Path, path: Path) -> ctypes.CDLL:
    if not path.exists():
        # Other ranks may compile at the same time: each writes beside and renames.
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        os.close(handle)
        try:
            done = _run([*command, "-o", beside, str(source), "-lm"])
            if done.returncode:
                lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
                fault = next((line for line in lines if "error" in line), lines[0])
                raise CompilerError(f"{command[0]} fails on {source.name}: {fault.strip()}")
            os.replace(beside, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
    return ctypes.CDLL(str(path))


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{command[0]} took more than {_SECONDS} s") from error
