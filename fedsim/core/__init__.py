"""Basic parts that all packages share: settings, errors, random streams, plug-ins and formats."""
