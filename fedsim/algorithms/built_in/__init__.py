"""Built-in algorithms, one file each; `fedsim.algorithms.algorithm` finds them here."""
