"""Scores of a model on the public test set: metrics, confusion matrix, and results per class."""
