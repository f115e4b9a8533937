"""The top-level command: what every command shares, and how each failure ends."""

from __future__ import annotations

import sys
from typing import Any

import click

from pltpack_cli.bench import bench
from pltpack_cli.calibrate import calibrate
from pltpack_cli.capture import capture
from pltpack_cli.completion import completion
from pltpack_cli.compress import append, compress
from pltpack_cli.convert import convert, warm
from pltpack_cli.decompress import decompress
from pltpack_cli.failures import Reporting, reported
from pltpack_cli.inspect import inspect
from pltpack_cli.maintain import compact, gc
from pltpack_cli.metrics import serve_metrics
from pltpack_cli.report import report
from pltpack_cli.score import score
from pltpack_cli.transfer import export_session, import_session
from pltpack_cli.verify import verify

COMMANDS = (
    compress, append, decompress, convert, warm, inspect, verify, compact, gc, export_session, import_session, capture,
    calibrate, score, report, serve_metrics, bench, completion,
)  # fmt: skip


class Program(click.Group):
    """A group that turns every exception of its commands into one line and the documented exit code."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Parse the options before the command's name; failures are reported as told by `args`."""
        reporting = Reporting.wanted_by(args)
        with reported(reporting):
            context = super().make_context(info_name, args, *rest, **extra)
        context.obj = reporting
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; failures are reported as told by the context."""
        with reported(ctx.obj):
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a user's work, not of the alphabet."""
        return list(self.commands)


def _version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    import pltpack

    click.echo(f"pltpack {pltpack.__version__}")
    context.exit()


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
              help="Show the version and exit.")  # fmt: skip
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of every error.")
def program() -> None:
    """Compress KV-cache snapshots of language models into an archive, and get them back.

    \b
    pltpack compress dumps/ -o archive       dumps in, archive out
    pltpack inspect archive                  what is in it
    pltpack decompress archive -o rebuilt    and back

    Every command takes --json and then prints exactly one JSON object on standard output; a failure prints
    {"error": {"type", "message", "path", "exit_code"}} there, beside the line on standard error. Progress appears
    on standard error if it is a terminal and CI is not set; live panels of compress, append and bench not with --json
    or --quiet either.

    \b
    Exit codes:
      0    done
      1    a check found a difference (verify --against)
      2    bad input or usage: a damaged or missing file, a full disk, a wrong option
      3    a promise could not be kept
      70   an error that pltpack did not foresee: a bug, shown with its traceback
      130  interrupted
      141  the reader of standard output went away
    """


for _command in COMMANDS:
    program.add_command(_command)


def main() -> None:
    """Entry point of the ``pltpack`` script; does not return."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not turn a finished job into an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    program(prog_name="pltpack")
