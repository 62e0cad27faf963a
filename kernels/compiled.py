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
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

_OPTIONS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
_SECONDS = 300
_INSTALL = "install one (apt install gcc), or name it in CC"


class CompilerError(Exception):
    """Why there is no compiled form, and what to do about it."""


def load(name: str) -> ctypes.CDLL:
    """The library made of ``name.c``.

    Raises:
        CompilerError: no compiler, or it fails.
    """
    source = Path(__file__).with_name(f"{name}.c")
    asked = os.environ.get("CC", "cc")
    try:
        compiler = shlex.split(asked)
        native, facts = _describe(compiler)
        command = [*compiler, *_OPTIONS, *native]
        facts += shlex.join(command).encode() + source.read_bytes()
        digest = hashlib.blake2b(facts, digest_size=12).hexdigest()
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anchorcontext"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _open(command, source, folder / f"{name}-{digest}.so")
        except OSError:  # a home that is read-only, full, or forbids to map code
            with tempfile.TemporaryDirectory(prefix="anchorcontext-") as own:
                return _open(command, source, Path(own) / f"{name}.so")
    except (OSError, RuntimeError, ValueError) as error:  # no such program, no home, no closing "
        raise CompilerError(
            f"the C compiler {asked!r} cannot be used ({error}): {_INSTALL}"
        ) from error


def _describe(compiler: list[str]) -> tuple[list[str], bytes]:
    """The option for this processor, where the compiler has one, and its predefined macros."""
    for native in (["-march=native"], ["-mcpu=native"], []):
        done = _run([*compiler, *native, "-dM", "-E", "-x", "c", os.devnull])
        if done.returncode == 0 and b"__STDC__" in done.stdout:
            return native, done.stdout
    said = done.stderr.decode(errors="replace").strip()
    raise CompilerError(
        f"{shlex.join(compiler)} is no C compiler that runs here"
        f"{f' ({said.splitlines()[-1]})' if said else ''}: {_INSTALL}"
    )


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
                raise CompilerError(
                    f"{command[0]} fails on {source.name} ({fault.strip()}): name another compiler "
                    "in CC, and please report it"
                )
            os.replace(beside, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
    return ctypes.CDLL(str(path))


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise CompilerError(
            f"{command[0]} took more than {_SECONDS} s: name another compiler in CC"
        ) from error
