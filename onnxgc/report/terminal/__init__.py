"""Tables and plots for terminals."""
