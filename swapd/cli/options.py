"""Command-line flags made from the settings, and the configuration they give."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from swapd.cli.output import Failure
from swapd.config import Config, ConfigError
from swapd.settings import PREFIX, SETTINGS, Setting

F = TypeVar("F", bound=Callable[..., Any])


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator that adds all these options, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def parsed(parse: Any) -> Any:
    """A click callback that parses an option's text."""

    def callback(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def setting_options(*names: str, without: Iterable[str] = ()) -> Callable[[F], F]:
    """Adds a flag for each setting in `names`, or for all settings but those in `without` if no name is given."""
    return together(*(_option(s) for s in SETTINGS if (s.name in names if names else s.name not in set(without))))


def _option(setting: Setting) -> Callable[[F], F]:
    text = setting.help[0].upper() + setting.help[1:]
    return click.option(
        setting.flag, setting.name, metavar=setting.metavar, default=None, help=f"{text}  ({setting.variable})"
    )


def read_config(flags: dict[str, Any], **defaults: Any) -> Config:
    """The configuration from the flags, then from the environment, then from `defaults`. Warnings go to standard error.

    Raises:
        click.UsageError: a flag's value cannot be used.
        Failure: a variable's value cannot be used.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in defaults.items():
        if not os.environ.get(PREFIX + name.upper(), "").strip():
            given.setdefault(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = Config.from_environment(os.environ, **given)
        except ConfigError as error:
            message = str(error)
            for setting in SETTINGS:
                if message.startswith(f"{setting.name}="):
                    raise click.UsageError(setting.flag + message.removeprefix(setting.name)) from None
            raise Failure(message) from None
    for warning in caught:
        click.echo(f"swapd: warning: {warning.message}", err=True)
    return config
