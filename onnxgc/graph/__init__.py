"""Computation graphs in the paper's convention: vertices are tensors, edges are operators."""
