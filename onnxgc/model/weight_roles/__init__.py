"""Which weights are parameters, constants or running statistics."""
