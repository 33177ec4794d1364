"""Privacy mechanisms of clients: one abstract interface, one planner, a module for each kind."""
