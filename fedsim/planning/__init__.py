"""Plan before training: what ε an experiment spends, what code it runs, what files it reads."""
