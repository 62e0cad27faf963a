"""The error for a mistake that the user can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake the user can mend; the message names the value, the rule and the fix.

    Raised on every rank alike, before any collective starts. The command line prints it without a
    traceback and exits with status 2.
    """


@contextmanager
def writing(what: str, path: object) -> Iterator[None]:
    """Make the system's refusal to write ``path`` the user's error: ``what`` names the setting."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"{what} = {str(path)!r}: cannot be written ({reason}); give a place that can be"
        ) from error
