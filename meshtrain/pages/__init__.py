"""Pages for people: one HTML file each, made of the JSON that the commands print."""
