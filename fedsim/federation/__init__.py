"""The one place that assembles both sides of a federation from an experiment."""
