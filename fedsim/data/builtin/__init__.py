"""The built-in datasets: loaders, and in module `settings` the classes for `data.args`."""
