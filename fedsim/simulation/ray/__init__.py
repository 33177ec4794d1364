"""Ray engine: clients in worker processes, on one machine or on a cluster."""
