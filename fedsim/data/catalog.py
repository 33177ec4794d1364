"""The built-in datasets and partitions by name, without importing anything heavy."""

DATASETS = {
    "digits": "1,797 handwritten digits, 8 x 8 grey pixels, 10 classes (scikit-learn, offline)",
}

PARTITIONS = {
    "iid": "equal shares of the shuffled data",
    "dirichlet": "label skew: classes divided by Dirichlet(alpha)",
    "shards": "label skew: classes_per_client classes on each client",
    "quantity": "size skew: client sizes by Dirichlet(alpha) above min_examples",
}
