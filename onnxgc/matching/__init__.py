"""Which tensors of two exports of one network are the same, by structure and shape alone."""
