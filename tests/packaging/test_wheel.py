"""The wheel: what it contains, and that it works outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["anchorcontext", "kernels", "setup.py", "pyproject.toml", "LICENSE"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: setuptools leaves a build folder beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True, timeout=120)
    (path,) = folder.glob("anchorcontext-*.whl")
    return path


def test_every_module_is_in_the_wheel_and_kernels_only_as_ours(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "anchorcontext").rglob("*")
        if path.suffix in (".py", ".yaml") or path.name == "py.typed"
    }
    expected |= {
        f"anchorcontext/kernels/{path.relative_to(ROOT / 'kernels').as_posix()}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in (".py", ".c")
    }
    assert len(expected) > 20
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {
        "anchorcontext",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }


def test_the_wheel_carries_the_license_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (license_file,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert b"Apache License" in archive.read(license_file)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
    assert b"anchorcontext = anchorcontext.cli:main" in archive.read(entry_points)


def test_the_wheel_carries_the_scripts_that_submit_fills_in(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    for name in ("slurm.sbatch", "env.sh"):
        packaged = archive.read(f"anchorcontext/train/scripts/{name}")
        assert packaged == (ROOT / "launch" / name).read_bytes()


def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", target, wheel], check=True, timeout=120)
    code = (
        "import importlib.util, pathlib, anchorcontext, anchorcontext.kernels\n"
        "from anchorcontext.kernels import interface\n"
        f"home = pathlib.Path({str(target)!r})\n"
        "for module in (anchorcontext, interface):\n"
        "    assert home in pathlib.Path(module.__file__).parents, module.__file__\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or home not in pathlib.Path(spec.origin).parents, spec\n"
    )
    # -P: nothing of the working directory; PYTHONPATH stands before the editable installation.
    environment = {**os.environ, "PYTHONPATH": str(target)}
    run = [sys.executable, "-P", "-c", code]
    subprocess.run(run, check=True, cwd=tmp_path, env=environment, timeout=120)
    help_text = subprocess.run(
        [sys.executable, "-P", "-m", "anchorcontext", "--help"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
    ).stdout
    assert "prepare" in help_text


@pytest.mark.parametrize("safe_path", ["1", ""], ids=["safe_path", "root_on_path"])
def test_a_checkout_does_not_shadow_a_package_called_kernels(safe_path: str) -> None:
    """A command run from the repository root must not find kernels/ as a top-level package."""
    code = (
        "import importlib.util, pathlib, runpy, sys\n"
        "sys.argv = ['anchorcontext', '--help']\n"
        "try: runpy.run_module('anchorcontext', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or pathlib.Path.cwd() not in pathlib.Path(spec.origin).parents, spec\n"
        "assert importlib.util.find_spec('anchorcontext.kernels') is not None\n"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": safe_path}
    run = [sys.executable, "-c", code]
    subprocess.run(run, check=True, cwd=ROOT, env=environment, timeout=60)
