"""Tools over the core: they import it, and it imports none of them."""
