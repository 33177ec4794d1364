"""Sampling of batches: which examples a step uses, and which privacy event the step costs."""
