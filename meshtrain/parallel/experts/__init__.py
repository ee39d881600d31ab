"""Expert parallelism: tokens are dispatched to the devices of their experts, and the outputs are returned."""
