"""One small gradient rule per operator, and the backward pass that applies them."""
