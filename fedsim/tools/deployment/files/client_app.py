"""The client of the experiment that a SuperNode's partition-id names."""

from pathlib import Path

from fedsim.tools.deployment.client_app import NodeClient

app = NodeClient(Path(__file__).parent)
