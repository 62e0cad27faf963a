"""``anchorcontext doctor``: what is installed, which engines can run, what is missing."""

from __future__ import annotations

from anchorcontext.cli.common import Outcome, echo, echo_table, plain_command


@plain_command
def command() -> Outcome:
    """Show machine, packages and attention engines, and how to add what is missing.

    Exits 1 when a needed package is absent or of a version outside the range.
    """
    from anchorcontext.environment import examine

    found = examine()
    echo_table([*found.machine.items(), *(("device", device) for device in found.devices)])
    echo_table(
        [
            (engine.name, engine.device, engine.dtype, _state(engine.reason, engine.chosen))
            for engine in found.engines
        ],
        ("engine", "device", "dtype", "state"),
        title="attention engines",
    )
    echo_table(
        [
            (package.name, package.installed, package.needed, package.extra, package.advice)
            for package in found.packages
        ],
        ("package", "installed", "needed", "extra", "to add it"),
        title="packages",
    )
    for warning in found.warnings:
        echo(f"note: {warning}")
    if not found.sound:
        echo("a needed package is missing or of the wrong version")
    return Outcome(found, exit_code=0 if found.sound else 1)


def _state(reason: str | None, chosen: bool) -> str:
    if reason is None:
        return "ready, what auto takes" if chosen else "ready"
    return f"no: {reason}"
