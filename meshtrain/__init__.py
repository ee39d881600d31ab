"""meshtrain: decoder-only language models on a five-axis device mesh. Importing it starts no backend and sets no
flag."""
