"""Packaging: the ``kernels/`` folder is installed as ``anchorcontext.kernels``.

A top-level package called ``kernels`` would collide with the Hugging Face package of that name,
so the folder is mapped, never installed under its own name.
"""

from setuptools import find_packages, setup

packages = find_packages(include=["anchorcontext", "anchorcontext.*"])
kernel_packages = ["anchorcontext.kernels"] + [
    f"anchorcontext.kernels.{name}" for name in find_packages(where="kernels")
]

setup(
    name="anchorcontext",
    version="0.1.0",
    description="Distributed long-context training with AnchorAttention, exact to a single device",
    python_requires=">=3.11",
    packages=packages + kernel_packages,
    package_dir={"anchorcontext": "anchorcontext", "anchorcontext.kernels": "kernels"},
    install_requires=["torch>=2.9", "numpy>=1.26"],
    entry_points={"console_scripts": ["anchorcontext = anchorcontext.cli:main"]},
)
