"""Communication: process groups, collectives with their ledger, and the start and stop of a rank."""
