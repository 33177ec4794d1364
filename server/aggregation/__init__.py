"""How updates are aggregated: the mean, noisy sums, aggregators, clients' weights."""

from fedsim.core.moved_names import moved_names_of as _moved_names_of

__getattr__ = _moved_names_of(__name__)
