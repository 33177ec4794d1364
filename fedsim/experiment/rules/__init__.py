"""Rules between the keys of an experiment file, with one module for each part of the file.

A rule is a function that yields (path, message) for each mistake. It runs if all sections that it
reads are valid, even if other sections have mistakes.
"""
