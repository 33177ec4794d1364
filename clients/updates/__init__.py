"""Releases of a client's whole update, for the unit `client`."""
