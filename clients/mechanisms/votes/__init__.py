"""PATE on the client: noisy votes on public queries."""
