"""Built-in algorithms, one file each; `fedsim.algorithms.catalog` finds them here."""
