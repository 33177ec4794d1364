"""What the server does: rounds, participation, streaming aggregation."""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")
