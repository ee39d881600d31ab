"""The processes of a run: identification, rendezvous, agreement, failure detection."""
