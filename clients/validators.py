"""Module at the path of `opacus.validators`; importing it raises an error with the new path."""

raise ImportError("write `from fedsim.clients import ModuleValidator`")
