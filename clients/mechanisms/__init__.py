"""Privacy mechanisms of clients: one interface, one planner, and a module for each mechanism."""
