"""Messages between server, clients and helpers, as dataclasses and as Flower records."""
