"""PATE: clients are teachers that vote on public queries; a public student learns the answers."""
