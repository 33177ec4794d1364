"""Signed Flower apps: sign an app bundle, and serve it with its signatures to the SuperLink.

A SuperNode with `--trusted-entities` runs only apps that a key of its list has signed. Flower's
SuperLink takes signatures only from an app store at the address `FLWR_SUPERGRID_API_URL`. This
module is the smallest such store:

    python -m fedsim.tools.deployment.signed_app sign APP.fab --key KEY --name NAME
    python -m fedsim.tools.deployment.signed_app serve DIRECTORY --port PORT

The store need not be trusted: every SuperNode checks the signature of the bundle that it runs.
"""

import argparse
import base64
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedsim.core.errors import ExitCode
from fedsim.tools.deployment.private_files import DeploymentError

_SUFFIX = ".signatures.json"


def sign_app(bundle: Path, key_file: Path, name: str) -> Path:
    """Add a signature to the signature file of an app bundle, and return the file's path."""
    try:
        content, key = bundle.read_bytes(), load_ssh_private_key(key_file.read_bytes(), None)
    except (OSError, TypeError, UnsupportedAlgorithm, ValueError) as error:  # TypeError: passphrase
        raise DeploymentError(f"cannot sign {bundle} with {key_file}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        fix = "make one with ssh-keygen -t ed25519"
        raise DeploymentError(f"{key_file}: must be an Ed25519 key; {fix}")
    signed_at = int(time.time())
    signature = key.sign(signed_at.to_bytes(8, "big") + hashlib.sha256(content).digest())
    text = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    entry = {"public_key_id": name, "signature": text, "signed_at": signed_at}
    path = Path(f"{bundle}{_SUFFIX}")
    others = [signature for signature in _signatures(bundle) if signature["public_key_id"] != name]
    path.write_text(json.dumps([*others, entry]))
    return path


def app_store(directory: Path, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of the bundles in a directory, only for SuperLinks on this machine."""
    if not directory.is_dir():
        raise DeploymentError(f"{directory}: no such directory")

    class Store(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            bundles = _bundles(directory, body)
            if self.path != "/hub/fetch-fab" or len(bundles) != 1:
                names = [bundle.name for bundle in bundles] or "no bundle"
                self._send(404, json.dumps({"detail": f"expected one bundle, found {names}"}))
                return
            address = f"http://127.0.0.1:{store.server_port}/{bundles[0].name}"
            verifications = _signatures(bundles[0])
            self._send(200, json.dumps({"fab_url": address, "verifications": verifications}))

        def do_GET(self) -> None:
            by_path = {f"/{bundle.name}": bundle for bundle in directory.glob("*.fab")}
            if self.path in by_path:
                self._send(200, by_path[self.path].read_bytes())
            else:
                self._send(404, "")

        def _send(self, status: int, content: str | bytes) -> None:
            body = content.encode() if isinstance(content, str) else content
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        store = ThreadingHTTPServer(("127.0.0.1", port), Store)
    except (OSError, OverflowError) as error:
        raise DeploymentError(f"port {port} cannot be used: {error}; choose another") from error
    return store


def _bundles(directory: Path, request: bytes) -> list[Path]:
    """Return the bundles of the requested app, named PUBLISHER.APP.VERSION.HASH.fab."""
    try:
        asked = json.loads(request)
        parts = asked["app_id"].removeprefix("@").split("/")
        if asked.get("app_version") is not None:
            parts.append(asked["app_version"].replace(".", "-"))
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    return [path for path in directory.glob("*.fab") if path.name.split(".")[: len(parts)] == parts]


def _signatures(bundle: Path) -> list[dict[str, str | int]]:
    path = Path(f"{bundle}{_SUFFIX}")
    try:
        return json.loads(path.read_text()) if path.exists() else []
    except ValueError as error:
        raise DeploymentError(f"{path} is damaged ({error}); delete it, and sign again") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Sign a bundle or serve a directory of bundles; the module docstring shows the commands."""
    parser = argparse.ArgumentParser(prog="python -m fedsim.tools.deployment.signed_app")
    commands = parser.add_subparsers(dest="command", required=True)
    sign = commands.add_parser("sign", help="sign a bundle that you have read")
    sign.add_argument("bundle", type=Path)
    sign.add_argument("--key", type=Path, required=True, help="private Ed25519 key of OpenSSH")
    sign.add_argument("--name", required=True, help="name of the key in --trusted-entities")
    serve = commands.add_parser("serve", help="serve bundles to the SuperLink of this machine")
    serve.add_argument("directory", type=Path)
    serve.add_argument("--port", type=int, required=True)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "serve":
            app_store(chosen.directory, chosen.port).serve_forever()
        else:
            print(sign_app(chosen.bundle, chosen.key, chosen.name))  # noqa: T201  its output
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except DeploymentError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  likewise
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
