"""The release of a client's whole update of a round."""
