"""The server of the experiment."""

from pathlib import Path

from fedsim.tools.deployment.server_app import deployed_server

app = deployed_server(Path(__file__).parent)
