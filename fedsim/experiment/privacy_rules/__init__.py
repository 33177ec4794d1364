"""Rules of the `privacy` section that have a page of proofs of their own."""
