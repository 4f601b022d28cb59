"""`swapd metrics`: one address to scrape for all processes of a machine that write their metrics to a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from swapd.cli.launch import replace_process
from swapd.cli.options import parsed, read_config, setting_options
from swapd.units import parse_duration

MODULE = "ooc.prometheus.gather"  # started, not imported: `ooc` imports us, never the other way round
_DEFAULT_PORT = 9836


@click.command("metrics")
@click.argument("folder", type=click.Path(path_type=Path))
@setting_options("metrics_port", "metrics_address", "metrics_cert", "metrics_key")
@click.option(
    "--max-age", metavar="TIME", default="300s", callback=parsed(parse_duration), help="Leave out older files [300s]."
)
def command(folder: Path, max_age: float, **flags: Any) -> None:
    """Serve the metrics that programs write into FOLDER (OOC_METRICS_FILE=FOLDER/NAME.prom) on one port.

    Under torchrun each rank writes a file of its own, FOLDER/NAME.rankN.prom. The port is 9836 unless given.
    """
    config = read_config(flags, metrics_port=_DEFAULT_PORT)
    if config.metrics_port is None:
        raise click.UsageError("--metrics-port off would serve nothing")
    wanted = {
        "folder": str(folder),
        "port": config.metrics_port,
        "address": config.metrics_address,
        "certificate": str(config.metrics_cert) if config.metrics_cert is not None else None,
        "key": str(config.metrics_key) if config.metrics_key is not None else None,
        "most_seconds": max_age,
    }
    replace_process(["-m", MODULE, json.dumps(wanted)], os.environ)
