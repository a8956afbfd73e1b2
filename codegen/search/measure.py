"""`tilewright measure`: this machine measures what searches elsewhere build."""

from __future__ import annotations

import signal

import click

from tilewright.codegen.search.command import check_installed


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

    check_installed()
    try:
        address = Address.parse(tracker, key)
    except ValueError as error:
        raise click.UsageError(f"--tracker: {error}") from None
    server = serve(address, host)
    click.echo(f"measuring for {key} at {host}:{server.port}; tracker {tracker}")
    try:
        signal.pause()
    except KeyboardInterrupt:
        server.terminate()
