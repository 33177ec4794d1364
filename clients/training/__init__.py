"""Local training of one round, for one client or for a cohort."""

from fedsim.core.moved_names import moved_names_of as _moved_names_of

__getattr__ = _moved_names_of(__name__)
