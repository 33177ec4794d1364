"""Module at the path of an Opacus module; its ImportError names the import to use here."""

raise ImportError("write `from fedsim.clients import BatchMemoryManager`")
