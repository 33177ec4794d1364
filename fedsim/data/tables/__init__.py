"""Conversion of .csv and .parquet tables into features, by public constants.

Nothing is fitted to the rows. Ranges, categories and fill values come from the experiment file. So
the features of a row are a function of that row and of public constants.
"""
