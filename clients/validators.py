"""Stands where Opacus has a module of this name, and says where its class is here."""

raise ImportError("write `from fedsim.clients import ModuleValidator`")
