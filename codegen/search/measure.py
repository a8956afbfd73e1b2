"""`tilewright measure`: this machine measures what searches elsewhere build."""

from __future__ import annotations

import time

import click

from tilewright.codegen.search.command import check_installed
from tilewright.codegen.search.stop import Stop

POLL_SECONDS = 0.2


@click.command(name="measure")
@click.option("--tracker", required=True, metavar="HOST:PORT", help="A running `python -m tvm.exec.rpc_tracker`.")
@click.option("--key", required=True, help="By which searches ask for this machine, e.g. its GPU.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address at which searches reach this machine."
)
def command(tracker: str, key: str, host: str) -> None:
    """Measure here what searches elsewhere build: `tilewright tune --runner rpc --tracker HOST:PORT --key KEY`.

    One search at a time; until Ctrl-C. Whoever reaches the tracker or this machine's ports may run any code here.
    """
    from tilewright.codegen.search.remote import Address, serve

    check_installed("tvm")
    try:
        address = Address.parse(tracker, key)
    except ValueError as error:
        raise click.UsageError(f"--tracker: {error}") from None
    stop = Stop()
    with stop.on_signals():
        try:
            server = serve(address, host)
        except OSError as error:
            raise click.ClickException(f"--tracker: {tracker}: {error}") from None
        click.echo(f"measuring for {key} at {host}:{server.port}; tracker {tracker}")
        while not stop():
            time.sleep(POLL_SECONDS)
        server.terminate()
