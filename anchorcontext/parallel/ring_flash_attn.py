"""The PyPI package ring-flash-attn, unmodified."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

from ..errors import UserError

PACKAGE = "ring_flash_attn"
INSTALL = "pip install --no-deps ring-flash-attn==0.1.8"


def load_submodule(name: str) -> types.ModuleType:
    """``ring_flash_attn.<name>`` without the package's ``__init__``.

    That also imports an adapter, which looks for functions that transformers 5 no longer has. The
    stand-in that takes the package's place for the import is gone afterwards.

    Raises:
        UserError: ring-flash-attn or flash-attn is not installed.
    """
    full_name = f"{PACKAGE}.{name}"
    if full_name in sys.modules:
        return sys.modules[full_name]
    for package, fix in (
        (PACKAGE, INSTALL),
        ("flash_attn", "pip install --no-build-isolation flash-attn (needs CUDA)"),
    ):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed: {fix}")
    if PACKAGE in sys.modules:
        return importlib.import_module(full_name)
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(full_name)
    finally:
        del sys.modules[PACKAGE]
