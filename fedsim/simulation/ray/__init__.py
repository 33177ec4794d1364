"""The Ray engine: clients in worker processes, on one machine or a cluster."""
