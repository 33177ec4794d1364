"""The commands `helper-key` and `client-key`."""

from pathlib import Path

import click

from fedsim.cli.options import fail, json_option, print_json
from fedsim.core.errors import ExitCode


@click.command("helper-key", short_help="Create a helper's key and print its fingerprint.")
@click.argument("file", type=click.Path())
@json_option
def helper_key_command(file: str, as_json: bool) -> None:
    """Create the lasting key of a helper of secure aggregation in FILE and print its fingerprint.

    If FILE exists, only the fingerprint of its key is printed. Keep the file on the helper's
    machine, and put the fingerprint into secure_aggregation.keys.helper_fingerprints, so that
    clients can pin the key.
    """
    _lasting_key(Path(file), "helper", as_json=as_json)


@click.command("client-key", short_help="Create a client's key and print its fingerprint.")
@click.argument("file", type=click.Path())
@json_option
def client_key_command(file: str, as_json: bool) -> None:
    """Create the lasting key of a client of secure aggregation in FILE and print its fingerprint.

    If FILE exists, only the fingerprint of its key is printed. Keep the file on the client's
    machine, and put the fingerprint into secure_aggregation.keys.client_fingerprints, so that
    helpers count only clients that exist.
    """
    _lasting_key(Path(file), "client", as_json=as_json)


def _lasting_key(path: Path, owner: str, *, as_json: bool) -> None:
    from fedsim.federation.lasting_keys import make_lasting_key, read_lasting_key
    from fedsim.secagg.errors import PublicKeyError

    made = not path.exists()
    try:
        key = make_lasting_key(path) if made else read_lasting_key(path)
    except (OSError, PublicKeyError) as error:
        fail(str(error), ExitCode.WRONG_INPUT)
    if as_json:
        print_json({"path": str(path), "fingerprint": key.fingerprint, "made": made})
        return
    click.echo(key.fingerprint)
    if made:
        click.echo(f"{path}: a new key; keep it on the machine of the {owner}", err=True)
