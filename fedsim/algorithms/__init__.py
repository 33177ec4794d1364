"""Federated algorithms, such as FedAvg and SCAFFOLD, and their common base class.

`algorithm.py` has the base class, and `built_in/` has one file for each built-in algorithm.
"""
