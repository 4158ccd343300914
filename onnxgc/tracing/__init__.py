"""Tracing: from a differentiated model to the step graph, the computation graph and durations."""
