"""Tables: columns of .csv and .parquet files as features, by public constants of the experiment.

Nothing here is fitted to rows. Ranges, categories and fill values are those of the experiment file,
so that the features of a row are a function of that row and of public constants.
"""
