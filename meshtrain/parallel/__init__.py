"""Distribution of the work: split sequences, experts, pipeline schedules. Takes functions; imports no model."""
