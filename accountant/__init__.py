"""Privacy mathematics: events, accountants, calibration, ledger. numpy and scipy only."""

if not __name__.startswith("fedsim."):
    raise ImportError(f"import fedsim.{__name__}, not {__name__}")
