"""Errors that are sentences."""


class UserError(Exception):
    """Something the user can put right. The message is one complete sentence; the command line prints it
    on stderr and exits with code 2, without a traceback."""


class RunFailed(Exception):
    """A run or a training that cannot be trusted to go on. The message is one sentence; the command line prints it on
    stderr and exits with code 1, without a traceback."""
