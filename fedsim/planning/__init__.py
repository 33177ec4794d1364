"""Planning before training: ε that an experiment spends, code that it runs, files that it reads."""
