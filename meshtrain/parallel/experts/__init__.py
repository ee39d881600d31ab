"""Expert parallelism: dispatch of tokens to the devices of their experts, and the return of the outputs."""
