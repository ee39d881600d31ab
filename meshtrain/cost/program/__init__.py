"""The compiled program read: its instructions, collectives, memory, and its roofline."""
