"""Names of Opacus: those that work here, and what takes the place of the others."""
