"""Rules between the keys of an experiment file, a file for each part of it.

A rule runs if the sections that it reads are valid; the others may have mistakes.
"""
