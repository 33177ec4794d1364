"""Messages between server, clients and helper nodes, as dataclasses and as Flower records."""
