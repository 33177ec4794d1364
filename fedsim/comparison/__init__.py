"""`fedsim compare`: variants of one experiment, run with the same seeds, and what differs.

Variants are paired by seed: the same partitions, initial model and participants, so that the
difference of two variants is not buried under the difference of two seeds.
"""

from fedsim.comparison.load import LoadedComparison as LoadedComparison
from fedsim.comparison.load import load_comparison as load_comparison
