"""The figures of a comparison: on the page, as SVG files and as CSV.

Every figure is a `Picture`: its numbers, and how they are drawn. The modules that draw import
matplotlib, so import them when drawing.
"""
