"""The built-in algorithms, one file each, which `fedsim.algorithms.catalog` finds here."""
