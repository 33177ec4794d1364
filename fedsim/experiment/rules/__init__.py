"""Rules between the keys of an experiment file, with one module for each part of the file.

A rule runs if all sections that it reads are valid; other sections may have mistakes.
"""
