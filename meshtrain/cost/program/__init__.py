"""Reads compiled programs: their instructions, collectives, memory and roofline."""
