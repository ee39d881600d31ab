"""What a run writes down about its steps: rows, lines of progress, goodput, attempts."""
