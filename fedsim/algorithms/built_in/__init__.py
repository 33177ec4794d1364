"""The built-in algorithms, a file each; `fedsim.algorithms.catalog` finds them here."""
