"""Server of a federation: it runs the rounds, picks their clients and aggregates the updates."""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")
