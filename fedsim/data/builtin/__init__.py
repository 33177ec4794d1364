"""The built-in datasets, a module for each family; `settings` has their arguments."""
