"""Fixed transforms of the features of each example, before training (`model.features`).

A transform is a function of one example and of public constants. No transform reads another
example. So the features cost no privacy, and the sensitivity of every later release is unchanged.
(Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR
2021, arXiv:2011.11660.)
"""
