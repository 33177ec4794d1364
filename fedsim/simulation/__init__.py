"""Engines that execute a federation."""
