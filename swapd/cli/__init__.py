"""The `swapd` command. Each subcommand has a module of its own, imported when it is used.

Exit status: 0 for success; 1 when the thing asked for cannot be done, with a message and no traceback; 2 for a wrong
command line. `swapd run` and `swapd record` end with the status of the program they ran.
"""

from __future__ import annotations

import importlib
import sys

import click

from swapd.cli.output import Failure
from swapd.observing.status import StatusError

_COMMANDS = ("run", "record", "plan", "simulate", "compare", "split", "report", "top", "metrics", "probe", "doctor")


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"swapd.cli.{cmd_name}").command
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ooc-alloc", prog_name="swapd")
def cli() -> None:
    """Run programs whose live memory is larger than the device memory they may use."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; `arguments` are those of the command line without the program's name."""
    try:
        status = cli.main(args=arguments, prog_name="swapd", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (Failure, StatusError) as error:
        click.echo(f"swapd: {error}", err=True)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has enough
        return 0
    return status if isinstance(status, int) else 0
