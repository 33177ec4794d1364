"""Federations of experiments: the code that builds the clients, the server and the privacy plan."""
