"""Tables: columns of .csv and .parquet files become features by public constants.

Nothing is fitted to rows. Ranges, categories and fill values come from the experiment file, so that
the features of a row are a function of that row and of public constants.
"""
