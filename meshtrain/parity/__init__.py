"""Whether a run computes on every layout what one device computes."""
