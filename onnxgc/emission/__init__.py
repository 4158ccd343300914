"""From a schedule and gradient rules to one portable training graph."""
