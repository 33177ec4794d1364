"""Low-rank adapters on a frozen backbone."""
