"""The built-in datasets, one module for each family; `settings` has the classes for `data.args`."""
