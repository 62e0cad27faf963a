"""Packaging: the ``kernels/`` folder is installed as ``anchorcontext.kernels``.

A top-level package called ``kernels`` would collide with the Hugging Face package of that name,
so the folder is mapped, never installed under its own name.

Lower bounds are the oldest versions the code is written for, upper bounds the next release that
may change what it relies on; ``constraints.txt`` holds the versions that were tested.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

packages = find_packages(include=["anchorcontext", "anchorcontext.*"])
kernel_packages = ["anchorcontext.kernels"] + [
    f"anchorcontext.kernels.{name}" for name in find_packages(where="kernels")
]

readme = ROOT / "README.md"

setup(
    name="anchorcontext",
    version="0.1.0",
    description="Distributed long-context training with AnchorAttention, exact to a single device",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages + kernel_packages,
    package_dir={"anchorcontext": "anchorcontext", "anchorcontext.kernels": "kernels"},
    package_data={
        "": ["py.typed", "*.yaml"],
        "anchorcontext.hardware": ["profiles/*.yaml"],
        "anchorcontext.kernels": ["*.c"],  # compiled on the user's machine, at first use
        "anchorcontext.train": ["scripts/*"],  # links into launch/
    },
    install_requires=[
        "torch>=2.11",
        "numpy>=2.0",
        "transformers>=5.17,<6",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "deepspeed>=0.19,<0.20",
        "pyarrow>=18",
        "pydantic>=2.10,<3",
        "pyyaml>=6",
        "click>=8.1",
        "rich>=13",
        "tqdm>=4.66",
        "psutil>=5.9",
        "packaging>=24",
        "matplotlib>=3.8",  # pictures of windows: `anchorcontext inspect --png`
        "cloudpickle>=3",  # anchorcontext.testing sends functions to its ranks
    ],
    extras_require={
        # flash-attn has no wheel and builds against the installed torch with CUDA's compiler:
        # pip install --no-build-isolation 'anchorcontext[gpu]'. Without it torch's own varlen
        # flash attention is used.
        "gpu": ["triton>=3.6", "flash-attn>=2.8"],
        # attention.backend: ring_flash_attn; declares no dependencies, calls flash-attn.
        "ring-flash-attn": ["ring-flash-attn==0.1.8"],
        "liger": ["liger-kernel>=0.6.3"],  # loss.kernel: liger
        "eval": ["lm_eval[hf]>=0.4.13", "wonderwords>=2.2", "nltk>=3.9"],
        "wandb": ["wandb>=0.31"],
        "tensorboard": ["tensorboard>=2.18"],
        "hub": ["datasets>=4"],  # data sets of the hub; other corpora need pyarrow alone
        "gguf": ["gguf>=0.17", "accelerate>=1.8"],  # transformers reads GGUF files with both
        "dev": [
            "build>=1.2",
            "datasets>=4",
            "hypothesis>=6.130",
            "liger-kernel==0.8.5",
            "mypy>=2.0,<3",
            "pre-commit>=4",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ring-flash-attn==0.1.8",
            "ruff==0.17.6",  # another version formats differently
            "setuptools>=77",
            # Our kernels run interpreted and are compiled for GPUs in the tests, without a GPU.
            "triton>=3.6; platform_system == 'Linux'",
            "wheel>=0.45",
        ],
    },
    entry_points={"console_scripts": ["anchorcontext = anchorcontext.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
