"""Tables and lines that terminals and pages share."""
