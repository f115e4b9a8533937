"""Whether somebody watches, and a console for what they see that leaves the terminal as it was."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def is_watched() -> bool:
    """Whether standard error is a terminal that can be drawn on, with somebody in front of it."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def say_if_compiling() -> None:
    """Say on standard error that a wait comes first, where no compiled loops are kept; call it if somebody watches."""
    import click

    from pltpack import compiled_cache

    if compiled_cache.is_empty():
        click.echo("pltpack: first run: compiling its loops takes some 20 seconds more", err=True)


def console() -> Console:
    """A console on standard error that never hides the cursor: however the program ends, it is there."""
    from rich.console import Console

    class Visible(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Visible(stderr=True, highlight=False)
