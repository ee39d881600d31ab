"""What a compiled run holds, sends and takes, beside what the formulas say; plans and measured runs as JSON and
text."""
