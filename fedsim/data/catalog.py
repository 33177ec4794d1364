"""Names and descriptions of the built-in datasets and partitions; imports nothing heavy."""

DATASETS = {
    "digits": "1,797 handwritten digits, 8 x 8 grey pixels, 10 classes (scikit-learn, offline)",
}

SHAPES = {"digits": (1, 8, 8)}
"""Shape of one example of each built-in dataset."""

PARTITIONS = {
    "iid": "clients of equal size from the shuffled data",
    "dirichlet": "label skew: classes divided by Dirichlet(alpha)",
    "shards": "label skew: classes_per_client classes on each client",
    "quantity": "size skew: client sizes by Dirichlet(alpha) above min_examples",
}
