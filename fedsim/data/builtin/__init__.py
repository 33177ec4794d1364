"""The built-in datasets: a file for each family; `settings` has their arguments."""
