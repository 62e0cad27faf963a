"""What every command shares: CONFIG and overrides, ``--json``, errors, output of rank 0 only.

A command is one thin file ``cli/NAME.py`` (``-`` becomes ``_``), or a folder where it has parts,
that defines ``command``, and one line in ``COMMANDS`` of ``cli/__init__.py``::

    import click
    from anchorcontext.cli.common import Outcome, config_command, echo, echo_table
    from anchorcontext.config import Config

    @config_command
    @click.option("--dry-run", is_flag=True, help="Validate, build one window, stop.")
    def command(config: Config, dry_run: bool) -> Outcome:
        \"\"\"Train the configured model.\"\"\"          # becomes the help text
        from anchorcontext.train import train          # heavy imports inside: --help stays fast
        report = train(config, dry_run=dry_run)
        echo(f"final loss {report.loss:.4f}")          # speaks on rank 0 only
        return Outcome(report)                         # or Outcome(report, exit_code=1)

``config_command`` adds the arguments ``CONFIG [KEY=VALUE]...`` and the option ``--json PATH``;
``plain_command`` adds ``--json PATH`` alone, for a command that needs no config. What a command
returns (an ``Outcome``, a report, or nothing) is written to ``--json PATH`` by rank 0: mappings,
sequences, dataclasses, pydantic models, paths, NumPy values and anything with ``item()``.

A ``UserError`` ends the process with status 2 and one line, without a traceback. Every other
exception passes through with its traceback.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import click

from anchorcontext.errors import UserError, writing
from anchorcontext.files import written_whole

USER_ERROR_STATUS = 2
# A launcher kills all ranks as soon as one has ended, so the silent ranks let rank 0 speak first.
SILENT_RANK_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """What a command found (written to ``--json``) and the status it exits with."""

    report: Any = None
    exit_code: int = 0


def config_command(function: Callable[..., Any]) -> click.Command:
    """Make ``function(config, **options)`` a command that takes ``CONFIG [KEY=VALUE]...``."""

    @functools.wraps(function)
    def call(config_path: Path, overrides: tuple[str, ...], **options: Any) -> Any:
        from anchorcontext.config import load_config

        return function(load_config(config_path, list(overrides)), **options)

    # click collects parameters bottom-up: CONFIG, added last, comes first in the usage line.
    call = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(call)
    call = click.argument("config_path", metavar="CONFIG", type=click.Path(path_type=Path))(call)
    return plain_command(call)


def plain_command(function: Callable[..., Any]) -> click.Command:
    """Make ``function(**options)`` a command without a config."""

    @functools.wraps(function)
    def call(json_path: Path | None, **options: Any) -> None:
        sys.exit(run_command(lambda: function(**options), json_path))

    call = click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="PATH",
        help="Write what the command found to PATH as JSON.",
    )(call)
    return click.command(help=inspect.getdoc(function))(call)


def option_group(name: str, **options: Callable[..., Any]) -> Callable[..., Any]:
    """Options that belong together: a command gets their values as one dictionary called ``name``.

    ``options``: decorators that ``click.option`` makes, by the names of their parameters.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            own = {key: values.pop(key) for key in options}
            return function(**values, **{name: own})

        for option in reversed(options.values()):
            call = option(call)
        return call

    return add


def run_command(body: Callable[[], Any], json_path: Path | None = None) -> int:
    """Run a command's body and return the exit status: 0, the outcome's own, or 2 for a user error.

    ``body`` returns an ``Outcome``, a report, or nothing; rank 0 writes the report to
    ``json_path``. Under torchrun a failing rank's cause also goes to the elastic agent, which
    prints the first failure of the job last. Exceptions other than ``UserError`` pass through.
    """
    try:
        result = body()
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        if json_path is not None and is_main_rank():
            with writing("--json", json_path):
                write_json(json_path, outcome.report)
        return outcome.exit_code
    except UserError as error:
        _tell_elastic_agent(error)
        _report_user_error(error)
        return USER_ERROR_STATUS
    except Exception as error:
        _tell_elastic_agent(error)
        raise


def rank() -> int:
    """This process's global rank, from the launcher's variables; 0 without a launcher."""
    for variable in ("RANK", "SLURM_PROCID"):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 0


def is_main_rank() -> bool:
    """Whether this process is the one that prints and writes reports."""
    return rank() == 0


def echo(message: str = "") -> None:
    """Print a line on rank 0."""
    if is_main_rank():
        click.echo(message)


def echo_table(
    rows: Iterable[Sequence[Any]], headers: Sequence[str] = (), *, title: str | None = None
) -> None:
    """Print a table on rank 0; columns of numbers are right-aligned, floats get 4 digits."""
    if not is_main_rank():
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [list(row) for row in rows]
    columns = len(headers) or max((len(row) for row in cells), default=0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=bool(headers))
    for index in range(columns):
        values = [row[index] for row in cells if row[index] is not None]
        numeric = bool(values) and all(isinstance(value, int | float) for value in values)
        header = headers[index] if headers else ""
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(_cell(value) for value in row))
    console = Console()
    # A log file has no width: rich would wrap at 80 columns there.
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table, markup=False)


def write_json(path: Path, report: Any) -> None:
    """Write ``report`` as JSON; no reader sees half of it."""
    text = json.dumps(to_jsonable(report), indent=2, allow_nan=False)
    with written_whole(path) as beside:
        beside.write_text(text + "\n")


def to_jsonable(value: Any) -> Any:
    """``value`` as JSON types. NaN and infinities become "nan", "inf", "-inf" (``float()`` reads
    them back), since JSON has no such numbers.

    Raises:
        TypeError: the value holds something that has no JSON form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(asdict(value))
    for method in ("model_dump", "tolist", "item"):
        if hasattr(value, method):
            return to_jsonable(getattr(value, method)())
    raise TypeError(f"a report cannot hold a {type(value).__name__}: {value!r}")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else ("yes" if value else "no")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _report_user_error(error: UserError) -> None:
    """Rank 0 speaks; another rank stays silent where its launcher collects causes of failure."""
    if is_main_rank():
        click.echo(f"error: {error}", err=True)
        return
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        click.echo(f"error (rank {rank()}): {error}", err=True)
    time.sleep(SILENT_RANK_GRACE_SECONDS)


def _tell_elastic_agent(error: Exception) -> None:
    """Leave the cause where torchrun looks for it, so that its closing report names it.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``; its own writer would
    import torch and print a traceback for a user's mistake.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    mistake = isinstance(error, UserError)
    cause = f"error: {error}" if mistake else traceback.format_exc()
    extra = {"py_callstack": cause, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    Path(path).write_text(json.dumps({"message": message}))
