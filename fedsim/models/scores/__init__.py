"""Scores of a model on the public test set: metrics, confusion matrix, figures of each class."""
