"""Plan before training: the ε that an experiment spends, the code it runs, the files it reads."""
