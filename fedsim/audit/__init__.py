"""What an attacker can really tell: measured leakage of every client, beside the claimed ε."""
