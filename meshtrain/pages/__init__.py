"""Self-contained HTML pages of the commands' JSON output."""
