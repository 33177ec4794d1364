"""The experiment file: strict loading, typed schema, located errors."""
