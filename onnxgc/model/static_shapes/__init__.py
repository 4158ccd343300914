"""A static shape for every tensor: shape inference, control flow, sequences and decompositions."""
