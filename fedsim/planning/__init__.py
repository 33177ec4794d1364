"""Facts about an experiment before it trains: its planned ε, and the code and files it uses."""
