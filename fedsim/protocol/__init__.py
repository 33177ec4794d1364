"""The messages between server and clients, as Flower records."""
