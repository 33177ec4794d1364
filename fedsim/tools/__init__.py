"""Tools built on the simulator: they import it, and it never imports them."""
