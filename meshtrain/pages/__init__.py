"""Self-contained HTML pages that show the JSON output of commands."""
