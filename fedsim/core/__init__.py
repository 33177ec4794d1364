"""What every room shares: settings base, errors, keyed random streams, plug-ins, number formats."""
