"""The error for a mistake that the user can mend."""


class UserError(ValueError):
    """A mistake the user can mend; the message names the value, the rule and the fix.

    Raised on every rank alike, before any collective starts. The command line prints it without a
    traceback and exits with status 2.
    """
