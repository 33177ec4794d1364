"""Facts about an experiment before it trains: its planned ε, and the code and files it uses."""

NOTHING_TO_PLAN = "there is nothing to plan: the experiment has no privacy section"
