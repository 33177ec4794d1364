"""A client's privacy budget: its plan, its noise, and the steps that it affords."""

from fedsim.core.moved_names import moved_names_of as _moved_names_of

__getattr__ = _moved_names_of(__name__)
