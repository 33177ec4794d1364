"""How client updates become the next global model: the mean, aggregators and Flower strategies."""

from fedsim.core.moved_names import moved_names_of as _moved_names_of

__getattr__ = _moved_names_of(__name__)
