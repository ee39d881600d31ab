"""What it costs: audit of compiled programs, GPU compilation without a GPU, the hardware table."""
