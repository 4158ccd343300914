"""Opsets at which operators began to take settings as inputs in place of attributes."""

CLIP_LIMITS_AS_INPUTS = 11
SETTINGS_AS_INPUTS = 13
"""Split, Squeeze, Unsqueeze and ReduceSum take sizes and axes as inputs."""
REDUCED_AXES_AS_INPUTS = 18
"""The other reductions take their axes as an input."""
