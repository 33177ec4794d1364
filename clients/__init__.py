"""What one client does: local training, DP-SGD, its privacy state, its upload."""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")
