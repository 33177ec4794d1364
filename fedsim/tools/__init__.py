"""Tools built on the simulator: they import the simulator, and it never imports them."""
