"""Module at the path of `opacus.utils`; importing it raises an error that names the new path."""

raise ImportError("write `from fedsim.clients import BatchMemoryManager`")
