"""``pltpack completion``: the script that makes a shell complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from pltpack_cli.options import json_option
from pltpack_cli.output import print_json

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the completion script of SHELL.

    \b
    bash   add to ~/.bashrc:   eval "$(pltpack completion bash)"
    zsh    add to ~/.zshrc:    eval "$(pltpack completion zsh)"
    fish   pltpack completion fish > ~/.config/fish/completions/pltpack.fish
    """
    script = _SHELLS[shell](context.find_root().command, {}, "pltpack", "_PLTPACK_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
