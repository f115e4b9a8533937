"""How a command ends when it fails: one line on standard error, one JSON object if asked for, one exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, Any

import click

from pltpack_cli.output import plain, print_json

USAGE = 2
BUG = 70
INTERRUPTED = 130
PIPE_CLOSED = 141


@dataclasses.dataclass(frozen=True, slots=True)
class Reporting:
    """How failures are shown: `json` adds an object on standard output, `debug` a traceback on standard error."""

    json: bool = False
    debug: bool = False

    @classmethod
    def wanted_by(cls, args: Sequence[str]) -> Reporting:
        """Read the flags from the bare arguments: they must be known even if those cannot be parsed."""
        options = args[: args.index("--")] if "--" in args else args
        return cls("--json" in options, "--debug" in options)


class Failure(click.ClickException):
    """An exception on its way to the user; click shows it and exits with its `exit_code`."""

    def __init__(self, error: BaseException, reporting: Reporting) -> None:
        super().__init__(message(error))
        self.error = error
        self.reporting = reporting
        self.exit_code = exit_code(error)  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        """Print what happened."""
        error = self.error
        if self.reporting.debug or self.exit_code == BUG:
            click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"Try '{error.ctx.command_path} --help' for help."
            click.echo(f"{error.ctx.get_usage()}\n{hint}\n", err=True)
        click.echo(f"pltpack: {'interrupted' if self.exit_code == INTERRUPTED else f'error: {self.message}'}", err=True)
        if self.reporting.json:
            try:
                print_json({"error": {"type": type(error).__name__, "message": self.message, "path": path_of(error),
                                      "exit_code": self.exit_code}})  # fmt: skip
            except OSError:
                _discard_output()


@contextlib.contextmanager
def reported(reporting: Reporting) -> Iterator[None]:
    """Turn exceptions of the block into `Failure`; click's own ways to end a program pass."""
    try:
        yield
        # What is still buffered may meet a closed pipe or a full disk; at exit nobody would catch that.
        sys.stdout.flush()
    except (Failure, click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
        raise
    except BrokenPipeError:
        _discard_output()
        raise click.exceptions.Exit(PIPE_CLOSED) from None
    except (KeyboardInterrupt, Exception) as error:
        raise Failure(error, reporting) from error


def exit_code(error: BaseException) -> int:
    """The exit code that the command line promises for an exception."""
    from pltpack.errors import PltpackError

    if isinstance(error, PltpackError | click.ClickException):
        return error.exit_code
    if isinstance(error, OSError | MemoryError):
        return USAGE
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    return BUG


def message(error: BaseException) -> str:
    """One line, safe for a terminal, that says what is wrong and with which file."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        text = ": ".join([" -> ".join(names), error.strerror] if names else [error.strerror])
    elif isinstance(error, MemoryError):
        text = f"out of memory{f': {error}' if str(error) else ''}"
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        text = "interrupted"
    elif exit_code(error) == BUG:
        text = f"unforeseen {type(error).__name__}: {error} (a bug in pltpack: please report it with the traceback)"
    else:
        text = str(error)
    return plain(" ".join(text.split("\n")))


def path_of(error: BaseException) -> str | None:
    """The file an error speaks of, if it names one."""
    name = getattr(error, "path", None) or getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None


def _discard_output() -> None:
    # The interpreter flushes standard output once more at exit; give it a place where that cannot fail.
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
