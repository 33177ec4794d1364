"""Parts shared by all packages: settings, errors, random streams, plug-ins, number formats."""
