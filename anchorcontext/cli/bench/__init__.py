"""``anchorcontext bench NAME``: benchmarks, each against named baselines in the same run."""

from __future__ import annotations

import click

from anchorcontext.cli.bench.attention import layouts, modes, peers
from anchorcontext.cli.bench.calibrate import calibrate
from anchorcontext.cli.bench.engines import kernels, numerics
from anchorcontext.cli.bench.exchanges import exchanges
from anchorcontext.cli.bench.kernels_aot import kernels_aot
from anchorcontext.cli.bench.packing import packing
from anchorcontext.cli.bench.scaling import growth, memory, step
from anchorcontext.cli.bench.tokenising import data


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Benchmarks, each against named baselines in the same run.

    Each takes --json PATH, and --markdown PATH for its section of docs/benchmarks.md.
    """


BENCHMARKS = {
    "calibrate": calibrate,
    "data": data,
    "exchanges": exchanges,
    "growth": growth,
    "kernels": kernels,
    "kernels-aot": kernels_aot,
    "layouts": layouts,
    "memory": memory,
    "modes": modes,
    "numerics": numerics,
    "packing": packing,
    "peers": peers,
    "step": step,
}
for _name, _benchmark in BENCHMARKS.items():
    command.add_command(_benchmark, _name)
