"""Networks as values and axes, independent of how an exporter spells them."""
